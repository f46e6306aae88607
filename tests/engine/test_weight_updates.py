"""New weights while serving, by vLLM's own ways: the draft's, the target's, and those of a checkpoint again."""

from typing import Any

import pytest

from tests.support import weights
from tests.support.engine import mtp, run

ENGINE = weights.ENGINE | mtp(3)


def assert_served_on(value: dict[str, Any], which: str) -> None:
    before, noise = value["before"], value["noise"]
    assert value["fused"]
    assert before["accepted"] > 0
    if which == "draft":
        assert noise["tokens"] == before["tokens"]
        assert noise["accepted"] < before["accepted"] / 4
    else:
        assert noise["tokens"] != before["tokens"]
    assert value["after"] == value["after again"] == before
    assert value["moved"] == [], "what has been recorded reads the old places"


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("which", ["draft", "target", "reload"])
def test_an_engine_serves_on_with_new_weights_and_as_before_with_the_old_ones(which: str, v2: bool) -> None:
    arguments = {"which": which, "max_tokens": 8 if v2 else 24}
    value = run(weights.updated_as_with_kernels, ENGINE, v2=v2, **arguments).value
    assert_served_on(value, which)
    # The first module has six heads, and with as many gates rows would not lie on 16 bytes.
    assert value["one product"] == value["one product after"] == [False, True, True]


def test_a_draft_whose_weights_vllm_has_packed_is_updated_too() -> None:
    assert_served_on(run(weights.updated, ENGINE, which="draft", max_tokens=24).value, "draft")
