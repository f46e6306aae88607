"""Checkpoints and drafters for what the tiny model can't show."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench import reference
from bench.oracle.schedules import Setup
from bench.reference import mimo_checkpoint as mimo
from bench.reference.cheap import make_cheap
from bench.reference.dense import DenseModel, read_config
from proposers.options import FROM_ENVIRONMENT

WEIGHTS = "model.safetensors"
ADAPTER = "adapter"
"""The folder of a checkpoint's LoRA adapter, in that of the checkpoint."""


@contextmanager
def checkpoint(model: Path, setup: Setup) -> Iterator[Path]:
    """A context with the folder of the setup's checkpoint: `model`, what is made of it, or a MiMo of its vocabulary."""
    if setup.checkpoint == "tiny":
        yield model
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        if setup.checkpoint == "wide":
            widen_sliding_layers(model, folder)
        elif setup.checkpoint == "sliding":
            slide_modules(model, folder)
        elif setup.checkpoint == "narrow":
            narrow_values(model, folder)
        else:
            mimo.write_checkpoint(folder, read_config(model)["vocab_size"])
        if setup.adapters:
            mimo.write_adapter(folder / ADAPTER)
        yield folder


def dense_model(folder: Path, setup: Setup, dtype: str) -> DenseModel:
    """The reference of a setup's checkpoint, on engines of that dtype."""
    if not setup.hidden_states_flow:
        return DenseModel(folder, hidden_states_flow=False)
    dense = reference.dense_model(folder)
    return make_cheap(dense, drafted_tokens(len(dense.head)), getattr(torch, dtype)) if setup.cheap else dense


def adapted_model(folder: Path) -> DenseModel:
    """The reference of a checkpoint for requests with its adapter: W + scale * B A in place of W."""
    dense, tensors = reference.dense_model(folder), load_file(folder / ADAPTER / "adapter_model.safetensors")
    config = json.loads((folder / ADAPTER / "adapter_config.json").read_text())
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        layer, _, linear = name.partition(".layers.")[2].removesuffix(".lora_A.weight").partition(".")
        dense.target[int(layer)].weights[f"{linear}.weight"] += config["lora_alpha"] / config["r"] * b @ a
    return dense


def drafted_tokens(vocab_size: int) -> list[int]:
    """Two of three tokens, so that a column of a head is another token's than that of its number."""
    return [token for token in range(vocab_size) if token % 3]


@contextmanager
def cheap_drafts(folder: Path, setup: Setup) -> Iterator[None]:
    """Engines of this checkpoint that are built inside have the setup's draft weights and vocabulary."""
    if not setup.cheap:
        yield
        return
    config = read_config(folder)
    with TemporaryDirectory() as name:
        file = Path(name, "vocabulary.json")
        file.write_text(json.dumps(drafted_tokens(config.get("text_config", config)["vocab_size"])))
        chosen = {"draft_weights": "fp8", "draft_vocabulary": str(file)}
        with mock.patch.dict(os.environ, {FROM_ENVIRONMENT[option]: value for option, value in chosen.items()}):
            yield


@contextmanager
def drafter_of(setup: Setup) -> Iterator[None]:
    """Engines built inside have the setup's drafter.

    One of which every module takes the target's hidden states, as MiMo-V2's do, is Step-3.5's modules under another
    descriptor, and nothing else: drafts are worse than the trained chain's, and have to be what these modules make of
    the target's hidden states.
    """
    from proposers import architecture

    if setup.host:
        with mock.patch.object(architecture, "why_left_to_the_host", return_value="is not asked to draft"):
            yield
        return
    if setup.hidden_states_flow:
        yield
        return
    chained = architecture.known_architectures()["Step3p5MTP"]
    unchained = replace(chained, descriptor=replace(chained.descriptor, hidden_states_flow=False))
    with mock.patch.dict(architecture._registered, {chained.name: unchained}):
        yield


def widen_sliding_layers(model: Path, folder: Path) -> None:
    """Writes a checkpoint that computes the same with twice as many key and value heads in its sliding layers.

    Each head stands there twice, and half as many query heads share it. The sliding layers' rows then take twice the
    room of the others', so vLLM gives the groups blocks of different sizes.
    """
    config, tensors = _copied(model, folder)
    other = config["attention_other_setting"]
    head_dim = other["head_dim"]
    for layer, kind in enumerate(config["layer_types"]):
        for name in ("k_proj", "v_proj") if kind == other["attention_type"] else ():
            key = f"model.layers.{layer}.self_attn.{name}.weight"
            heads = tensors[key].unflatten(0, (-1, head_dim))
            tensors[key] = heads.repeat_interleave(2, dim=0).flatten(0, 1).contiguous()
    other["num_attention_groups"] *= 2
    _write(folder, config, tensors)


def slide_modules(model: Path, folder: Path, window: int = 24) -> None:
    """Writes a checkpoint in which module 0 slides, too: it has the attention of module 1, and a window is so short
    that drafts depend on a part of most prompts only.
    """
    config, tensors = _copied(model, folder)
    first = config["num_hidden_layers"]
    config["sliding_window"] = window
    for name in ("layer_types", "rope_theta", "partial_rotary_factors"):
        config[name][first] = config[name][first + 1]
    for name in [name for name in tensors if name.startswith(f"model.layers.{first + 1}.self_attn.")]:
        tensors[name.replace(f".{first + 1}.", f".{first}.")] = tensors[name].clone()
    _write(folder, config, tensors)


def narrow_values(model: Path, folder: Path) -> None:
    """Writes a MiMo-V2 checkpoint in which each head's values have the first half of their features only."""
    config, tensors = _copied(model, folder)
    head_dim = config["head_dim"]
    config |= {"v_head_dim": head_dim // 2, "swa_v_head_dim": head_dim // 2}
    for name, tensor in tensors.items():
        if name.endswith("self_attn.v_proj.weight"):
            tensors[name] = tensor.unflatten(0, (-1, head_dim))[:, : head_dim // 2].flatten(0, 1).contiguous()
        elif name.endswith("self_attn.o_proj.weight"):
            tensors[name] = tensor.unflatten(1, (-1, head_dim))[:, :, : head_dim // 2].flatten(1).contiguous()
    _write(folder, config, tensors)


def _copied(model: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint's config and weights, to be changed and then written; its other files are in the folder."""
    for path in model.glob("*.json"):
        shutil.copy(path, folder)
    return json.loads((model / "config.json").read_text()), load_file(model / WEIGHTS)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
