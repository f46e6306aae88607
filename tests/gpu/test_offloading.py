"""Blocks that vLLM's offloading connector brings back from host memory, with the draft rows that are in them."""

import pytest

from tests.support import scenarios
from tests.support.engine_arguments import ENGINE_ON_CUDA, mtp, offloading
from tests.support.forked_engine import run


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_blocks_come_back_from_host_memory_with_their_draft_rows(v2: bool) -> None:
    engine = ENGINE_ON_CUDA | mtp(3, attention_backend="TRITON_ATTN") | offloading()
    done = run(scenarios.offloaded, engine, v2=v2)
    assert done.value["proposer"].startswith("proposers.")
    scenarios.assert_brought_back(done.value)
    assert "OffloadingConnector may count on vLLM's keys" in done.log
