"""Checkpoints made from another, for what the tiny one can't show."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def widen_sliding_layers(model: Path, folder: Path) -> None:
    """Writes a checkpoint that computes the same with twice as many key and value heads in its sliding layers.

    Each head stands there twice, and half as many query heads share it. The sliding layers' rows then take twice the
    room of the others', so vLLM gives the groups blocks of different sizes.
    """
    for path in model.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((model / "config.json").read_text())
    other = config["attention_other_setting"]
    head_dim = other["head_dim"]
    tensors = load_file(model / WEIGHTS)
    for layer, kind in enumerate(config["layer_types"]):
        for name in ("k_proj", "v_proj") if kind == other["attention_type"] else ():
            key = f"model.layers.{layer}.self_attn.{name}.weight"
            heads = tensors[key].unflatten(0, (-1, head_dim))
            tensors[key] = heads.repeat_interleave(2, dim=0).flatten(0, 1).contiguous()
    other["num_attention_groups"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
