"""Where the engine's thread spends a step: by parts of the step, each without what another part takes inside it."""

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

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


class Call(NamedTuple):
    """A call of a function of some part: when it began, and its time without what others that are clocked took."""

    part: str
    began: float
    ms: float


class HostClock:
    """Clocks of functions of this process.

    Attributes:
        calls: in the order in which they ended.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._inner: list[float] = []  # of each function that is running, the time of those it has called

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Puts a clock on a function."""
        original = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self.calls.append(Call(part, began, (spent - self._inner.pop()) * 1e3))
                if self._inner:
                    self._inner[-1] += spent

        setattr(owner, name, clocked)

    def watch_engine(self, llm: Any) -> None:
        """Puts a clock on each part of an in-process `LLM`, on either of vLLM's model runners."""
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.watch("schedule", scheduler, "schedule")
        self.watch("update", scheduler, "update_from_output")
        for outputs in _classes_of_async_outputs():
            self.watch("wait", outputs, "get_output")

        def watch(worker: Any) -> None:
            runner = worker.model_runner
            self.watch("prepare", runner, "execute_model")
            self.watch("target", runner.model, "forward")
            if (graphs := getattr(runner, "cudagraph_manager", None)) is not None:  # V2's whole decode steps
                self.watch("target", graphs, "run_fullgraph")
            self.watch("sample", runner, "sample_tokens")
            if (drafter := drafter_of(runner)) is not None:
                self.watch("propose", drafter, "propose")

        llm.collective_rpc(watch)

    def by_step(self, begun: Sequence[float]) -> list[dict[str, float]]:
        """The ms of each part in the steps that began at these times, each but the last; they end with the next."""
        steps: list[dict[str, float]] = [defaultdict(float) for _ in begun]
        for part, began, ms in self.calls:
            if index := bisect_right(begun, began):
                steps[index - 1][part] += ms
        for step, (start, end) in zip(steps, pairwise(begun), strict=False):
            step[REST] = (end - start) * 1e3 - sum(step.values())
        return [dict(step) for step in steps[:-1]]

    def between(self, start: float, end: float) -> dict[str, float]:
        """The ms of each part from `start` to `end`, by `time.perf_counter`, when none of the functions runs."""
        spent: dict[str, float] = defaultdict(float)
        for part, began, ms in self.calls:
            if start <= began < end:
                spent[part] += ms
        return {**spent, REST: (end - start) * 1e3 - sum(spent.values())}


def _classes_of_async_outputs() -> Iterable[type]:
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    return AsyncOutput, AsyncGPUModelRunnerOutput


def mean_parts(steps: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each part over steps, in ms, so that the parts add up to the mean step."""
    return {part: round(sum(step.get(part, 0.0) for step in steps) / len(steps), 4) for part in PARTS}
