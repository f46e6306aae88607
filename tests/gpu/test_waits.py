"""No pass waits for the device: the host goes on to the next step while the GPU works on this one."""

import pytest

from tests.support.oracle_children import run_child


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_no_pass_waits_for_the_device(runner: str) -> None:
    for setup in ("chunks", "K by batch, from 0"):
        assert run_child("waits_for_the_device", runner=runner, setup=setup, num_prompts=6) == []
