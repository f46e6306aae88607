"""MiMo-V2's draft with all modules of the checkpoint, where vLLM's model has the first one."""

from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.mimo_v2_mtp import MiMoV2MTP, MiMoV2MTPLayer, MiMoV2OmniMTP
from vllm.model_executor.models.utils import maybe_prefix

from proposers.architecture import architecture_of


class _AllModules(nn.Module):
    """Adds the modules after the first; loading, selecting and running one is vLLM's for any number."""

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


class MiMoV2Modules(_AllModules, MiMoV2MTP):
    """Of checkpoints of text."""


class MiMoV2OmniModules(_AllModules, MiMoV2OmniMTP):
    """Of checkpoints that take images too."""
