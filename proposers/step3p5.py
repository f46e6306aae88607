"""Step-3.5: chained modules, each one decoder layer with a head of its own, over full and sliding KV cache groups."""

from typing import ClassVar

import torch
from vllm.config import VllmConfig, replace
from vllm.model_executor.models.utils import get_draft_quant_config

from mtp.layers import fuse_layers
from mtp.passes import DraftPasses
from mtp.proposer import MultiGroupProposer
from mtp.steps import DraftDescriptor


class Step3p5Passes(DraftPasses):
    """What is Step-3.5's own, on either runner."""

    descriptor: ClassVar = DraftDescriptor("Step3p5MTP", modules_key="num_nextn_predict_layers", own_heads=True)

    def prepare_model(self) -> None:
        fuse_layers(self.model, self.vllm_config)

    def top_tokens(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """The host's Step3p5MTP has no such method, so the module's head is asked directly."""
        predictor = self.model.model
        head = predictor.layers[str(predictor.mtp_start_layer_idx + module)].shared_head
        return predictor.logits_processor.get_top_tokens(head.head, head(hidden))


class Step3p5Proposer(Step3p5Passes, MultiGroupProposer):
    def _create_draft_vllm_config(self) -> VllmConfig:
        # Layers are built from the draft's config, which counts the modules in, and quantised by the draft's own.
        base = super()._create_draft_vllm_config()
        return replace(base, model_config=self.draft_model_config, quant_config=get_draft_quant_config(base))
