"""MiMo-V2's draft with all modules of the checkpoint, where vLLM's model has the first one."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.mimo_v2_mtp import MiMoV2MTP, MiMoV2MTPLayer, MiMoV2OmniMTP
from vllm.model_executor.models.utils import maybe_prefix

from proposers.architecture import architecture_of


class _AllModules(nn.Module):
    """Adds the modules after the first; selecting and running one is vLLM's for any number."""

    model: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        architecture = architecture_of(vllm_config.speculative_config)
        if architecture is None:
            return  # vLLM's own proposer drafts, which has a use for one
        count = architecture.descriptor.count_modules(vllm_config.speculative_config.draft_model_config.hf_config)
        # The target's config, as for the first module: the draft's own differs in what doesn't concern a layer.
        config, predictor = vllm_config.model_config.hf_config, self.model
        for module in range(predictor.num_mtp_layers, count):
            predictor.mtp.layers[str(module)] = MiMoV2MTPLayer(
                config=config,
                prefix=f"{maybe_prefix(prefix, 'model')}.mtp.layers.{module}",
                cache_config=vllm_config.cache_config,
                quant_config=vllm_config.quant_config,
            )
        predictor.num_mtp_layers = count

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(self._taken_apart(weights))  # type: ignore[misc]
        return loaded

    def _taken_apart(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Fused projections that are not quantised as three, of which each rank then takes its heads.

        vLLM's model gives every rank a slice of all rows instead, which for one rank only is right; its target has them
        as here: queries, then keys, then values. (Quantised ones come in another order, and are left to it.)
        """
        for name, tensor in weights:
            if ".mtp." in name and name.endswith(".o_proj.weight") and tensor.element_size() < 2:
                raise ValueError(
                    f"{name} is quantised ({tensor.dtype}), and vLLM builds the output projections of MiMo-V2's MTP "
                    "layers in 16 bits, into which it would copy these values without their scales. Use a checkpoint "
                    "that leaves them as they are, or serve without a speculative config."
                )
            prefix, found, kind = name.rpartition(".qkv_proj.")
            if not found or ".mtp." not in name or kind not in ("weight", "bias") or tensor.element_size() < 2:
                yield name, tensor
                continue
            attention: Any = self.get_submodule(prefix)
            heads = (attention.total_num_heads, attention.total_num_kv_heads, attention.total_num_kv_heads)
            head_sizes = (attention.head_dim, attention.head_dim, attention.v_head_dim)
            parts = tensor.split([count * size for count, size in zip(heads, head_sizes, strict=True)])
            for part, rows in zip("qkv", parts, strict=True):
                yield f"{prefix}.{part}_proj.{kind}", rows


class MiMoV2Modules(_AllModules, MiMoV2MTP):
    """Of checkpoints of text."""


class MiMoV2OmniModules(_AllModules, MiMoV2OmniMTP):
    """Of checkpoints that take images too."""
