"""Runs a scenario on a real vLLM engine in a process of its own.

A scenario is a module-level function `scenario(llm, **arguments)` that returns something JSON can hold. One process per
engine configuration and mode: host patches, random state and vLLM's globals then can't leak from one test into another.
Equal runs are made once a session, so tests share the baselines by asking for the same thing.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
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
    **arguments: Any,
) -> Run:
    """Runs `scenario(LLM(**ENGINE, **engine), **arguments)` in a fresh process under `MTP_PROPOSERS=mode`.

    Raises:
        ChildFailedError: the process failed.
    """
    spec = {
        "scenario": f"{scenario.__module__}:{scenario.__qualname__}",
        "engine": ENGINE | dict(engine or {}),
        "arguments": arguments,
    }
    environment = ENVIRONMENT | {"MTP_PROPOSERS": mode} | dict(env or {})
    return _run_once(json.dumps(spec, sort_keys=True), json.dumps(environment, sort_keys=True))


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a child that imports this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **variables}


def run_python(code: str, **variables: str) -> str:
    """What `python -c code` prints, standard error included.

    Raises:
        ChildFailedError: it failed.
    """
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(**variables),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    if child.returncode != 0:
        raise ChildFailedError(f"python -c exited with {child.returncode}:\n{child.stdout}")
    return child.stdout


@functools.cache
def _run_once(spec: str, environment: str) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        child = subprocess.run(
            [sys.executable, "-m", "tests.engine", spec, str(result)],
            env=child_environment(**json.loads(environment)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        if child.returncode != 0:
            raise ChildFailedError(f"The scenario {spec} exited with {child.returncode}:\n{child.stdout[-8000:]}")
        return Run(json.loads(result.read_text()), child.stdout)


def _main(spec_json: str, result: str) -> None:
    from vllm import LLM

    spec = json.loads(spec_json)
    module, _, name = spec["scenario"].partition(":")
    scenario = getattr(importlib.import_module(module), name)
    # A scenario that must act before the engine is built says so by a `prepare` attribute.
    if prepare := getattr(scenario, "prepare", None):
        prepare()
    value = scenario(LLM(**spec["engine"]), **spec["arguments"])
    Path(result).write_text(json.dumps(value))


if __name__ == "__main__":
    _main(*sys.argv[1:])
