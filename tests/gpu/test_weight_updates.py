"""New weights under recorded passes, which know them by where they lie."""

import pytest

from tests.engine.test_weight_updates import assert_served_on
from tests.gpu.test_modules import ENGINE
from tests.support import weights
from tests.support.engine import mtp, run

RECORDED = {
    **ENGINE,
    **weights.ENGINE,
    **mtp(3, attention_backend="TRITON_ATTN"),
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("which", ["draft", "target", "reload"])
def test_recorded_passes_draft_by_new_weights_and_as_before_by_the_old_ones(which: str, v2: bool) -> None:
    value = run(weights.updated, RECORDED, v2=v2, which=which, max_tokens=40).value
    assert all(value[step]["replays"] > 0 for step in ("before", "noise", "after", "after again"))
    assert_served_on(value, which)


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_an_engine_that_has_slept_without_its_weights_drafts_as_before_once_they_are_loaded(v2: bool) -> None:
    value = run(weights.slept, RECORDED | {"enable_sleep_mode": True}, v2=v2).value
    assert value["before"]["replays"] > 0
    assert value["after"] == value["before"]
