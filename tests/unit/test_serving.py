"""`bench serve` without an engine: its servers' command lines and lives, its requests and its figures."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import serve
from bench.client import make_requests, run_cell, summarise_cell
from bench.servers import Server, counter, flags, server_environment, serving, wait_until_healthy
from tests.support.children import ROOT, TINY, child_environment

# Answers as healthy, from a process that has a child.
STUB = """
import http.server, subprocess, sys
print("a line of the log", flush=True)
if "--fails" in sys.argv:
    sys.exit("no more of this")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/health", "/metrics") else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
COMMAND = ([sys.executable, "-c", STUB], dict(os.environ))
FAILING = ([sys.executable, "-c", STUB, "--fails"], dict(os.environ))
TERMINATED = """
import sys
from pathlib import Path
from bench.servers import serving
from tests.unit.test_serving import COMMAND
import time
with serving({"a": COMMAND}, Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


def processes_of(log: str, server: Server | None = None) -> list[int]:
    return [int(log.split("child ")[1].split()[0]), *([server.process.pid] if server else [])]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def all_end(processes: list[int]) -> bool:
    """A killed process may take a moment to end."""
    deadline = time.monotonic() + 10
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, processes))


def test_servers_run_side_by_side_and_nothing_of_them_is_left(tmp_path: Path) -> None:
    with serving({"a": COMMAND, "b": COMMAND}, tmp_path) as servers:
        assert servers["a"].port != servers["b"].port
        assert all(server.is_healthy() for server in servers.values())
        processes = [pid for server in servers.values() for pid in processes_of(server.log, server)]
        assert all(map(is_running, processes))
    assert all_end(processes)


def test_a_server_that_does_not_start_says_why_and_the_others_are_ended(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Mode b's server ended with exit status 1.*no more of this"):  # noqa: SIM117
        with serving({"a": COMMAND, "b": FAILING}, tmp_path):
            pytest.fail("it has started")
    log = (tmp_path / "a.log").read_text()
    assert "child " not in log or all_end(processes_of(log))


def test_a_server_that_ends_during_a_cell_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with serving({"a": COMMAND}, tmp_path) as servers:
        server = servers["a"]
        server.process.kill()
        server.process.wait()
        with pytest.raises(RuntimeError, match=r"(?s)Mode a's server doesn't answer.*a line of the log"):
            run_cell(server, make_requests(1, 4, 4, 10, 0.0, ""), 1)


def test_a_server_that_never_answers_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('waiting', flush=True); time.sleep(600)"]
    with Server("a", command, os.environ, 1, tmp_path) as server:
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match=r"(?s)doesn't answer after 0.1 s.*waiting"):
            wait_until_healthy([server], 0.1)


def test_a_command_that_is_terminated_ends_its_servers(tmp_path: Path) -> None:
    environment = child_environment()
    command = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, str(tmp_path)], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "up\n"
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 128 + signal.SIGTERM
    assert all_end(processes_of((tmp_path / "a.log").read_text()))


def test_engine_arguments_are_options_of_the_command_line() -> None:
    engine: dict[str, Any] = {"max_model_len": 512, "enforce_eager": True, "enable_prefix_caching": False}
    engine |= {"compilation_config": {"mode": 0}, "cudagraph_capture_sizes": [1, 2], "seed": None, "dtype": "float32"}
    assert flags(engine) == [
        *("--max-model-len", "512"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--compilation-config", '{"mode": 0}'),
        *("--cudagraph-capture-sizes", "1", "2"),
        *("--dtype", "float32"),
    ]


def test_a_mode_chooses_drafter_and_runner_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    none, ours = server_environment("off", None), server_environment("on", "1")
    assert (none["MTP_PROPOSERS"], ours["MTP_PROPOSERS"]) == ("off", "on")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in none
    assert ours["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert ours["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_requests_differ_by_seed_and_share_what_they_are_asked_to() -> None:
    first, again, other = (make_requests(50, 40, 20, 1000, 0.25, seed) for seed in ("1", "1", "2"))
    assert first == again
    assert len({tuple(request.prompt[:10]) for request in [*first, *other]}) == 1
    assert len({tuple(request.prompt[10:]) for request in [*first, *other]}) == 100
    assert {len(request.prompt) for request in first} == {40}
    lengths = {request.output_tokens for request in first}
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 10
    alone = make_requests(50, 40, 20, 1000, 0.0, "1")
    assert len({tuple(request.prompt[:10]) for request in alone}) == 50


def answer(ttft: float, gaps: list[float], tokens: int) -> SimpleNamespace:
    return SimpleNamespace(ttft=ttft, itl=gaps, latency=ttft + sum(gaps), output_tokens=tokens)


def test_the_figures_of_a_cell_are_of_all_its_requests() -> None:
    figures = summarise_cell([answer(0.1, [0.02, 0.04], 7), answer(0.3, [0.03], 4)], 0.5)
    assert figures["output_tokens"] == 11
    assert figures["output_tokens_per_s"] == 22
    assert figures["ttft_ms"] == 200
    assert figures["tpot_ms"] == 10  # 60 ms for 6 tokens, and 30 ms for 3
    assert figures["itl_ms"] == 30
    assert 39 < figures["itl_p99_ms"] <= 40
    assert 298 <= figures["ttft_p99_ms"] <= 300


def turn(concurrency: int, speed: float, drafts: int = 0, accepted: int = 0) -> dict[str, Any]:
    run = dict.fromkeys(serve.FIGURES, 1.0) | {"prompt_tokens": 16, "concurrency": concurrency}
    return run | {"output_tokens_per_s": speed, "drafts": drafts, "accepted": accepted}


def test_a_record_has_quartiles_over_turns_and_the_acceptance_of_all_of_them() -> None:
    runs = [turn(1, 10, 10, 10), turn(1, 20, 30, 50), turn(2, 40)]
    figures = serve.summarise(runs)["16"]
    assert figures["output_tokens_per_s"] == {
        "1": {"median": 15, "q1": 12.5, "q3": 17.5},
        "2": {"median": 40, "q1": 40, "q3": 40},
    }
    assert figures["acceptance_length"] == {"1": 2.5}


def test_the_table_has_ratios_over_no_speculation_and_over_vllms_own() -> None:
    speeds = {"none": 10, "upstream-v2": 16, "ours-v2": 20}
    modes = {mode: {"prompts": serve.summarise([turn(1, speed)])} for mode, speed in speeds.items()}
    result = {"modes": modes, "settings": {"prompt_tokens": [16], "concurrency": [1]}}
    head, _, row, *_ = serve.format_table(result).splitlines()
    assert head.endswith("| upstream-v2 / none | ours-v2 / none | ours-v2 / upstream-v2 |")
    assert row.endswith("| 1.60 | 2.00 | 1.25 |")


def test_counters_are_read_whatever_their_labels() -> None:
    metrics = '# HELP\nvllm:x_total{engine="0"} 2.0\nvllm:x_total{engine="1"} 3.0\nvllm:x_created{engine="0"} 9.0\n'
    assert counter(metrics, "vllm:x") == 5
    assert counter(metrics, "vllm:y") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--turns", "0"], "--turns has 0, and must be at least 1."),
        (["--concurrency", "8,0"], "--concurrency has 0, and must be at least 1."),
        (["--shared-prefix", "1"], "--shared-prefix is 1.0"),
        (["--output-tokens", "2"], "--output-tokens is 2"),
        (["--model", "/nowhere"], "--model /nowhere has no config.json."),
        ([], "give --model a folder"),
    ],
)
def test_arguments_that_can_not_be_measured_are_refused(words: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        serve.check(parser.parse_args([*(["--model", TINY] if words else []), *words]), "cpu")


def test_the_controller_is_an_option_of_its_mode_alone(tmp_path: Path) -> None:
    settings = {"speculative_config": {"method": "mtp"}, "engine": {}, "vocab_size": 10, "draft_vocabulary": 5}
    made = serve.commands(["none", "ours-v2", "ours-v2-adaptive"], TINY, settings, tmp_path)
    option = '{"mtp_proposers": {"adapt_drafts": true}}'
    assert [option in command for command, _ in made.values()] == [False, False, True]
    assert made["ours-v2"][1] == made["ours-v2-adaptive"][1]


def test_the_shape_takes_a_fixed_share_of_the_device() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["--prompt-tokens", "256", "--output-tokens", "100", "--engine", '{"seed": 1}'])
    config = serve.read_config(args)
    engine = serve.engine_arguments(args, config, "cuda")
    assert engine["max_model_len"] == 256 + 150 + 4
    assert engine["max_num_seqs"] == 64
    assert engine["kv_cache_memory_bytes"] >= 64 * 406 * 11 * 2 * 8 * 128 * 2
    assert engine["gpu_memory_utilization"] == 0.1
    assert engine["seed"] == 1
    assert serve.vocab_size_of(config) == 128896
    args.acceptance_rates = "0.5"
    with pytest.raises(ValueError, match="--acceptance-rates has 1 entries, and --k is 3"):
        serve.speculative_config(args)
