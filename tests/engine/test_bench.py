"""The harness, by its command line: what it prints and what it writes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import cost
from bench.compare import SCHEMA
from bench.corpus import is_held_out, read_sources
from bench.extract import in_pairs
from tests.support import record_scenarios
from tests.support.children import TINY, run_command
from tests.support.forked_engine import run
from tests.support.record_scenarios import records_engine

SMALL = ["--prompts", "4", "--prompt-tokens", "48", "--output-tokens", "40", "--runs", "2", "--batch", "1,2"]
# The second is one that the commands set, too: what is asked for goes first.
EAGER = ["--engine", '{"enforce_eager": true, "enable_prefix_caching": false}']


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-m", "bench", *arguments])


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The record, what was printed, and the plot."""
    folder = tmp_path_factory.mktemp("bench")
    record, plot = folder / "record.json", folder / "plot.png"
    files = ["--json", str(record), "--plot", str(plot)]
    done = bench("compare", "--model", TINY, *SMALL, *EAGER, "--by-turns", *files)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "turns").write_text("\n".join(line for line in done.stderr.splitlines() if " run " in line))
    return json.loads(record.read_text()), done.stdout, plot


@pytest.fixture(scope="module")
def turns(comparison: tuple[dict[str, Any], str, Path]) -> list[str]:
    """Whose runs came after whose in the comparison."""
    lines = comparison[2].with_name("turns").read_text().splitlines()
    return [line.split(",")[0] + line[-6:] for line in lines]


def test_a_comparison_names_what_ran_and_finds_all_modes_equal(comparison: tuple[dict[str, Any], str, Path]) -> None:
    record, table, _ = comparison
    assert record["schema"] == SCHEMA
    assert record["lossless"] is True
    assert "lossless: true" in table
    assert {"vllm", "torch", "platform", "commit"} <= record["environment"].keys()
    # Records are published, so they must not have the paths of the machine that they were made on.
    assert "--json record.json" in record["environment"]["command"]
    proposers = {mode: entry["proposer"] for mode, entry in record["modes"].items()}
    assert proposers == {
        "none": None,
        "upstream": "vllm.v1.spec_decode.step3p5.Step3p5MTPProposer",
        "ours": "proposers.v1.MultiGroupProposer",
    }
    assert len({entry["output_sha256"] for entry in record["modes"].values()}) == 1


def test_every_figure_of_a_comparison_is_there_for_every_batch_size(
    comparison: tuple[dict[str, Any], str, Path],
) -> None:
    record, table, plot = comparison
    assert "the host: yardstick ms" in table
    for mode, entry in record["modes"].items():
        for key in ("output_tokens_per_s", "step_ms"):
            for batch in ("1", "2"):
                assert 0 < entry[key][batch]["q1"] <= entry[key][batch]["median"] <= entry[key][batch]["q3"]
        assert len(entry["runs"]) == 4
        assert all(run["yardstick_ms"]["median"] > 0 for run in entry["runs"])
        assert entry["yardstick_ms"]["median"] > 0
        assert all(run["output_tokens"] == 4 * 40 for run in entry["runs"])
        accepted = entry["acceptance_per_position"]
        assert len(accepted) == (0 if mode == "none" else 3)
        assert accepted == sorted(accepted, reverse=True)
        assert entry["acceptance_length"] == pytest.approx(1 + sum(accepted), abs=1e-3)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_ours_accepts_what_exact_drafts_would_and_upstream_does_not(
    comparison: tuple[dict[str, Any], str, Path],
) -> None:
    modes = comparison[0]["modes"]
    assert modes["ours"]["acceptance_vs_reference"] == 1.0
    assert modes["upstream"]["acceptance_vs_reference"] < 1.0
    assert modes["ours"]["reference_acceptance_length"] == modes["upstream"]["reference_acceptance_length"]


def test_drafts_past_the_modules_are_what_the_reference_makes_too(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    done = bench("compare", "--model", TINY, *SMALL, *EAGER, "--modes", "ours", "--k", "6", "--json", str(record))
    assert done.returncode == 0, done.stderr[-4000:]
    ours = json.loads(record.read_text())["modes"]["ours"]
    assert ours["acceptance_vs_reference"] == 1.0
    assert len(ours["acceptance_per_position"]) == 6


def test_modes_are_compared_by_turns(turns: list[str]) -> None:
    modes = ("none", "upstream", "ours")
    assert turns == [f"{mode}: batch {batch}{run} of 2" for batch in (1, 2) for run in (1, 2) for mode in modes]


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The record of one draft, what was printed, and the plot."""
    folder = tmp_path_factory.mktemp("cost")
    record, plot = folder / "cost.json", folder / "cost.svg"
    small = ["--batch", "1,2", "--prompt-rows", "40", "--prompt-tokens", "8", "--output-tokens", "12", "--runs", "1"]
    draft = ["--modules", "2", "--groups", "2", "--k", "4"]
    done = bench("cost", *draft, *small, "--json", str(record), "--plot", str(plot))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(record.read_text()), done.stdout, plot


def test_a_cost_says_what_was_run_beside_how_long_it_took(costs: tuple[dict[str, Any], str, Path]) -> None:
    record, _, plot = costs
    assert record["schema"] == cost.SCHEMA
    assert record["proposer"] == "proposers.v1.MultiGroupProposer"
    points = {(point["kind"], point["batch"]): point for point in record["points"]}
    assert points.keys() == {("decode", 1), ("decode", 2), ("prompt", 1)}
    for point in points.values():
        assert (point["modules"], point["groups"], point["k"]) == (2, 2, 4)
        # Two of the chain, and two more for each of the two drafts past the modules.
        assert point["forwards"] == 2 + 2 * 2
        assert 0 < point["ms"]["q1"] <= point["ms"]["median"] <= point["ms"]["q3"]
        assert point["passes"] > 1
    # Dummy weights have nothing accepted, so that a window has one valid row and a stale one.
    assert points["decode", 2]["rows"] == 2 * points["decode", 1]["rows"] == 2 * 2
    assert points["prompt", 1]["rows"] == 40
    assert b"<svg" in plot.read_bytes()[:2000]


def test_costs_are_printed_as_tables_of_markdown(costs: tuple[dict[str, Any], str, Path]) -> None:
    decode, prompt = (table.splitlines() for table in costs[1].strip().split("\n\n"))
    heads = "| modules | groups | K | forwards | rows a request | ms, batch 1 | ms, batch 2 |"
    assert decode[0] == heads
    assert prompt[0] == "| modules | groups | K | forwards | ms, 40 rows |"
    assert [len({line.count("|") for line in table}) for table in (decode, prompt)] == [1, 1]
    assert decode[2].startswith("| 2 | 2 | 4 | 6 | ")


def test_a_draft_that_does_not_exist_is_refused_before_anything_starts() -> None:
    done = bench("cost", "--modules", "2", "--groups", "3")
    assert done.returncode != 0
    assert "There is no draft of [2] modules in [3] groups" in done.stderr


def test_a_mode_that_does_not_exist_is_refused_before_anything_starts() -> None:
    done = bench("compare", "--model", TINY, "--modes", "none,faster")
    assert done.returncode != 0
    assert "--modes has faster; there are none, upstream, ours, " in done.stderr


def test_no_file_is_both_held_out_and_trained_on() -> None:
    held_out, trained = ({path for path, _ in read_sources(held_out=part)} for part in (True, False))
    assert held_out
    assert not held_out & trained
    assert all(map(is_held_out, held_out))
    assert len(held_out) < len(trained) / 10


def test_extraction_is_measured_with_every_row_checked_and_a_mode_that_cannot_run_says_why(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    small = ["--prompts", "4", "--batch", "2", "--prompt-tokens", "48", "--output-tokens", "8", "--runs", "2"]
    done = bench(
        "extract", "--model", TINY, "--layers", "1,3,N", *small, *EAGER, "--rounds", "1", "--json", str(record)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(record.read_text())
    assert result["schema"] == "vllm-mtp-proposers/extract/1"
    assert result["settings"]["layer_ids"] == [1, 3, 6]
    none, upstream, ours = (result["modes"][mode] for mode in ("none", "upstream", "ours"))
    assert "does not support EAGLE3 interface" in upstream["error"]
    assert "upstream did not run" in done.stdout
    for entry in (none, ours):
        for key in ("prefill_tokens_per_s", "decode_tokens_per_s", "last_answer_ms"):
            assert 0 < entry[key]["q1"] <= entry[key]["median"] <= entry[key]["q3"]
    assert none["overhead_prefill"] == none["overhead_decode"] == 1
    assert ours["overhead_prefill"] > 0
    assert ours["overhead_decode"] > 0
    assert (ours["rows"], ours["rows_wrong"], ours["files_missing"]) == (4 * (48 + 55), 0, 0)
    assert 0 < ours["num_gpu_blocks"] < none["num_gpu_blocks"]
    assert ours["copies"] == 3
    assert 2 * 55 * 3 * 192 * 4 <= ours["peak_host_bytes"] <= 256 << 20


def test_modes_are_compared_run_by_run_so_that_a_slow_turn_of_the_machine_is_both_modes() -> None:
    def entry(*seconds: float) -> dict[str, Any]:
        runs = [{"prefill_s": s, "decode_s": s / 2, "decode_tokens": 10} for s in seconds]
        return {"runs": runs, "steady": [{"tokens": 100, "seconds": s} for s in seconds]}

    alone, beside = entry(1.0, 4.0, 2.0), entry(1.25, 5.0, 2.0)
    for part in ("prefill", "decode", "steady"):
        assert in_pairs(beside, alone, part) == {"median": 0.8, "q1": 0.8, "q3": 0.9}


def test_decoding_that_can_not_be_timed_is_an_error(tmp_path: Path) -> None:
    # The prompts take several steps, so that the first request ends before the second has begun to decode.
    engine = records_engine(tmp_path) | {"max_num_batched_tokens": 64}
    error = run(record_scenarios.timed, engine, num_prompts=2, num_tokens=200, max_tokens=4).value
    assert "give more --output-tokens, or a smaller --batch" in error


def test_records_beside_drafts_are_measured_with_every_row_checked(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    small = ["--prompts", "2", "--batch", "2", "--prompt-tokens", "48", "--output-tokens", "16", "--runs", "1"]
    ways = ["--with-mtp", "--modes", "mtp,mtp+records", "--steady", "0.5", "--rounds", "1", "--json", str(record)]
    done = bench("extract", "--model", TINY, "--layers", "1,3,N", *small, *EAGER, *ways)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(record.read_text())
    assert result["schema"] == "vllm-mtp-proposers/extract/1"
    mtp, both = result["modes"]["mtp"], result["modes"]["mtp+records"]
    assert mtp["tokens_per_pass"] > 1.5
    assert (both["rows"], both["rows_wrong"], both["files_missing"], both["skipped"]) == (2 * (48 + 63), 0, 0, 0)
    assert both["of_mtp_steady"] > 0
    assert len(both["steady"]) == len(both["runs"])
    for steady in both["steady"]:
        assert steady["requests"] > 0
        assert steady["bytes"] > steady["requests"] * 48 * 3 * 192 * 4
