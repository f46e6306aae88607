"""Where the engine's thread spends a step: by parts of the step, each without what another part takes inside it."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from bench.workers.engine import drafter_of

REST = "the engine's rest"
PARTS = {  # in the order of a step
    "schedule": "the scheduler chooses what to run",
    "prepare": "the runner prepares inputs and attention metadata",
    "target": "the target's forward, launched or replayed",
    "sample": "the runner samples and prepares its output",
    "propose": "the draft pass",
    "wait": "waits for the device to end the step before",
    "update": "the scheduler takes the outputs",
    REST: "everything else: requests, detokenisation, answers",
}


class HostParts:
    """Clocks of functions of an engine in this process.

    Args:
        step_of_now: the number of the step that the thread is at.

    Attributes:
        ms: of each step, by part, in ms.
    """

    def __init__(self, step_of_now: Callable[[], int]) -> None:
        self.ms: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._step_of_now = step_of_now
        self._inner: list[float] = []  # of each function that is running, the time of those it has called

    def watch_engine(self, llm: Any) -> None:
        """Puts a clock on each part of an in-process `LLM`, on either of vLLM's model runners."""
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._clock("schedule", scheduler, "schedule")
        self._clock("update", scheduler, "update_from_output")
        for outputs in _classes_of_async_outputs():
            self._clock("wait", outputs, "get_output")

        def watch(worker: Any) -> None:
            runner = worker.model_runner
            self._clock("prepare", runner, "execute_model")
            self._clock("target", runner.model, "forward")
            if (graphs := getattr(runner, "cudagraph_manager", None)) is not None:  # V2's whole decode steps
                self._clock("target", graphs, "run_fullgraph")
            self._clock("sample", runner, "sample_tokens")
            if (drafter := drafter_of(runner)) is not None:
                self._clock("propose", drafter, "propose")

        llm.collective_rpc(watch)

    def _clock(self, part: str, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            before = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - before
                self.ms[self._step_of_now()][part] += (spent - self._inner.pop()) * 1e3
                if self._inner:
                    self._inner[-1] += spent

        setattr(owner, name, clocked)

    def of_step(self, step: int, step_ms: float) -> dict[str, float]:
        """The parts of a step that took `step_ms` in all."""
        parts = dict(self.ms.get(step, {}))
        return {**parts, REST: step_ms - sum(parts.values())}


def _classes_of_async_outputs() -> Iterable[type]:
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    return AsyncOutput, AsyncGPUModelRunnerOutput


def mean_parts(steps: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each part over steps, in ms, so that the parts add up to the mean step."""
    return {part: round(sum(step.get(part, 0.0) for step in steps) / len(steps), 4) for part in PARTS}
