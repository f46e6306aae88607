"""MiMo-V2 (Flash, Pro, V2.5, Omni): modules that each take the target's hidden states, over sliding KV cache groups.

vLLM builds the first module of a checkpoint only, and drafts with it again and again.
"""

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture


def _entry(architecture: str, model_class: str) -> Architecture:
    return Architecture(
        DraftDescriptor(architecture, modules_key="num_nextn_predict_layers", hidden_states_flow=False),
        model_class=f"proposers.models.mimo_v2_modules:{model_class}",
        module_weights="model.mtp.layers.{module}.",
    )


ARCHITECTURES = (_entry("MiMoV2MTPModel", "MiMoV2Modules"), _entry("MiMoV2OmniMTPModel", "MiMoV2OmniModules"))
