"""How long drafting takes before a first token."""

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from bench import prefix
from bench.prefix import format_host_parts, summarise, summarise_modes
from bench.reference import acceptance
from bench.workers.host_parts import PARTS, REST, Call, HostClock
from bench.workers.prefix import assert_drafted_for, drafting_before
from bench.workers.propose_times import take_propose_times, time_propose
from tests.support.children import TINY


def test_every_pass_is_timed_and_told_once() -> None:
    drafter = SimpleNamespace(propose=lambda x: time.sleep(0.01) or x)
    worker = SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter))
    time_propose(worker)
    before = time.perf_counter()
    assert [drafter.propose(i) for i in range(3)] == [0, 1, 2]
    spans = take_propose_times(worker)
    assert [before, *(moment for span in spans for moment in span)] == sorted(
        [before, *(moment for span in spans for moment in span)]
    )
    assert all(end - start >= 0.01 for start, end in spans)
    assert take_propose_times(worker) == []


def test_an_engine_that_drafts_nothing_has_no_passes() -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    time_propose(worker)
    assert take_propose_times(worker) == []


@pytest.mark.parametrize(("moment", "ms"), [(0.5, 0), (1.5, 500), (2.5, 1000), (3.25, 1250), (9, 2000)])
def test_of_a_pass_that_is_running_the_part_before_counts(moment: float, ms: float) -> None:
    assert drafting_before(moment, [(1.0, 2.0), (3.0, 4.0)]) == pytest.approx(ms)


RUN: dict[str, Any] = {
    "prompt_tokens": 9, "hit_tokens": 4, "num_drafts": 0, "num_accepted": 0, "output_tokens": 6, "seconds": 2.0,
    "ttft_host_ms": [],
}  # fmt: skip


def test_a_record_has_medians_of_what_is_left_of_each_request() -> None:
    run = dict(RUN)
    times = [([10.0, 30.0], [2.0, 25.0]), ([20.0], [4.0])]
    entry = summarise([run | {"ttft_ms": a, "ttft_drafting_ms": b} for a, b in times])
    assert (entry["ttft_ms"], entry["ttft_drafting_ms"], entry["ttft_less_drafting_ms"]) == (20, 4, 8)
    assert "ttft_host_ms" not in entry
    run["ttft_host_ms"] = [{"target": 4.0, "propose": 1.0}, {"target": 6.0}]
    entry = summarise([run | {"ttft_ms": [1.0], "ttft_drafting_ms": [0.0]}])
    assert entry["ttft_host_ms"] == dict.fromkeys(PARTS, 0.0) | {"target": 5.0, "propose": 0.5}
    shown = format_host_parts({"scenarios": {"growing": {"modes": {"ours": entry}}}})
    assert shown.splitlines()[-1].split()[:2] == ["growing", "ours"]
    assert "5.00" in shown


def test_a_request_is_compared_with_itself_without_speculation() -> None:
    """Here drafts add a tenth to each, which medians of all three of a mode would say is half."""
    none = [RUN | {"ttft_ms": [10.0, 40.0], "ttft_drafting_ms": [0.0, 0.0]}]
    none.append(RUN | {"ttft_ms": [20.0], "ttft_drafting_ms": [0.0]})
    ours = [RUN | {"ttft_ms": [13.0, 46.0], "ttft_drafting_ms": [2.0, 2.0]}]
    ours.append(RUN | {"ttft_ms": [30.0], "ttft_drafting_ms": [0.0]})
    entries = summarise_modes({"none": none, "ours": ours})
    assert entries["none"]["ttft_less_drafting_of_none"]["median"] == 1.0
    assert entries["ours"]["ttft_less_drafting_of_none"]["median"] == 1.1
    assert "ttft_less_drafting_of_none" not in summarise_modes({"ours": ours})["ours"]


def test_the_parts_up_to_a_first_token_are_those_that_began_since_it_was_asked_for() -> None:
    clock = HostClock()
    clock.calls = [Call("target", began, ms) for began, ms in [(0.5, 9.0), (1.0, 2.0), (1.5, 3.0), (2.0, 7.0)]]
    clock.calls.append(Call("propose", 1.2, 4.0))
    assert clock.between(1.0, 2.0) == {"target": 5.0, "propose": 4.0, REST: pytest.approx(991.0)}


def test_a_mode_of_this_package_that_somebody_else_drafts_in_is_an_error() -> None:
    assert_drafted_for("ours", "proposers.v2.MultiGroupSpeculator")
    assert_drafted_for("none", None)
    with pytest.raises(AssertionError, match="is the plugin installed"):
        assert_drafted_for("ours", "vllm.v1.spec_decode.eagle.EagleProposer")


def test_the_runs_are_on_record_before_exact_drafts_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take longer than the runs, and be given up."""
    run = RUN | {"num_drafts": 2, "num_accepted": 3, "ttft_ms": [9.0], "ttft_drafting_ms": [1.0], "streams": []}
    done = {"proposer": "proposers.v1.MultiGroupProposer", "runs": {name: [run] for name in prefix.SCENARIOS}}
    monkeypatch.setattr(prefix, "run_rounds", lambda specs, rounds: {"ours": done})

    def give_up(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(acceptance, "reference_acceptance", give_up)
    parser = argparse.ArgumentParser()
    prefix.add_arguments(parser)
    args = parser.parse_args(["--model", str(TINY), "--modes", "ours", "--json", str(tmp_path / "record.json")])
    with pytest.raises(KeyboardInterrupt):
        prefix.run(args)
    entry = json.loads((tmp_path / "record.json").read_text())["scenarios"]["growing"]["modes"]["ours"]
    assert (entry["ttft_ms"], entry["acceptance_length"], entry["acceptance_vs_reference"]) == (9.0, 2.5, None)
    monkeypatch.setattr(acceptance, "reference_acceptance", lambda *_: {"acceptance_length": 2.5})
    prefix.run(args)
    entry = json.loads((tmp_path / "record.json").read_text())["scenarios"]["growing"]["modes"]["ours"]
    assert entry["acceptance_vs_reference"] == 1.0
