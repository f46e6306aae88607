"""What the options `draft_weights` and `draft_vocabulary` make of a draft model: fewer bytes to read in a pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger

from mtp.fp8 import Fp8Weights, quantise_when_loaded
from mtp.heads import Copy, DraftVocabulary, HeadOptions, remake_when_loaded, stand_in_for_heads
from proposers import draft_vocabulary
from proposers.options import Options

logger = init_logger(f"vllm.{__name__}")

MIB = 2**20


class CheapDrafts:
    """The options of one draft, and what they did to it.

    Attributes:
        vocabulary: None: all tokens can be drafted.
        fp8: linear layers and heads have weights of 8 bits.

    Raises:
        ValueError: at construction, when an option can't be had here.
    """

    loading: ClassVar["CheapDrafts | None"] = None
    """Of the draft that this process is loading; None where it is one of vLLM's own drafter, or there is none."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        options = Options.of(vllm_config)
        self.fp8 = options.draft_weights == "fp8"
        self.vocabulary: DraftVocabulary | None = None
        self._coverage: float | None = None
        if options.draft_vocabulary is not None:
            vocab_size = vllm_config.speculative_config.draft_model_config.get_vocab_size()
            ranks = vllm_config.parallel_config.tensor_parallel_size
            found = draft_vocabulary.read(options.draft_vocabulary, vocab_size, ranks)
            self.vocabulary = DraftVocabulary.of(found.token_ids, vocab_size, device)
            self._coverage = found.coverage
        self._dtype = vllm_config.model_config.dtype
        self._stand_ins: list[Any] = []
        if self.heads.changes_heads:
            _check(vllm_config, options)

    @property
    def heads(self) -> HeadOptions:
        return HeadOptions(self.vocabulary, self.fp8)

    @contextmanager
    def while_loading(self) -> Iterator[None]:
        CheapDrafts.loading = self
        try:
            yield
        finally:
            CheapDrafts.loading = None

    def before_load(self, model: nn.Module, own_heads: bool) -> None:
        """To be called with the draft model before its weights are loaded."""
        if self.fp8:
            others = quantise_when_loaded(model)
            if others:
                logger.warning(
                    "draft_weights=fp8 leaves %d layers of the draft as they are, which the checkpoint has quantised: "
                    "%s.",
                    len(others),
                    ", ".join(others[:4]) + (", ..." if len(others) > 4 else ""),
                )
        if own_heads and self.heads.changes_heads:
            remake_when_loaded(model, self.heads)

    def after_load(self, model: nn.Module) -> None:
        """To be called once the draft has what it shares with its target."""
        if not self.heads.changes_heads:
            return
        self._stand_ins = stand_in_for_heads(model, self.heads)
        self._say_what_is_saved(model)

    def refresh(self) -> None:
        """To be called when the target's weights may have changed."""
        for stand_in in self._stand_ins:
            stand_in.refresh()

    @property
    def copied_bytes(self) -> int:
        """Of heads that the draft has beside its target's."""
        return sum(stand_in.weight.nbytes for stand_in in self._stand_ins if isinstance(stand_in, Copy))

    def to_token_ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Tokens of columns of logits."""
        return columns if self.vocabulary is None else self.vocabulary.token_ids[columns]

    def to_all(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens."""
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)

    def _say_what_is_saved(self, model: nn.Module) -> None:
        modules: list[Any] = [x for x in model.modules() if type(getattr(x, "quant_method", None)) is Fp8Weights]
        layers = [module.weight for module in modules]
        heads = [(stand_in.weight, stand_in.head.num_embeddings_per_partition) for stand_in in self._stand_ins]
        full = sum(weight.numel() for weight in layers) + sum(rows * weight.shape[1] for weight, rows in heads)
        now = sum(weight.nbytes for weight in (*layers, *(weight for weight, _ in heads)))
        kept = sum(module.wide_weight.nbytes for module in modules)
        covered = ""
        if self.vocabulary is not None:
            known = "" if self._coverage is None else f", {100 * self._coverage:.2f} % of those counted"
            size, vocab_size = len(self.vocabulary.token_ids), self.vocabulary.vocab_size
            covered = f" Drafts are out of {size} of {vocab_size} tokens{known}."
        logger.info(
            "A pass of few rows reads %.0f MiB of the draft's heads%s on this rank instead of %.0f MiB.%s%s",
            now / MIB,
            " and linear layers" if layers else "",
            full * self._dtype.itemsize / MIB,
            f" {kept / MIB:.0f} MiB of these layers are kept in {8 * self._dtype.itemsize} bits, for other passes."
            if layers
            else "",
            covered,
        )


def _check(vllm_config: VllmConfig, options: Options) -> None:
    import vllm.envs as envs

    if options.draft_weights is not None and envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            "draft_weights=fp8 and VLLM_BATCH_INVARIANT=1 exclude each other: how products are summed up depends on "
            "the batch. Leave one of the two out."
        )
    head_dtype, dtype = vllm_config.model_config.head_dtype, vllm_config.model_config.dtype
    if head_dtype != dtype:
        raise ValueError(
            f"draft_weights and draft_vocabulary need heads of the model's dtype, {dtype}, and head_dtype is "
            f"{head_dtype}. Leave out these options, or head_dtype."
        )
