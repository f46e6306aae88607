"""Prefix hits under the oracle: no row and no draft is wrong, however requests part, for our drafters and vLLM's."""

from typing import Any

from bench.oracle.prefixes import ADAPTED, ALONE, PARTINGS
from tests.support.oracle_children import assert_clean, run_child

OURS = ["prefixes", "prefixes, few blocks", "prefixes, adapters"]
HOSTS = ["prefixes, vLLM's own", "vLLM's own, to the end"]


def on_v1() -> dict[str, Any]:
    return run_child("schedules", count=5, seed=1, setups=[*OURS, *HOSTS])


def test_after_prefix_hits_every_row_and_every_draft_is_right() -> None:
    report = on_v1()
    assert_clean(report)
    assert report["events"]["skipped_passes"] == 0
    assert report["rows_checked"] > 50_000
    assert report["drafts_checked"] > 1_000


def test_requests_with_hits_part_in_every_way_that_there_is() -> None:
    events = on_v1()["events"]
    assert set(events["partings"]) == {*PARTINGS, ADAPTED}
    assert ALONE not in events["partings"]
    assert events["resets"] > 0
    assert events["at_max_model_len"] > 0


def test_a_row_that_vllms_own_proposer_writes_wrong_or_not_at_all_ends_up_in_blocks_that_are_reused() -> None:
    cases = [("hosts_chunk_ends", HOSTS[0]), ("hosts_limit", HOSTS[1])]
    chunk_ends, limit = run_child("faults", seed=1, cases=cases)
    assert chunk_ends["rows_mismatched"] > 0
    assert limit["events"]["skipped_passes"] > 0
    assert limit["rows_unwritten"] > 0
