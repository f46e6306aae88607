"""Runs random schedules on real engines in this process, under the eyes of a `Watcher`."""

import gc
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from bench.corpus import has_tokenizer, read_sources
from bench.device import for_device
from bench.oracle import prefixes
from bench.oracle.ranks import add_ranks, run_on_ranks
from bench.oracle.replayed import replaying
from bench.oracle.report import Report
from bench.oracle.runners import view_of
from bench.oracle.schedules import SETUPS, RequestPlan, Setup, draw_setups, plan_schedule
from bench.oracle.variants import ADAPTER, adapted_model, cheap_drafts, checkpoint, dense_model, drafter_of
from bench.oracle.watch import Continuation, Watcher
from bench.oracle.watch_rows import RowsWatcher
from bench.reference.dense import Reference, read_config
from proposers.adaptive import Controller

MAX_STEPS_TO_DRAIN = 2000


class Engine:
    """An engine in this process, whose model runner can be reached.

    Use as a context manager: the engine is shut down at the end, so that another can be started.
    """

    def __init__(self, model: Path, **arguments: Any) -> None:
        self.model = model
        # Read when vLLM is first imported: the engine core must stay in this process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else GEMMs of float32 have the precision of TF32
        # So small a model gains nothing from more threads, and loses much where something else is running.
        torch.set_num_threads(1)
        from vllm import LLM

        # What is imported no collection has to look through: starting and ending an engine takes ten of them. vLLM
        # freezes it too, late, and no longer when an engine has ended.
        gc.freeze()
        with _keeping_async_scheduling():
            self.llm = LLM(
                str(model), **{"skip_tokenizer_init": not has_tokenizer(model)}, **for_device(model, arguments)
            )

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def drafter(self) -> Any:
        return view_of(self.runner).drafter

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.engine_core.shutdown()
        del self.llm
        gc.collect()


@contextmanager
def _keeping_async_scheduling() -> Iterator[None]:
    """A context in which vLLM schedules asynchronously on the CPU too, where it would switch that off as of no use.

    What it does to a pass shows all the same: steps are scheduled before the tokens of the last one are known.
    """
    from vllm.platforms import current_platform

    original = current_platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    with mock.patch.object(type(current_platform), "check_and_update_config", staticmethod(check_and_update_config)):
        yield


@dataclass
class Request:
    """A request that the engine works on."""

    plan: RequestPlan
    joined: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended, with all its tokens."""

    tokens: list[int]
    sampled: bool


@dataclass
class ScheduleRun:
    """One schedule on one engine; `run` plays it to its end, and aborts the requests that are left.

    Attributes:
        finished: the requests without a salt and an adapter that have ended.
    """

    engine: Engine
    setup: Setup
    watcher: Watcher | RowsWatcher
    name: str
    seed: int
    num_steps: int
    plans: list[RequestPlan]
    active: dict[str, Request] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)

    def run(self) -> None:
        self.watcher.start_schedule()
        # Requests have no seeds of their own: on the CPU, vLLM fails where a seeded request's chunk ends before its
        # prompt ("CPU Generator does not use offset").
        torch.manual_seed(self.seed)
        waiting = list(self.plans)
        for step in range(self.num_steps):
            while waiting and waiting[0].step <= step:
                self._join(waiting.pop(0), step)
            self._abort([key for key, request in self.active.items() if _is_due(request, step)])
            self._step()
        self._abort(list(self.active))
        self._drain()
        self.engine.llm.reset_prefix_cache()
        self.watcher.report.schedules += 1

    def _follow_on(self, plan: RequestPlan) -> RequestPlan:
        """The plan with the tokens of the latest request that its prompt can go on with; without one as it is."""
        room = self.setup.max_model_len - len(plan.prompt) - plan.max_tokens
        for last in reversed(self.finished):
            if len(last.tokens) <= room and len(last.tokens) > self.setup.block_size:
                kind = prefixes.SAMPLED if last.sampled else prefixes.GREEDY
                return replace(plan, prompt=[*last.tokens, *plan.prompt], parting=kind)
        return plan

    def _reset_prefix_cache(self) -> None:
        """Those that run are preempted, and begin again without a hit."""
        self.watcher.report.events.resets += self.engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _join(self, plan: RequestPlan, step: int) -> None:
        if plan.follows:
            plan = self._follow_on(plan)
        if plan.resets:
            self._reset_prefix_cache()
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        params = SamplingParams(
            max_tokens=plan.max_tokens,
            temperature=plan.temperature,
            stop_token_ids=plan.stop_token_ids,
            # Where a grammar is complete, it admits no other token than the end.
            ignore_eos=plan.grammar is None,
            detokenize=False,
            structured_outputs=None if plan.grammar is None else StructuredOutputsParams(regex=plan.grammar),
        )
        name = f"{self.name} request {step}.{len(self.active)}"
        prompt = {"prompt_token_ids": plan.prompt} | ({"cache_salt": plan.salt} if plan.salt else {})
        adapter = LoRARequest("adapter", 1, str(self.engine.model / ADAPTER)) if plan.adapted else None
        request_id = self.engine.engine.add_request(name, prompt, params, lora_request=adapter)
        self.active[request_id] = Request(plan, step)
        if plan.adapted:
            assert isinstance(self.watcher, Watcher)
            self.watcher.adapted.add(request_id)
        if plan.parting is not None:
            self.watcher.partings[request_id] = plan.parting
        if plan.diverging:
            self.watcher.diverging.add(request_id)
        events = self.watcher.report.events
        events.joins += 1
        events.short_prompts += len(plan.prompt) <= 4

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine.engine.abort_request(request_ids, internal=True)
        for request_id in request_ids:
            del self.active[request_id]
        self.watcher.report.events.aborts += len(request_ids)

    def _step(self) -> None:
        if not self.engine.engine.has_unfinished_requests():
            return
        finished = [output for output in self.engine.engine.step() if output.finished]
        self.watcher.report.steps += 1
        for output in finished:
            self._leave(output)

    def _leave(self, output: Any) -> None:
        """Counts how the request ended, and compares its tokens with those that the drafting passes were given."""
        request_id = next(key for key in self.active if key.startswith(output.request_id))
        plan = self.active.pop(request_id).plan
        tokens = [*plan.prompt, *output.outputs[0].token_ids]
        followed = self.watcher.followed.get(request_id)
        if followed is not None:
            seen = followed.tokens[: len(tokens)]
            assert tokens[: len(seen)] == seen, f"Request {request_id} gave other tokens than its passes showed."
        if plan.salt is None and not plan.adapted:
            self.finished.append(Finished(tokens, plan.temperature > 0))
        events = self.watcher.report.events
        events.leaves += 1
        events.stops += output.outputs[0].finish_reason == "stop"
        events.at_max_model_len += len(tokens) >= self.setup.max_model_len

    def _drain(self) -> None:
        for _ in range(MAX_STEPS_TO_DRAIN):
            if not self.engine.core.scheduler.has_requests() and not self.engine.core.batch_queue:
                return
            self.engine.engine.step()
        raise RuntimeError(f"The engine still has requests, {MAX_STEPS_TO_DRAIN} steps after the last was aborted.")


def _is_due(request: Request, step: int) -> bool:
    after = request.plan.abort_after
    return after is not None and step >= request.joined + after


def read_texts(model: Path, *, num_tokens: int = 30_000) -> tuple[list[list[int]], list[int]]:
    """Held-out text as token streams of at least 600 tokens, and the 40 most frequent tokens in it."""
    encode = _encoder(model)
    texts: list[list[int]] = []
    for _, text in read_sources(held_out=True):
        ids = encode(text[:20_000])
        if len(ids) >= 600:
            texts.append(ids)
        if sum(map(len, texts)) >= num_tokens:
            break
    counts = Counter(token for text in texts for token in text)
    return texts, [token for token, _ in counts.most_common(40)]


def _encoder(model: Path) -> Callable[[str], list[int]]:
    """The checkpoint's tokenizer; without one a byte is a token, so that text is as regular as text is."""
    if has_tokenizer(model):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    vocab_size = read_config(model)["vocab_size"]
    return lambda text: [1 + byte % (vocab_size - 1) for byte in text.encode()]


def run_schedules(
    model: Path,
    count: int,
    seed: int,
    *,
    modules: int | None = None,
    continuation: Continuation | None = Reference.slide,
    setups: Sequence[Setup] = SETUPS,
    plant: Callable[[Engine], AbstractContextManager[Any]] | None = None,
    graphs: bool = False,
    dtype: str = "float32",
    progress: bool = False,
) -> Report:
    """Runs `count` random schedules and returns what was found.

    Args:
        modules: check only that many modules, the first ones; None: all that ever draft, which an engine's K limits.
        continuation: see `Watcher`.
        dtype: of the engines; the reference is always float32 (`TOLERANCES`).
        graphs: the engines capture their decode steps and draft passes as CUDA graphs.
        plant: enters a context for each engine, before the watcher is there; the tests plant their faults here.
    """
    texts, stops = read_texts(model)
    report = Report(dtype=dtype)
    for setup, number in draw_setups(random.Random(seed), count, setups):
        if setup.ranks > 1 and "RANK" not in os.environ:
            turns = run_on_ranks(model, number, seed, setup, modules=modules, graphs=graphs)
            add_ranks(report, [turn for (turn,) in turns])
            if progress:
                _show_progress(setup, number, number, report)
            continue
        watched = _watched_engine(
            model,
            setup,
            report,
            random.Random(seed),
            modules=modules,
            continuation=continuation,
            plant=plant,
            graphs=graphs,
        )
        with watched as (engine, watcher):
            for index in range(number):
                rng = random.Random(f"{seed} {setup.name} {index}")
                plan = plan_schedule(rng, setup, texts, stops)
                ScheduleRun(engine, setup, watcher, f"{setup.name} #{index}", rng.getrandbits(32), *plan).run()
                if progress:
                    _show_progress(setup, index + 1, number, report)
    return report


@contextmanager
def _watched_engine(
    model: Path,
    setup: Setup,
    report: Report,
    rng: random.Random,
    *,
    modules: int | None,
    continuation: Continuation | None,
    plant: Callable[[Engine], AbstractContextManager[Any]] | None,
    graphs: bool,
) -> Iterator[tuple[Engine, Watcher | RowsWatcher]]:
    """A setup's engine and the watcher of its drafter; the arguments are those of `run_schedules`."""
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoint(model, setup))
        stack.enter_context(drafter_of(setup))
        stack.enter_context(cheap_drafts(folder, setup))
        storage = stack.enter_context(TemporaryDirectory())
        engine = stack.enter_context(Engine(folder, **setup.engine_arguments(graphs, report.dtype, storage)))
        stack.enter_context(_counting_grammar_cuts(engine, report))
        if setup.adaptive:
            _change_drafts_often(engine, setup)
        stack.enter_context(plant(engine) if plant is not None else nullcontext())
        if setup.replayed:
            stack.enter_context(replaying(engine.drafter, setup.graph_sizes, report.events))
        if setup.extracts:
            yield engine, RowsWatcher(engine.runner, report)
            return
        if setup.collects:
            RowsWatcher(engine.runner, report)  # beside the drafter's
        dense = dense_model(folder, setup, report.dtype)
        watcher = Watcher(
            engine.runner,
            dense,
            report,
            min(dense.num_modules, setup.k, modules or dense.num_modules),  # no others run
            rng,
            continuation,
            greedy_drafts=setup.speculative.get("draft_sample_method", "greedy") == "greedy",
            adapted_model=adapted_model(folder) if setup.adapters else None,
        )
        yield engine, watcher


def _change_drafts_often(engine: Engine, setup: Setup) -> None:
    """Random step times, the same for every run of a seed, and probes that follow one another.

    Raises:
        AssertionError: no controller chooses the number of drafts there.
    """
    scheduler = engine.core.scheduler
    assert isinstance(scheduler.dynamic_sd_lookup, Controller)
    rng = random.Random(setup.name)
    times = itertools.accumulate(iter(lambda: rng.uniform(0.5, 1.5), None))
    scheduler.dynamic_sd_lookup = Controller(setup.k, clock=lambda: next(times), probe_every=3)


@contextmanager
def _counting_grammar_cuts(engine: Engine, report: Report) -> Iterator[None]:
    manager = engine.core.structured_output_manager
    # As in engines with a scheduler per rank: a grammar is there when its request comes, and not some steps later.
    manager._use_async_grammar_compilation = False
    validate_tokens = manager.validate_tokens

    def counting_validate_tokens(request: Any, drafts: list[int]) -> list[int]:
        kept: list[int] = validate_tokens(request, drafts)
        report.events.grammar_cuts += len(kept) < len(drafts)
        return kept

    with mock.patch.object(manager, "validate_tokens", counting_validate_tokens):
        yield


def _show_progress(setup: Setup, done: int, number: int, report: Report) -> None:
    print(
        f"{setup.name} {done}/{number}: {report.schedules} schedules, {report.steps} steps, "
        f"rows {report.rows_checked} ({report.rows_mismatched} wrong), "
        f"drafts {report.drafts_checked} ({report.drafts_mismatched} wrong)",
        file=sys.stderr,
    )
