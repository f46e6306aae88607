"""What a checkpoint's tensors say of its modules."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture
from proposers.checkpoint import count_modules, settle_modules, tensor_files

BY_LAYER, BY_MODULE = "model.layers.{layer}.", "model.mtp.layers.{module}."


@pytest.mark.parametrize(
    ("names", "template", "count"),
    [
        (["model.layers.1.x", "model.layers.2.x", "model.layers.3.x", "model.layers.3.y"], BY_LAYER, 2),
        (["model.layers.1.x"], BY_LAYER, 0),
        (["model.layers.2.x", "model.layers.4.x"], BY_LAYER, 1),  # the one between them is not there
        (["model.language_model.model.layers.2.x"], BY_LAYER, 1),
        (["model.mtp.layers.0.x", "model.mtp.layers.1.x"], BY_MODULE, 2),
        (["premodel.mtp.layers.0.x", "modelxmtp.layers.1.x"], BY_MODULE, 0),
    ],
)
def test_modules_are_counted_from_the_first_on(names: list[str], template: str, count: int) -> None:
    assert count_modules(names, template, num_layers=2) == count


def entry(key: str | None = "num_nextn_predict_layers") -> Architecture:
    return Architecture(DraftDescriptor("Draft", modules_key=key), module_weights=BY_MODULE)


def write(folder: Path, modules: int, sharded: bool = False) -> None:
    names = ["model.norm.weight", *(f"model.mtp.layers.{i}.enorm.weight" for i in range(modules))]
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    if sharded:
        index = {"weight_map": dict.fromkeys(names, "model.safetensors") | {"lm_head.weight": "missing.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def settled(folder: Path, key: str | None = "num_nextn_predict_layers", **given: Any) -> PreTrainedConfig:
    before = PreTrainedConfig(name_or_path=str(folder), num_hidden_layers=2, **given)
    config = PreTrainedConfig(num_nextn_predict_layers=1, n_predict=1)  # vLLM's, whatever was given
    settle_modules(entry(key), config, before)
    return config


def test_a_config_without_a_number_has_the_files_number(tmp_path: Path) -> None:
    write(tmp_path, 3)
    config = settled(tmp_path)
    assert (config.num_nextn_predict_layers, config.n_predict) == (3, 3)


def test_a_config_with_a_number_keeps_it(tmp_path: Path) -> None:
    write(tmp_path, 3)
    config = settled(tmp_path, num_nextn_predict_layers=2)
    assert (config.num_nextn_predict_layers, config.n_predict) == (2, 2)


@pytest.mark.parametrize("said", [0, 4])
def test_a_number_that_the_files_do_not_have_is_refused_with_both(tmp_path: Path, said: int) -> None:
    write(tmp_path, 3)
    with pytest.raises(ValueError, match=rf"There are 3 MTP modules .* num_nextn_predict_layers={said}\. .*: 3\}}'"):
        settled(tmp_path, num_nextn_predict_layers=said)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", None])
def test_a_checkpoint_without_modules_is_refused(tmp_path: Path, key: str | None) -> None:
    write(tmp_path, 0)
    with pytest.raises(ValueError, match="There are no MTP modules"):
        settled(tmp_path, key, num_nextn_predict_layers=1)


def test_a_checkpoint_of_which_files_are_missing_is_refused_by_their_names(tmp_path: Path) -> None:
    write(tmp_path, 1, sharded=True)
    with pytest.raises(ValueError, match=r"lacks missing\.safetensors"):
        settled(tmp_path)


def test_weights_that_are_made_up_are_not_asked(tmp_path: Path) -> None:
    assert tensor_files(str(tmp_path)) is None
    assert settled(tmp_path).num_nextn_predict_layers == 1
    assert settled(tmp_path, num_nextn_predict_layers=3).num_nextn_predict_layers == 3  # as benchmarks give it
    unnamed = SimpleNamespace(name_or_path="")
    settle_modules(entry(), PreTrainedConfig(), unnamed)
