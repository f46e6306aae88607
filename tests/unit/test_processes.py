"""Workers measure by turns, and none of them is left behind."""

import os
from pathlib import Path

import pytest

from bench.processes import run_mode, run_modes_by_turns
from bench.workers.engine import merge_engine_arguments


def noted(shared: Path) -> list[list[str]]:
    return [line.split() for line in shared.read_text().splitlines()]


def test_modes_take_turns_until_each_is_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shared = tmp_path / "shared"
    specs = [{"mode": mode, "turns": turns, "shared": str(shared)} for mode, turns in (("a", 2), ("b", 3), ("c", 0))]
    assert run_modes_by_turns(specs, "tests.support.turns") == [{"turns": 2}, {"turns": 3}, {"turns": 0}]
    assert [(mode, turn) for mode, turn, _ in noted(shared)] == [
        ("a", "0"),
        ("b", "0"),
        ("a", "1"),
        ("b", "1"),
        ("b", "2"),
    ]
    assert "b: turn 2" in capfd.readouterr().err


def test_a_mode_by_itself_has_all_turns(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    assert run_mode({"mode": "a", "turns": 2, "shared": str(shared)}, "tests.support.turns") == {"turns": 2}
    assert len(noted(shared)) == 2


def test_when_a_mode_fails_its_log_is_shown_and_the_others_are_ended(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    specs = [
        {"mode": mode, "turns": 3, "shared": str(shared), "fails_in": fails} for mode, fails in (("a", 9), ("b", 1))
    ]
    with pytest.raises(RuntimeError, match=r"(?s)Mode b failed with exit status 1.*no more of this") as failure:
        run_modes_by_turns(specs, "tests.support.turns")
    assert "a line that is not finished" in str(failure.value)
    for pid in {int(pid) for _, _, pid in noted(shared)}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_mode_that_was_killed_while_it_waited_is_told_of(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    specs = [{"mode": "a", "turns": 3, "shared": shared}, {"mode": "b", "turns": 3, "shared": shared, "kills_in": 0}]
    with pytest.raises(RuntimeError, match=r"Mode a failed with exit status -9"):
        run_modes_by_turns(specs, "tests.support.turns")


def test_what_is_asked_for_goes_before_defaults_and_not_before_what_a_mode_is() -> None:
    defaults, of_mode = {"max_num_seqs": 8, "enable_prefix_caching": False}, {"speculative_config": None}
    asked = {"enable_prefix_caching": True, "block_size": 32}
    assert merge_engine_arguments(defaults, of_mode, asked) == {
        "max_num_seqs": 8, "speculative_config": None, "enable_prefix_caching": True, "block_size": 32
    }  # fmt: skip
    with pytest.raises(ValueError, match="--engine has speculative_config, which the modes set themselves"):
        merge_engine_arguments(defaults, of_mode, {"speculative_config": {"method": "ngram"}})
