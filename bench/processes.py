"""The processes that modes are measured in, one after the other or by turns.

A machine that others use is fast for some minutes and slow for others. Modes that run one after the other may have met
different ones; by turns, a run of each mode before the next run of any, all meet the same. Meanwhile those whose turn
it isn't wait to be told, and compute nothing.
"""

import json
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


# What a worker says.


def report_progress(text: str) -> None:
    print(PROGRESS + text, flush=True)


def take_turn() -> None:
    """Waits until what follows may be measured: nothing else is, until the next call or the end."""
    print(f"\n{WAITS}", flush=True)  # after a line that somebody else has begun
    sys.stdin.readline()


# What a command does with it.


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
        """Lets it measure, until `waits` knows how it went on."""
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
