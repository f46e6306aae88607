"""Requests that arrive while others run, as at a server: steps that carry a prompt and steps that don't, told apart."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from bench.processes import report_progress, take_turn
from bench.spread import quartiles, yardstick_ms
from bench.workers.engine import busy
from bench.workers.host_parts import HostClock, mean_parts

PROFILED_STEPS = 60, 180
MARK = "step "
KINDS = {True: "with_prompt", False: "without_prompt"}


@dataclass
class StepLog:
    """What the runner was asked to do, step by step.

    Attributes:
        begun: when each step was handed to the runner.
        with_prompt: whether it has a request whose prompt is not complete before it.
        clock: of the parts of a step, on the host.
        marks: each step is marked in a profile by its number.
    """

    begun: list[float] = field(default_factory=list)
    with_prompt: list[bool] = field(default_factory=list)
    clock: HostClock = field(default_factory=HostClock)
    marks: bool = False

    def clear(self) -> None:
        for each in (self.begun, self.with_prompt, self.clock.calls):
            each.clear()

    def steps(self) -> Iterator["Step"]:
        """All but the last, which has no end."""
        parts = self.clock.by_step(self.begun)
        for with_prompt, (start, end), host_ms in zip(self.with_prompt, pairwise(self.begun), parts, strict=False):
            yield Step(with_prompt, (end - start) * 1e3, host_ms)


class Step(NamedTuple):
    """A step, from when the runner is handed it until it is handed the next one.

    Attributes:
        host_ms: of `step_ms`, by part.
    """

    with_prompt: bool
    step_ms: float
    host_ms: dict[str, float]


def watch_steps(llm: Any, prompt_tokens: int) -> StepLog:
    """Has every further step noted.

    Args:
        prompt_tokens: of every prompt: a request that has computed fewer is computing its prompt.
    """
    from torch.profiler import record_function

    log = StepLog()

    def wrap(worker: Any) -> None:
        runner = worker.model_runner
        execute = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                if log.marks:
                    with record_function(f"{MARK}{len(log.begun)}"):
                        pass
                log.begun.append(time.perf_counter())
                running = scheduled.scheduled_cached_reqs.num_computed_tokens
                is_prompt = bool(scheduled.scheduled_new_reqs) or any(count < prompt_tokens for count in running)
                log.with_prompt.append(is_prompt)
            return execute(scheduled, *args, **kwargs)

        runner.execute_model = execute_model

    log.clock.watch_engine(llm)
    llm.collective_rpc(wrap)
    return log


def run_arrivals(
    engine: Any,
    spec: dict[str, Any],
    length: int,
    concurrency: int,
    tag: str,
    before_step: Callable[[int], None] = lambda number: None,
) -> tuple[int, float]:
    """Keeps so many requests running until all of them are done; returns output tokens, and seconds.

    A request ends after half to one and a half times `output_tokens`, and the next one comes in its place.

    Args:
        before_step: is called with the number of each step of the engine.
    """
    from vllm import SamplingParams

    rng = random.Random(tag)
    waiting = spec["arrivals"] * concurrency
    sent = tokens = 0
    running: set[str] = set()
    started, step = time.perf_counter(), 0
    while waiting or running:
        while waiting and len(running) < concurrency:
            request_id = f"{tag}-{sent}"
            longest = rng.randint(spec["output_tokens"] // 2, spec["output_tokens"] * 3 // 2)
            params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True, detokenize=False)
            prompt = [rng.randrange(spec["vocab_size"]) for _ in range(length)]
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            running.add(request_id)
            waiting, sent = waiting - 1, sent + 1
        before_step(step)
        step += 1
        for output in engine.step():
            if output.finished:
                running.discard(output.request_id)
                tokens += len(output.outputs[0].token_ids)
    return tokens, time.perf_counter() - started


def measure_arrivals(llm: Any, spec: dict[str, Any], length: int) -> dict[str, Any]:
    """The figures of prompts of that length, by concurrency."""
    log = watch_steps(llm, length)
    figures: dict[str, dict[str, Any]] = {}
    runs: dict[int, list[tuple[float, list[Step]]]] = {c: [] for c in spec["batches"]}
    yardsticks: dict[int, list[float]] = {c: [] for c in spec["batches"]}
    for repeat in range(1 + spec["runs"]):
        for concurrency in spec["batches"]:
            take_turn()
            report_progress(f"prompt {length}, {concurrency} at a time, run {repeat} of {spec['runs']}")
            log.clear()
            yardsticks[concurrency].append(yardstick_ms())
            tokens, seconds = run_arrivals(
                llm.llm_engine, spec, length, concurrency, f"{length}-{concurrency}-{repeat}"
            )
            if repeat > 0:  # the first compiles kernels
                runs[concurrency].append((tokens / seconds, list(log.steps())))
    for concurrency, done in runs.items():
        found = summarise_steps([step for _, steps in done for step in steps])
        found["output_tokens_per_s"] = quartiles([speed for speed, _ in done], 1)
        found["yardstick_ms"] = quartiles(yardsticks[concurrency])
        take_turn()
        report_progress(f"prompt {length}, {concurrency} at a time, profile")
        found["gpu_busy_ms"] = profile_arrivals(llm, log, spec, length, concurrency)
        for name, value in found.items():
            figures.setdefault(name, {})[str(concurrency)] = value
    return figures


def profile_arrivals(
    llm: Any, log: StepLog, spec: dict[str, Any], length: int, concurrency: int
) -> dict[str, float | None]:
    """The time in ms that the GPU is busy during a step, by kind of step.

    A kernel belongs to the step that the host was at when it ran. The profiler slows the host down, and not the GPU.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    first, last = PROFILED_STEPS

    def before_step(number: int) -> None:
        if number == first:
            profiler.start()
            log.marks = True
        elif number == last:
            stop()

    def stop() -> None:
        torch.cuda.synchronize()
        if log.marks:
            profiler.stop()
        log.marks = False

    log.clear()
    run_arrivals(llm.llm_engine, spec, length, concurrency, f"profile-{length}-{concurrency}", before_step)
    stop()
    marks, kernels = [], []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.append((event.time_range.start, event.time_range.end))
        elif event.name.startswith(MARK):
            marks.append((event.time_range.start, log.with_prompt[int(event.name.removeprefix(MARK))]))
    return busy_by_kind(sorted(marks), sorted(kernels))


def busy_by_kind(marks: list[tuple[float, bool]], kernels: list[tuple[float, float]]) -> dict[str, float | None]:
    """Of steps that begin at the marks (microseconds, and whether with a prompt), and kernels' beginnings and ends."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    for (start, with_prompt), (end, _) in pairwise(marks):
        inside = [(max(a, start), min(b, end)) for a, b in kernels if a < end and b > start]
        spent[with_prompt].append(busy(inside) / 1e3)
    return {
        name: round(sum(spent[kind]) / len(spent[kind]), 4) if spent[kind] else None for kind, name in KINDS.items()
    }


def summarise_steps(steps: list[Step]) -> dict[str, Any]:
    """By kind of step: their number, `step_ms`, `propose_host_ms` and the mean `host_ms` by part; and their share."""
    found: dict[str, Any] = {"num_steps": {}, "step_ms": {}, "propose_host_ms": {}, "host_ms": {}}
    for with_prompt, name in KINDS.items():
        kind = [step for step in steps if step.with_prompt == with_prompt]
        proposes = [step.host_ms["propose"] for step in kind if "propose" in step.host_ms]
        found["num_steps"][name] = len(kind)
        found["step_ms"][name] = quartiles([step.step_ms for step in kind]) if kind else None
        found["propose_host_ms"][name] = quartiles(proposes) if proposes else None
        found["host_ms"][name] = mean_parts([step.host_ms for step in kind]) if kind else None
    total = sum(step.step_ms for step in steps)
    with_prompt_ms = sum(step.step_ms for step in steps if step.with_prompt)
    found["share_of_time_with_prompt"] = round(with_prompt_ms / total, 4)
    return found
