"""The oracle on vLLM's V2 model runner, whose kernels Triton's interpreter runs here."""

from typing import Any

import pytest

from tests.support.oracle_children import assert_clean, run_child

ON_V2 = [
    "preemption and prefixes",
    "K by batch, to 6",
    "sampled drafts",
    "grammars, overlapped",
    "replayed, K=6",
    "replayed, K by batch",
    "sliding modules",
]


def on_v2() -> dict[str, Any]:
    return run_child("schedules", runner="v2", count=len(ON_V2), seed=5, setups=ON_V2)


def test_on_the_v2_runner_every_row_and_every_draft_is_right() -> None:
    report = on_v2()
    assert_clean(report)
    assert report["rows_checked"] > 40_000
    assert report["drafts_checked"] > 1_000
    assert report["rows_unread"] > 1_000


def test_everything_that_the_schedules_are_for_happened_on_the_v2_runner() -> None:
    events = on_v2()["events"]
    assert {"0", "1", "2", "3", "4", "5", "6"} <= events.pop("rejections").keys()
    assert events.pop("skipped_passes") == events.pop("resets") == 0  # resets: test_prefixes.py
    assert [name for name, count in events.items() if count == 0] == []


FAULTS_ON_V2 = {
    "no_history": "two block sizes",
    "wrong_chunk_end": "two block sizes",
    "primary_block_size": "two block sizes",
}


@pytest.mark.parametrize("fault", FAULTS_ON_V2)
def test_on_the_v2_runner_it_sees_a_fault_and_nothing_without_it(fault: str) -> None:
    cases = list(FAULTS_ON_V2.items())
    cases += [("none", engine) for engine in sorted(set(FAULTS_ON_V2.values()))]
    reports: Any = run_child("faults", runner="v2", seed=1, cases=cases)
    assert_clean(reports[cases.index(("none", FAULTS_ON_V2[fault]))])
    assert reports[list(FAULTS_ON_V2).index(fault)]["rows_mismatched"] > 0


def test_it_sees_what_vllms_own_speculator_leaves_stale_where_the_number_of_drafts_changes() -> None:
    setups = ["K by batch, from 0", "grammars"]
    report = run_child("schedules", "upstream", "v2", count=2, seed=1, setups=setups)
    assert report["mismatched_by_module"].keys() >= {"1", "2"}
    assert "a draft that has since been replaced" in report["first_mismatch"]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_graphs_go_before_the_processes_that_they_communicate_between(runner: str) -> None:
    assert run_child("graphs_after_shutdown", runner=runner, setup="chunks") is False
