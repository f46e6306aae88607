"""Calls of `tests.support.oracle_child`, for the tests."""

import functools
import json
import sys
from typing import Any

from tests.support.children import run_command


def run_child(function: str, mode: str = "on", runner: str = "v1", **arguments: Any) -> Any:
    """Calls a function of `tests.support.oracle_child` in a fresh process; equal calls are made once."""
    return _run_once(function, mode, runner, json.dumps(arguments, sort_keys=True))


@functools.cache
def _run_once(function: str, mode: str, runner: str, arguments: str) -> Any:
    command = [sys.executable, "-m", "tests.support.oracle_child", function, arguments]
    chosen = str(int(runner == "v2"))  # else CUDA has V2 by default
    child = run_command(command, MTP_PROPOSERS=mode, VLLM_USE_V2_MODEL_RUNNER=chosen)
    assert child.returncode == 0, child.stderr[-6000:]
    return json.loads(child.stdout.splitlines()[-1])


def assert_clean(report: dict[str, Any]) -> None:
    assert report["rows_mismatched"] == report["drafts_mismatched"] == 0, report["mismatches"]
    assert report["slots_mismatched"] == 0, report["mismatches"]
    assert report["rows_excused"] == report["rows_unwritten"] == 0
    assert report["rows_checked"] > 0
    assert report["drafts_checked"] > 0
    assert report["slots_checked"] > 0
