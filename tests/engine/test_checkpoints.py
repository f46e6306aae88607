"""Checkpoints whose config and files disagree on the modules: engines don't start, and say what is there."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.checkpoints import without
from tests.support.children import MIMO_V2, TINY
from tests.support.engine_arguments import ENGINE, mtp


def draft_config(model: str, k: int | None = 3, **more: Any) -> Any:
    arguments = {name: value for name, value in ENGINE.items() if name != "model"} | mtp(k, **more)
    config = EngineArgs(model=model, **arguments).create_engine_config()
    return config.speculative_config.draft_model_config.hf_config


@pytest.mark.parametrize("number", [0, 4])
def test_a_number_of_modules_that_the_files_do_not_have(tmp_path: Path, number: int) -> None:
    model = without(TINY, tmp_path, num_nextn_predict_layers=number)
    with pytest.raises(ValueError, match=rf"There are 3 MTP modules .* num_nextn_predict_layers={number}\."):
        draft_config(model)


def test_no_number_of_modules_is_none_in_step3p5s_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There are 3 MTP modules .* num_nextn_predict_layers=0\."):
        draft_config(without(TINY, tmp_path, num_nextn_predict_layers=None))


@pytest.mark.parametrize("entries", [6, 8])
def test_fewer_attention_types_than_layers(tmp_path: Path, entries: int) -> None:
    types = json.loads(Path(TINY, "config.json").read_text())["layer_types"]
    model = without(TINY, tmp_path, layer_types=types[:entries])
    with pytest.raises(ValueError, match=rf"layer_types has {entries} entries .* 6 layers and 3 MTP modules, 9 in all"):
        draft_config(model)


def test_vllms_proposers_have_of_mimo_v2_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_PROPOSERS", "upstream")
    assert draft_config(MIMO_V2).num_nextn_predict_layers == 1


def test_mimo_v2_has_as_many_modules_as_its_files(tmp_path: Path) -> None:
    config = draft_config(MIMO_V2)
    assert (config.num_nextn_predict_layers, config.n_predict) == (3, 3)
    assert draft_config(without(MIMO_V2, tmp_path, num_nextn_predict_layers=2), 2).num_nextn_predict_layers == 2
