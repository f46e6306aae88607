"""vLLM's OpenAI server with the plugin, as a user starts it, on the loopback interface."""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.children import ROOT, child_environment

START_S = 180


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
