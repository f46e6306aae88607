"""Runs a scenario on a real vLLM engine in a process of its own, or a function that starts engines itself.

A scenario is a module-level function `scenario(llm, **arguments)` that returns something JSON can hold. One process per
engine configuration and mode: host patches, random state and vLLM's globals then can't leak from one test into another.
Equal runs are made once a session, so tests share the baselines by asking for the same thing.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench.interpreter import choose_runner_from_environment
from bench.processes import SMALL_ENGINE
from tests.support.children import ROOT, TIME_LIMIT_S, ChildFailedError, child_environment
from tests.support.engine_arguments import ENGINE


@dataclass(frozen=True)
class Run:
    """What a scenario returned, and everything that its process printed."""

    value: Any
    log: str


def run(
    scenario: Callable[..., Any],
    engine: Mapping[str, Any] | None = None,
    *,
    mode: str = "on",
    env: Mapping[str, str] | None = None,
    v2: bool = False,
    **arguments: Any,
) -> Run:
    """Runs `scenario(LLM(**ENGINE, **engine), **arguments)` in a fresh process under `MTP_PROPOSERS=mode`.

    Args:
        v2: on vLLM's V2 model runner, by Triton's interpreter (`bench/interpreter.py`).

    Raises:
        ChildFailedError: the process failed.
    """
    engine = ENGINE | dict(engine or {})
    return _run(f"{scenario.__module__}:{scenario.__qualname__}", engine, arguments, mode, env, v2)


def call(function: str, *, mode: str = "on", v2: bool = False, **arguments: Any) -> Any:
    """What a function returns that starts engines itself, called in a fresh process.

    Args:
        function: its path, `module:name`. The module is imported there alone.
        mode, v2: as for `run`.

    Raises:
        ChildFailedError: the process failed.
    """
    return _run(function, None, arguments, mode, None, v2).value


def _run(
    function: str,
    engine: dict[str, Any] | None,
    arguments: dict[str, Any],
    mode: str,
    env: Mapping[str, str] | None,
    v2: bool,
) -> Run:
    spec = {"function": function, "engine": engine, "arguments": arguments}
    environment = SMALL_ENGINE | {"MTP_PROPOSERS": mode} | dict(env or {})
    return _run_once(json.dumps(spec, sort_keys=True), json.dumps(environment, sort_keys=True), v2)


@functools.cache
def _run_once(spec: str, environment: str, v2: bool) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        job = {"spec": json.loads(spec), "environment": json.loads(environment), "result": str(result), "log": str(log)}
        status = _nursery(v2).ask(job)
        printed = log.read_text(errors="replace")
        if status != 0:
            raise ChildFailedError(f"{spec} exited with {status}:\n{printed[-8000:]}")
        return Run(json.loads(result.read_text()), printed)


class _Nursery:
    """A process that has imported vLLM, but neither plugins nor an engine, and forks one child per job.

    The import takes longer than starting an engine, and a child forked right after it is as good as a new process.
    """

    def __init__(self, v2: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_engine"],
            env=child_environment(VLLM_USE_V2_MODEL_RUNNER=str(int(v2))),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._close)

    def ask(self, job: dict[str, Any]) -> int:
        """Runs the job and returns its exit status; a negative one is a signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@functools.cache
def _nursery(v2: bool) -> _Nursery:
    return _Nursery(v2)


def _serve() -> None:
    """Reads jobs from standard input, one a line, and answers each with the exit status of its process."""
    choose_runner_from_environment()
    import vllm
    from vllm.model_executor.models import registry

    assert vllm.LLM is not None  # its attributes are imported on first use
    # vLLM asks a model's class what it is in a process of its own, so that nothing sets CUDA up early, and remembers
    # the answer. On a machine that has none yet, each class costs the import of everything once more.
    registry._run_in_subprocess = lambda ask: ask()
    gc.freeze()  # what is imported here no collection in a child has to look through
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _leave(_work(json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _leave(status: int) -> NoReturn:
    """Ends the process without taking it apart, which takes as long as starting an engine does."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _work(job: dict[str, Any]) -> int:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["environment"])
    signal.alarm(TIME_LIMIT_S)
    try:
        Path(job["result"]).write_text(json.dumps(_play(job["spec"])))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _play(spec: dict[str, Any]) -> Any:
    module, _, name = spec["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    if spec["engine"] is None:
        return function(**spec["arguments"])
    from vllm import LLM

    # A scenario that must act before the engine is built says so by a `prepare` attribute.
    if prepare := getattr(function, "prepare", None):
        prepare()
    return function(LLM(**spec["engine"]), **spec["arguments"])


if __name__ == "__main__":
    _serve()
