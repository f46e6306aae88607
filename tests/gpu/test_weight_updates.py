"""New weights under captured passes, which know them by where they lie."""

import pytest

from tests.support import weights
from tests.support.engine_arguments import ENGINE_ON_CUDA, mtp
from tests.support.forked_engine import run

CAPTURED = {
    **ENGINE_ON_CUDA,
    **weights.ENGINE,
    **mtp(3, attention_backend="TRITON_ATTN"),
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("which", ["draft", "target", "reload"])
def test_captured_passes_draft_by_new_weights_and_as_before_by_the_old_ones(which: str, v2: bool) -> None:
    value = run(weights.updated, CAPTURED, v2=v2, which=which, max_tokens=40).value
    assert all(value[step]["replays"] > 0 for step in ("before", "noise", "after", "after again"))
    weights.assert_served_on(value, which)


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_an_engine_that_has_slept_without_its_weights_drafts_as_before_once_they_are_loaded(v2: bool) -> None:
    value = run(weights.slept, CAPTURED | {"enable_sleep_mode": True}, v2=v2).value
    assert value["before"]["replays"] > 0
    assert value["after"] == value["before"]
