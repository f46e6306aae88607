"""Copies of small checkpoints with tensors left out, or quantised as compressed-tensors stores int8 weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def copy_checkpoint(source: str, folder: Path, change: Callable[[Weights], Weights], **config: Any) -> str:
    """Writes what `change` makes of the weights, and the config with these entries, of which None leaves one out.

    Returns:
        the copy's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(source).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file)
    given = json.loads(Path(source, "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    save_file(change(load_file(Path(source, "model.safetensors"))), folder / "model.safetensors")
    return str(folder)


def without(source: str, folder: Path, *names: str, **config: Any) -> str:
    """A checkpoint that lacks these tensors, each of which must be there."""

    def change(weights: Weights) -> Weights:
        for name in names:
            del weights[name]
        return weights

    return copy_checkpoint(source, folder, change, **config)


def quantised(source: str, folder: Path, ignore: list[str], keep: str, lacking: str = "never") -> str:
    """The linear layers in int8, but for those whose tensors match `keep`.

    Args:
        ignore: of the quantization config.
        lacking: a pattern of tensors that are left out.
    """

    def change(weights: Weights) -> Weights:
        made: Weights = {}
        for name, tensor in weights.items():
            if not re.search(r"_proj\.weight$", name) or re.search(keep, name):
                made[name] = tensor
                continue
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            made[name] = (tensor.float() / scale).round().to(torch.int8)
            made[f"{name}_scale"] = scale
        return {name: tensor for name, tensor in made.items() if not re.search(lacking, name)}

    return copy_checkpoint(source, folder, change, quantization_config=W8A8 | {"ignore": ignore})
