"""Prefix hits under the oracle: no row and no draft is wrong, however requests part, for our drafters and vLLM's."""

from typing import Any

from bench.oracle.prefixes import ALONE, PARTINGS
from tests.support.oracle_children import run_child

OURS = ["prefixes", "prefixes, few blocks"]
HOSTS = ["prefixes, vLLM's own", "vLLM's own, to the end"]


def on_v1() -> dict[str, Any]:
    return run_child("schedules", count=4, seed=1, setups=[*OURS, *HOSTS])


def assert_nothing_wrong(report: dict[str, Any]) -> None:
    assert report["rows_mismatched"] == report["drafts_mismatched"] == 0, report["mismatches"]
    assert report["hits_mismatched"] == 0, report["mismatches"]
    assert report["rows_unwritten"] == report["events"]["skipped_passes"] == 0


def test_after_prefix_hits_every_row_and_every_draft_is_right() -> None:
    report = on_v1()
    assert_nothing_wrong(report)
    assert report["rows_checked"] > 50_000
    assert report["drafts_checked"] > 1_000


def test_requests_with_hits_part_in_every_way_that_there_is() -> None:
    events = on_v1()["events"]
    assert set(events["partings"]) == set(PARTINGS)
    assert ALONE not in events["partings"]
    assert events["resets"] > 0
    assert events["at_max_model_len"] > 0


def test_a_row_that_vllms_own_proposer_writes_wrong_or_not_at_all_ends_up_in_blocks_that_are_reused() -> None:
    cases = [("hosts_chunk_ends", HOSTS[0]), ("hosts_limit", HOSTS[1])]
    chunk_ends, limit = run_child("faults", seed=1, cases=cases)
    assert chunk_ends["rows_mismatched"] > 0
    assert limit["events"]["skipped_passes"] > 0
    assert limit["rows_unwritten"] > 0
