"""Step-3.5: chained modules, each one decoder layer with a head of its own, over full and sliding KV cache groups."""

from typing import TYPE_CHECKING, Any

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

if TYPE_CHECKING:
    import torch


def _restore_layer_types(config: Any) -> None:
    """The attention types of the MTP layers, which vLLM 0.32 cuts off (`proposers/host/start_up.py`).

    Raises:
        ValueError: there are fewer than layers. Whether one slides can't be told from its weights.
    """
    extra = getattr(config, "mtp_layer_types", None)
    types, num_layers = config.layer_types, config.num_hidden_layers
    if extra and len(types) == num_layers:
        config.layer_types = types = [*types, *extra]
    modules = getattr(config, "num_nextn_predict_layers", None) or 0
    if len(types) < num_layers + modules:
        raise ValueError(
            f"layer_types has {len(types)} entries in the config of {config.name_or_path}, and the model has "
            f"{num_layers} layers and {modules} MTP modules, {num_layers + modules} in all. Name the attention of the "
            "modules, too, in the checkpoint's config.json or by --hf-overrides."
        )


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
