"""Runs a scenario on a real vLLM engine in a process of its own.

A scenario is a module-level function `scenario(llm, **arguments)` that returns something JSON can hold. One process per
engine configuration and mode: host patches, random state and vLLM's globals then can't leak from one test into another.
Equal runs are made once a session, so tests share the baselines by asking for the same thing.
"""

import atexit
import functools
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
from typing import Any

from bench.interpreter import choose_runner

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "assets" / "tiny-step3p5")

# Small blocks put many block boundaries into short prompts; 32 is the CPU backend's unit. The number of blocks is
# fixed because memory sizes it otherwise, and clearing a GiB takes longer than a test.
ENGINE: dict[str, Any] = {
    "model": TINY,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 320,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 400,
    "disable_log_stats": False,
}

# One thread and no binding: a model this small gains nothing from more, and two OpenMP threads that wait for each
# other on a busy machine are many times slower.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

TIME_LIMIT_S = 400


@dataclass(frozen=True)
class Run:
    """What a scenario returned, and everything that its process printed."""

    value: Any
    log: str


class ChildFailedError(AssertionError):
    """The process failed; the message ends with what it printed."""


def mtp(num_speculative_tokens: int, **more: Any) -> dict[str, Any]:
    """Engine arguments for drafting with the checkpoint's own modules."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_speculative_tokens, **more}}


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
    spec = {
        "scenario": f"{scenario.__module__}:{scenario.__qualname__}",
        "engine": ENGINE | dict(engine or {}),
        "arguments": arguments,
    }
    environment = ENVIRONMENT | {"MTP_PROPOSERS": mode} | dict(env or {})
    return _run_once(json.dumps(spec, sort_keys=True), json.dumps(environment, sort_keys=True), v2)


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a child that imports this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **variables}


def run_command(
    command: list[str], timeout: float = TIME_LIMIT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command at the root of this checkout and takes down what it prints; its exit status is the caller's."""
    return subprocess.run(
        command,
        env=child_environment(**variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(code: str, **variables: str) -> str:
    """What `python -c code` prints, standard error before standard output.

    Raises:
        ChildFailedError: it failed.
    """
    child = run_command([sys.executable, "-c", code], TIME_LIMIT_S, **variables)
    printed = child.stderr + child.stdout
    if child.returncode != 0:
        raise ChildFailedError(f"python -c exited with {child.returncode}:\n{printed}")
    return printed


@functools.cache
def _run_once(spec: str, environment: str, v2: bool) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        job = {"spec": json.loads(spec), "environment": json.loads(environment), "result": str(result), "log": str(log)}
        status = _nursery(v2).ask(job)
        printed = log.read_text(errors="replace")
        if status != 0:
            raise ChildFailedError(f"The scenario {spec} exited with {status}:\n{printed[-8000:]}")
        return Run(json.loads(result.read_text()), printed)


class _Nursery:
    """A process that has imported vLLM, but neither plugins nor an engine, and forks one child per job.

    The import takes longer than starting an engine, and a child forked right after it is as good as a new process.
    """

    def __init__(self, v2: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine"],
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
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        choose_runner("v2")
    import vllm

    assert vllm.LLM is not None  # its attributes are imported on first use
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.exit(_work(json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


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
    from vllm import LLM

    module, _, name = spec["scenario"].partition(":")
    scenario = getattr(importlib.import_module(module), name)
    # A scenario that must act before the engine is built says so by a `prepare` attribute.
    if prepare := getattr(scenario, "prepare", None):
        prepare()
    return scenario(LLM(**spec["engine"]), **spec["arguments"])


if __name__ == "__main__":
    _serve()
