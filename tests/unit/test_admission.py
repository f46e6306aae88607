"""What gets a record while an engine serves: all of it or none of it, by share, budget, quota and the disk's pace."""

import time
from pathlib import Path
from typing import Any

import pytest

from proposers.hidden_states import admission
from proposers.hidden_states.admission import BUDGET, LAG, QUOTA, Admission
from proposers.hidden_states.request import Settings


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(root: Path, clock: Clock | None = None, waits: bool = False, **settings: Any) -> Admission:
    return Admission(Settings(storage_root=str(root), **settings), waits, clock or Clock())


def test_a_share_is_the_same_requests_each_time(tmp_path: Path) -> None:
    ids = [f"cmpl-{i}" for i in range(2000)]
    taken = [[i for i in ids if make(tmp_path, sample_rate=rate).is_sampled(i)] for rate in (0.2, 0.2, 0.5)]
    assert taken[0] == taken[1]
    assert set(taken[0]) < set(taken[2])
    assert 0.17 < len(taken[0]) / 2000 < 0.23


def test_a_budget_is_kept_over_time_and_overdrawn_by_one_record_at_most(tmp_path: Path) -> None:
    clock = Clock()
    records = make(tmp_path, clock, bytes_per_second=100)
    admitted = 0
    for tick in range(1000):
        clock.now = tick / 10
        admitted += 30 * (records.admit(f"{tick}", 30) is None)
    assert 100 * 100 <= admitted <= 100 * 100 + 100 + 30
    clock.now += 1000  # a quiet time saves up no more than a second
    assert [records.admit(f"later {i}", 60) for i in range(3)] == [None, None, BUDGET]


def test_a_disk_that_is_behind_by_the_ring_skips_whole_records_until_it_has_caught_up(tmp_path: Path) -> None:
    records = make(tmp_path, ring_bytes=100)
    assert [records.admit(name, 60) for name in "ab"] == [None, LAG]
    records.drained(30)
    assert records.admit("c", 70) is None
    assert records.backlog_bytes == 100
    records.drained(130)
    # A record that is longer than the ring goes alone.
    assert [records.admit("d", 300), records.admit("e", 1)] == [None, LAG]
    waiting = make(tmp_path, waits=True, ring_bytes=100)
    assert [waiting.admit(name, 60) for name in "ab"] == [None, None]


def test_a_quota_counts_what_lies_there_and_says_when_it_is_reached_and_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    old = tmp_path / "run-0" / "old.safetensors"
    old.parent.mkdir()
    old.write_bytes(bytes(500))
    caplog.set_level("INFO", logger="vllm.proposers.hidden_states")
    records = make(tmp_path, clock, disk_quota_bytes=1000)
    assert [records.admit(name, 200) for name in "abcd"] == [None, None, QUOTA, QUOTA]
    assert records.quota_reached
    records.settle("a", 200)
    records.settle("b", 0)  # a failed record takes no room
    assert records.admit("e", 200) is None
    assert not records.quota_reached
    assert records.admit("f", 200) == QUOTA
    old.unlink()
    clock.now += 2 * admission.RECOUNT_S
    assert records.admit("g", 200) == QUOTA  # it is counted in the background
    deadline = time.monotonic() + 10
    while records.admit("h", 200) == QUOTA and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not records.quota_reached
    messages = [record.getMessage() for record in caplog.records]
    assert sum("Move records away, or raise the quota" in message for message in messages) == 2
    assert sum("There is room under disk_quota_bytes=1000 again" in message for message in messages) == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"sample_rate": 1.5}, "sample_rate=1.5: it is a share up to 1"),
        ({"sample_rate": 0}, "sample_rate=0: it has to be above 0"),
        ({"bytes_per_second": 0.5}, "bytes_per_second=0.5, which is no int"),
        ({"disk_quota_bytes": -1}, "disk_quota_bytes=-1: it has to be above 0"),
        ({"wait_for_records": 1}, "wait_for_records=1, which is no bool"),
    ],
)
def test_settings_of_serving_that_mean_nothing_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of({"storage_root": "x"} | extra)
