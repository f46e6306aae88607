"""Captured passes after sleep mode: weights and KV cache come back at the addresses that the graphs have."""

import pytest

from tests.support import scenarios
from tests.support.engine_arguments import ENGINE_ON_CUDA, mtp
from tests.support.forked_engine import run


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_an_engine_drafts_after_its_sleep_as_before(runner: str) -> None:
    engine = {
        **ENGINE_ON_CUDA,
        **mtp(3, attention_backend="TRITON_ATTN"),
        "enforce_eager": False,
        "enable_sleep_mode": True,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    slept = run(scenarios.slept, engine, v2=runner == "v2").value
    assert slept["before"]["replays"] > 0
    assert slept["after"] == slept["before"]
