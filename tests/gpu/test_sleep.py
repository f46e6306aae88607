"""Recorded passes after sleep mode: weights and KV cache come back where the graphs know them."""

import pytest

from tests.gpu.test_modules import ENGINE
from tests.support import scenarios
from tests.support.engine import mtp, run


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_an_engine_drafts_after_its_sleep_as_before(runner: str) -> None:
    engine = {
        **ENGINE,
        **mtp(3, attention_backend="TRITON_ATTN"),
        "enforce_eager": False,
        "enable_sleep_mode": True,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    slept = run(scenarios.slept, engine, v2=runner == "v2").value
    assert slept["before"]["replays"] > 0
    assert slept["after"] == slept["before"]
