"""Calls of `tests.support.oracle_child`, for the tests."""

from typing import Any

from tests.support import forked_engine


def run_child(function: str, mode: str = "on", runner: str = "v1", **arguments: Any) -> Any:
    """Calls a function of `tests.support.oracle_child` in a fresh process; equal calls are made once."""
    return forked_engine.call(f"tests.support.oracle_child:{function}", mode=mode, v2=runner == "v2", **arguments)


def assert_clean(report: dict[str, Any]) -> None:
    assert report["rows_mismatched"] == report["drafts_mismatched"] == 0, report["mismatches"]
    assert report["slots_mismatched"] == report["hits_mismatched"] == 0, report["mismatches"]
    assert report["rows_excused"] == report["rows_unwritten"] == 0
    assert report["rows_checked"] > 0
    assert report["drafts_checked"] > 0
    assert report["slots_checked"] > 0
