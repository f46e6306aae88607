"""Qwen3.5: chained modules, each one full layer, behind a target of delta nets and full layers."""

from typing import Any

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture


def _count_modules(config: Any) -> None:
    """Under the name that vLLM asks for: where modules are chained, prompts keep tokens to look ahead to."""
    for named in (config, config.get_text_config()):
        if count := getattr(named, "mtp_num_hidden_layers", None):
            config.num_nextn_predict_layers = count
            return


ARCHITECTURE = Architecture(
    DraftDescriptor("Qwen3_5MTP", modules_key="num_nextn_predict_layers"),
    model_class="proposers.models.qwen3_5_modules:ChainedQwen3_5MTP",
    override_config=_count_modules,
    module_weights="mtp.layers.{module}.",
    counted_by="mtp_num_hidden_layers",
)
