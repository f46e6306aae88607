"""Step-3.5: chained modules, each one decoder layer with a head of its own, over full and sliding KV cache groups."""

from typing import TYPE_CHECKING, Any

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

if TYPE_CHECKING:
    import torch


def _restore_layer_types(config: Any) -> None:
    """The attention types of the MTP layers, which vLLM 0.32 cuts off (`proposers/host/start_up.py`)."""
    extra = getattr(config, "mtp_layer_types", None)
    if extra and len(config.layer_types) == config.num_hidden_layers:
        config.layer_types = [*config.layer_types, *extra]


def _fuse(model: Any) -> bool:
    from proposers.models.step3p5_modules import fuse_modules

    return fuse_modules(model)


def _top_tokens(model: Any, hidden: "torch.Tensor", module: int) -> "torch.Tensor":
    """vLLM's Step3p5MTP has no such method, so the module's head is asked directly."""
    predictor = model.model
    head = predictor.layers[str(predictor.mtp_start_layer_idx + module)].shared_head
    tokens: torch.Tensor = predictor.logits_processor.get_top_tokens(head.head, head(hidden))
    return tokens


ARCHITECTURE = Architecture(
    DraftDescriptor("Step3p5MTP", modules_key="num_nextn_predict_layers", own_heads=True),
    override_config=_restore_layer_types,
    module_weights="model.layers.{layer}.",
    fuse=_fuse,
    top_tokens=_top_tokens,
    has_config_of_its_own=True,
)
