"""What a checkpoint's files say of its MTP layers, before anything of them is loaded."""

import re
from typing import Any

_MTP = re.compile(r"(^|\.)mtp[._]")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FLOATS = ("F64", "F32", "F16", "BF16")
_QUANTISED = re.compile(r"scale|zero_point|qweight|qzeros|g_idx|packed|quant")
"""In the last part of a tensor's name."""


def is_of_the_modules(name: str, num_target_layers: int) -> bool:
    """Whether a checkpoint's tensor is an MTP layer's: by name, or as a layer past the target's."""
    layer = _LAYER.search(f".{name}")
    return _MTP.search(name) is not None or (layer is not None and int(layer[1]) >= num_target_layers)


def is_of_quantisation(name: str, dtype: str) -> bool:
    return dtype not in _FLOATS or _QUANTISED.search(name.rpartition(".")[2]) is not None


def modules_are_unquantised(loader: Any, model_config: Any, num_target_layers: int) -> bool:
    """Whether the checkpoint has MTP layers and nothing quantised in them. False where its files don't tell.

    Args:
        loader: vLLM's `DefaultModelLoader`, which knows where the files are.
    """
    from safetensors import safe_open

    # As the load itself asks for them.
    _, files, use_safetensors, _ = loader._prepare_weights(model_config.model, None, model_config.revision, True, None)
    if not use_safetensors:
        return False
    found = False
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                if not is_of_the_modules(name, num_target_layers):
                    continue
                if is_of_quantisation(name, tensors.get_slice(name).get_dtype()):
                    return False
                found = True
    return found
