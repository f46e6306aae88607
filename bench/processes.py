"""The processes that modes are measured in, one after the other or by turns.

A machine that others use is fast for some minutes and slow for others. Modes that run one after the other may have met
different ones; by turns, a run of each mode before the next run of any, all meet the same. Meanwhile those whose turn
it isn't wait to be told, and compute nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

PROGRESS = "@progress "
WAITS = "@waits"

# For engines of models so small that they gain nothing from threads: one thread that no core is reserved for. Two
# OpenMP threads that wait for each other on a busy machine are many times slower.
SMALL_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_F32_DEFAULT": "ieee",  # else float32 products of Triton have the precision of TF32
}


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a child process whose engine runs a small model inside it.

    Like every child of the benchmarks, it finds this package where its parent does: it has the parent's working
    directory and `PYTHONPATH`.
    """
    return {**os.environ, **SMALL_ENGINE, **variables}


# For workers: what they say to the command that started them.


def report_progress(text: str) -> None:
    print(PROGRESS + text, flush=True)


def take_turn() -> None:
    """Waits for the turn to measure. No other worker measures anything until this one calls again, or ends."""
    print(f"\n{WAITS}", flush=True)  # after a line that somebody else has begun
    sys.stdin.readline()


# For commands.


class Worker:
    """A mode's process: `python -m MODULE SPEC.json RESULT.json`.

    Leaving its context ends it.
    """

    def __init__(self, spec: dict[str, Any], module: str) -> None:
        self._mode = spec["mode"]
        self._folder = tempfile.TemporaryDirectory()
        spec_file, self._result_file = (Path(self._folder.name, name) for name in ("spec.json", "result.json"))
        spec_file.write_text(json.dumps(spec))
        self._log: deque[str] = deque(maxlen=60)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(spec_file), str(self._result_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def waits(self) -> bool:
        """Passes its progress on to stderr until it asks for a turn; False: it has ended instead.

        Raises:
            RuntimeError: it failed; the message ends with the end of its log.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.rstrip() == WAITS:
                return True
            if line.startswith(PROGRESS):
                print(f"{self._mode}: {line.removeprefix(PROGRESS).rstrip()}", file=sys.stderr, flush=True)
            else:
                self._log.append(line)
        status = self._process.wait()
        if status or not self._result_file.exists():
            raise RuntimeError(
                f"Mode {self._mode} failed with exit status {status}. The end of its log:\n{''.join(self._log)}"
            )
        return False

    def has_its_turn(self) -> bool:
        """Gives it a turn to measure; returns what `waits` does."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # killed while it waited, which `waits` says
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self.waits()

    def result(self) -> dict[str, Any]:
        return json.loads(self._result_file.read_text())


def run_modes(
    specs: Sequence[dict[str, Any]],
    module: str = "bench.workers.compare",
    by_turns: bool = False,
    when_up: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """The result of each mode, as soon as it is known. Raises what `Worker.waits` does."""
    return iter(run_modes_by_turns(specs, module, when_up)) if by_turns else (run_mode(spec, module) for spec in specs)


def run_mode(spec: dict[str, Any], module: str = "bench.workers.compare") -> dict[str, Any]:
    """Runs one mode by itself. Raises what `Worker.waits` does."""
    return run_modes_by_turns([spec], module)[0]


def run_modes_by_turns(
    specs: Sequence[dict[str, Any]],
    module: str = "bench.workers.compare",
    when_up: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Starts all modes side by side, and has them measure by turns. Raises what `Worker.waits` does.

    Args:
        when_up: is called once all have started, before the first turn.
    """
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(spec, module)) for spec in specs]
        waiting = [worker for worker in workers if worker.waits()]
        when_up()
        while waiting:
            waiting = [worker for worker in waiting if worker.has_its_turn()]
        return [worker.result() for worker in workers]
