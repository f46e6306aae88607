"""New weights while serving, by vLLM's own ways: the draft's, the target's, and those of a checkpoint again."""

import pytest

from tests.support import weights
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import run

ENGINE = weights.ENGINE | mtp(3)


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("which", ["draft", "target", "reload"])
def test_an_engine_serves_on_with_new_weights_and_as_before_with_the_old_ones(which: str, v2: bool) -> None:
    arguments = {"which": which, "max_tokens": 8 if v2 else 24}
    value = run(weights.updated_as_with_kernels, ENGINE, v2=v2, **arguments).value
    weights.assert_served_on(value, which)
    # The first module has six heads, and with as many gates rows would not lie on 16 bytes.
    assert value["one GEMM"] == value["one GEMM after"] == [False, True, True]


def test_a_draft_whose_weights_vllm_has_packed_is_updated_too() -> None:
    weights.assert_served_on(run(weights.updated, ENGINE, which="draft", max_tokens=24).value, "draft")
