"""The heads of a draft, where they are other than the host's: of a part of the vocabulary, of 8 bits, or both.

Outputs don't depend on a head that drafts: the target verifies. So what it reads is a free choice that acceptance
judges, and with a large vocabulary reading heads is most of what a draft costs. Scoring a part of the vocabulary is
FR-Spec's idea (arXiv 2502.14856).

Who owns what. A head of a module's own has its weight made anew where it lies, by the host's own way of processing a
loaded layer (`mtp/fp8.py` says how that outlasts updates). The target's stays as it is: drafts have a copy, to be
refreshed whenever the target's weights may have changed. Either way it is the host's `LogitsProcessor` that computes
logits and gathers those of tensor-parallel ranks; what it gets is a stand-in for the head. Ranks share the tokens
evenly, whichever rows of the full vocabulary they have.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbeddingShardIndices,
)

from mtp.kernels.fp8_weights import fp8_linear, quantise


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens that can be drafted; column i of a head's logits is token `token_ids[i]`.

    Attributes:
        token_ids: `[size]` int64, ascending, but that the last may be repeated so that all ranks have as many.
        vocab_size: of the model.
    """

    token_ids: torch.Tensor
    vocab_size: int

    @classmethod
    def of(cls, token_ids: list[int], vocab_size: int, device: torch.device) -> "DraftVocabulary":
        """Of token ids in ascending order, for the ranks of this process's group."""
        padding = -len(token_ids) % get_tensor_model_parallel_world_size()
        return cls(torch.tensor([*token_ids, *token_ids[-1:] * padding], device=device), vocab_size)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens `[..., vocab_size]`, from those of the list: no other can be drawn."""
        spread = logits.new_full((*logits.shape[:-1], self.vocab_size), -float("inf"))
        spread[..., self.token_ids] = logits
        return spread

    def shard(self) -> slice:
        """Of `token_ids`: this rank's."""
        size = len(self.token_ids) // get_tensor_model_parallel_world_size()
        first = get_tensor_model_parallel_rank() * size
        return slice(first, first + size)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What a draft's heads are to be.

    Attributes:
        vocabulary: None: all tokens.
        fp8: weights of 8 bits.
    """

    vocabulary: DraftVocabulary | None = None
    fp8: bool = False

    @property
    def changes_heads(self) -> bool:
        return self.vocabulary is not None or self.fp8

    def make(self, head: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight that a draft reads, and its scales, from a loaded head's."""
        weight = head.weight.data if self.vocabulary is None else _rows(head, self.vocabulary)
        return quantise(weight) if self.fp8 else (weight, None)

    def shard_indices(self, head: Any) -> Any:
        """Where the columns of this rank's logits lie among all."""
        if self.vocabulary is None:
            return head.shard_indices
        shard = self.vocabulary.shard()
        return VocabParallelEmbeddingShardIndices(*(shard.start, shard.stop, 0, 0) * 2)


def _rows(head: Any, vocabulary: DraftVocabulary) -> torch.Tensor:
    """This rank's share of the vocabulary's rows, out of the ranks' shards of the head."""
    weight: torch.Tensor = head.weight.data
    token_ids = vocabulary.token_ids.to(weight.device)
    if head.tp_size == 1:
        return weight[token_ids]
    indices = head.shard_indices
    here = (token_ids >= indices.org_vocab_start_index) & (token_ids < indices.org_vocab_end_index)
    rows = weight.new_zeros(len(token_ids), weight.shape[1])
    rows[here] = weight[token_ids[here] - indices.org_vocab_start_index]
    share: torch.Tensor = tensor_model_parallel_all_reduce(rows)[vocabulary.shard()].clone()
    return share


def _product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight) if scale is None else fp8_linear(x, weight, scale)


class OwnHead(QuantizeMethodBase):
    """The method of a head that is a module's own."""

    def __init__(self, options: HeadOptions) -> None:
        self.options = options

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the weights of a head are created by the method that this one takes the place of")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight, scale = self.options.make(layer)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if scale is not None:
            layer.weight_scale = nn.Parameter(scale, requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = _product(x, layer.weight, layer.weight_scale if self.options.fp8 else None)
        return out if bias is None else out + bias


class StandIn:
    """What the host's `LogitsProcessor` gets for a head, of which it asks no more than there is here."""

    def __init__(self, head: Any, options: HeadOptions) -> None:
        self.head, self.options = head, options
        self.tp_size, self.shard_indices = head.tp_size, options.shard_indices(head)

    @property
    def quant_method(self) -> "StandIn":
        return self

    def apply(self, _: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.head.quant_method.apply(self.head, x, bias)
        return out

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.head.weight
        return weight

    def refresh(self) -> None:
        """To be called when the target's weights may have changed."""


class Copy(StandIn):
    """Of the target's head, which stays as it is."""

    def __init__(self, head: Any, options: HeadOptions) -> None:
        super().__init__(head, options)
        self._weight, self._scale = options.make(head)

    @property
    def weight(self) -> torch.Tensor:
        return self._weight

    def apply(self, _: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = _product(x, self._weight, self._scale)
        return out if bias is None else out + bias

    def refresh(self) -> None:
        # In place: captured passes know the copy by where it lies.
        weight, scale = self.options.make(self.head)
        self._weight.copy_(weight)
        if self._scale is not None and scale is not None:
            self._scale.copy_(scale)


def remake_when_loaded(model: nn.Module, options: HeadOptions) -> None:
    """Has all heads of a model that is about to be loaded, which are its own, made what they are to be."""
    for head in _heads(model):
        if is_unquantised(head):
            head.quant_method = OwnHead(options)


def stand_in_for_heads(model: nn.Module, options: HeadOptions) -> list[StandIn]:
    """Has a loaded draft compute logits by heads that are what they are to be.

    Raises:
        ValueError: there is a head of which no part can be taken, since it is quantised.
    """
    stand_ins: dict[int, StandIn] = {}
    for head in _heads(model):
        if isinstance(head.quant_method, OwnHead):
            stand_ins[id(head)] = StandIn(head, options)
        elif is_unquantised(head):
            stand_ins[id(head)] = Copy(head, options)
        elif options.vocabulary is not None:
            raise ValueError(
                f"The draft's head is quantised ({type(head.quant_method).__name__}), and draft_vocabulary takes rows "
                "of one that is not. Leave the option out, or serve a checkpoint whose head is not quantised."
            )
    for processor in model.modules():
        if isinstance(processor, LogitsProcessor):
            for name in ("forward", "get_top_tokens"):
                setattr(processor, name, functools.partial(_for_stand_in, getattr(processor, name), stand_ins))
    return list(stand_ins.values())


def _for_stand_in(
    original: Callable[..., Any], stand_ins: dict[int, StandIn], lm_head: Any, *args: Any, **kwargs: Any
) -> Any:
    return original(stand_ins.get(id(lm_head), lm_head), *args, **kwargs)


def _heads(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ParallelLMHead)]


def is_unquantised(head: Any) -> bool:
    return type(head.quant_method) in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
