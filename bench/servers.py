"""OpenAI servers of vLLM side by side, each with its engine in a process of its own, as `vllm serve` has it."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
SERVED_NAME = "served"
START_S = 900  # several engines that load and compile on the same cores
STOP_S = 30
REST_S = 2  # for what a server has left behind to end by itself
LOG_CHARACTERS = 10_000  # of a log's end, for messages


def server_command(model: str, engine: Mapping[str, Any]) -> list[str]:
    """The command of a server with these engine arguments, without its address.

    By module: `vllm serve` asks for a distribution called vllm, which the CPU build is not.
    """
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*module, "--served-model-name", SERVED_NAME, "--disable-uvicorn-access-log", *flags(engine)]


def flags(engine: Mapping[str, Any]) -> list[str]:
    """Engine arguments as options of vLLM's command line. None leaves an argument out."""
    words: list[str] = []
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(_as_word, value)]
        elif value is not None:
            words += [f"--{option}", _as_word(value)]
    return words


def _as_word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def server_environment(proposers_mode: str, runner: str | None) -> dict[str, str]:
    """The environment of a server; the arguments are those of `keep_engine_in_process`."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "MTP_PROPOSERS": proposers_mode}
    return environment if runner is None else environment | {"VLLM_USE_V2_MODEL_RUNNER": runner}


class Server:
    """A mode's server, which has been started and may not answer yet.

    Leaving its context ends it and all that it has started.
    """

    def __init__(
        self, mode: str, command: Sequence[str], environment: Mapping[str, str], port: int, logs: Path
    ) -> None:
        self.mode = mode
        self.port = port
        self._log = logs / f"{mode}.log"
        with self._log.open("wb") as output:
            # A process group, so that nothing of it outlives us, but no session: what ends ours ends it, too.
            self.process = subprocess.Popen(
                [*command, "--host", HOST, "--port", str(port)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        deadline = time.monotonic() + REST_S
        with suppress(ProcessLookupError):  # nothing is left of the group
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ask_to_end(self) -> None:
        if self.process.poll() is None:
            # No SIGINT, which the children of a command in the background ignore.
            self.process.send_signal(signal.SIGTERM)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> str:
        """Raises `OSError` where it doesn't answer, or with another status than 200."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"{path} answers with status {response.status}")
            return response.read().decode()
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        """Raises `RuntimeError` if it has ended; the message ends with the end of its log."""
        if self.process.poll() is not None:
            raise self.failure(f"ended with exit status {self.process.returncode}")
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def failure(self, what: str) -> RuntimeError:
        """The error that says what has happened to it, with the end of its log."""
        return RuntimeError(f"Mode {self.mode}'s server {what}. The end of its log:\n{self.log[-LOG_CHARACTERS:]}")


@contextmanager
def serving(commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], logs: Path) -> Iterator[dict[str, Server]]:
    """Starts a server for each mode, all side by side, and ends them all at the end.

    Args:
        commands: by mode, the command without its address, and its environment.
        logs: folder for the servers' logs.

    Raises:
        RuntimeError: a server ended, or doesn't answer after `START_S`; the message ends with the end of its log.
    """
    servers: dict[str, Server] = {}
    with _leaving_when_terminated(), ExitStack() as stack:
        for (mode, (command, environment)), port in zip(commands.items(), free_ports(len(commands)), strict=True):
            servers[mode] = stack.enter_context(Server(mode, command, environment, port, logs))
            stack.callback(_ask_to_end, servers)  # on the way out all are asked before any is waited for
        wait_until_healthy(list(servers.values()))
        yield servers


def _ask_to_end(servers: Mapping[str, Server]) -> None:
    for server in servers.values():
        server.ask_to_end()


@contextmanager
def _leaving_when_terminated() -> Iterator[None]:
    """Has SIGTERM leave all contexts, as Ctrl-C does, instead of ending the process on the spot."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def wait_until_healthy(servers: Sequence[Server], limit_s: float = START_S) -> None:
    """Returns when all answer. Raises what `serving` does."""
    deadline = time.monotonic() + limit_s
    starting = list(servers)
    while starting := [server for server in starting if not server.is_healthy()]:
        if time.monotonic() > deadline:
            raise starting[0].failure(f"doesn't answer after {limit_s:g} s")
        time.sleep(0.3)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def counter(metrics: str, name: str) -> float:
    """A counter's value in the text of `/metrics`, the sum of all that have its name; 0 for none."""
    return sum(float(value) for value in re.findall(rf"^{name}_total{{[^}}]*}} (\S+)$", metrics, re.MULTILINE))
