"""What the demo concludes from what it measured."""

import io
from typing import Any

import pytest

from bench.demo import NAMES, Dots, conclude, format_table


def result_of(speeds: dict[str, dict[int, list[float]]]) -> dict[str, Any]:
    """A record in which each run made so many tokens in a second."""
    modes = {}
    for mode, by_batch in speeds.items():
        runs = [
            {"batch": batch, "seconds": 1.0, "output_tokens": speed} for batch, all in by_batch.items() for speed in all
        ]
        medians = {str(batch): {"median": sorted(all)[len(all) // 2]} for batch, all in by_batch.items()}
        modes[mode] = {"runs": runs, "output_tokens_per_s": medians, "acceptance_length": 1.0}
    return {"settings": {"batches": list(speeds["none"])}, "modes": modes}


@pytest.mark.parametrize("winner", NAMES)
def test_whoever_was_the_fastest_is_named(winner: str) -> None:
    speeds = {mode: {1: [100.0, 110.0, 105.0]} for mode in NAMES}
    speeds[winner] = {1: [200.0, 220.0, 210.0]}
    assert f"take {NAMES[winner]} with 1 request at a time." in conclude(result_of(speeds))


def test_each_batch_size_has_its_own_choice() -> None:
    speeds = {
        "none": {1: [100.0] * 3, 4: [400.0] * 3},
        "upstream": {1: [90.0] * 3, 4: [250.0] * 3},
        "ours": {1: [120.0] * 3, 4: [300.0] * 3},
    }
    assert conclude(result_of(speeds)) == (
        "To conclude: the tokens/s of this package over those of vLLM's proposer and of no speculation were 1.33 and "
        "1.20 times with 1 request at a time, and 1.20 and 0.75 times with 4 requests at a time, so for a model of "
        "this size on this machine take this package with 1 request at a time and no speculation with 4 requests at a "
        "time."
    )


def test_what_the_spread_does_not_tell_apart_is_named_together() -> None:
    speeds = {"none": {1: [100.0, 130.0, 100.0]}, "upstream": {1: [50.0] * 3}, "ours": {1: [110.0, 110.0, 110.0]}}
    assert "take this package or no speculation with 1 request at a time" in conclude(result_of(speeds))
    equal = {mode: {1: [100.0] * 3} for mode in NAMES}
    assert "take any of the three with 1 request at a time" in conclude(result_of(equal))


def test_a_turn_that_was_slow_for_all_changes_no_ratio() -> None:
    quiet = {"none": 100.0, "upstream": 80.0, "ours": 120.0}
    slow = {mode: {1: [speed, speed / 10, speed]} for mode, speed in quiet.items()}
    assert "1.50 and 1.20 times with 1 request at a time" in conclude(result_of(slow))


def test_the_table_has_five_lines_and_a_rule() -> None:
    speeds = {mode: {1: [100.0], 4: [400.0]} for mode in NAMES}
    assert len(format_table(result_of(speeds)).splitlines()) == 5 + 1


def test_a_line_of_progress_is_a_dot() -> None:
    shown = io.StringIO()
    print("none: batch 1, run 1 of 5", file=Dots(shown))
    assert shown.getvalue() == "."
