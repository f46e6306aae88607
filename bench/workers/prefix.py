"""One mode of `bench prefix`, in a process of its own: `python -m bench.workers.prefix SPEC.json RESULT.json`."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.device import for_device
from bench.processes import report_progress, take_turn
from bench.workers.engine import (
    acceptance_counters,
    describe_engine,
    keep_engine_in_process,
    merge_engine_arguments,
    run_batch,
    run_worker,
)
from bench.workers.host_parts import HostClock
from bench.workers.propose_times import take_propose_times, time_propose

# `MTP_PROPOSERS` of each mode, and what is added to the speculative config.
MODES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "none": ("upstream", None),
    "upstream": ("upstream", {}),
    "upstream-no-drop": ("upstream", {"disable_eagle_block_drop": True}),
    "ours": ("on", {}),
}

Requests = Iterator[list[list[int]]]
"""Of a scenario, the prompts that come at once; each time the outputs of the ones before are sent."""


def shared_prompt(spec: dict[str, Any]) -> Any:
    """Many users under one system prompt, the first by itself and the others some at a time."""
    system, users = spec["system"], spec["users"]
    yield [system + users[0]]
    for start in range(1, len(users), spec["at_once"]):
        yield [system + user for user in users[start : start + spec["at_once"]]]


def sessions(spec: dict[str, Any]) -> Any:
    """Conversations side by side: each turn has all that was said before, outputs included."""
    said: list[list[int]] = [[] for _ in spec["sessions"]]
    for turn in range(len(spec["sessions"][0])):
        said = [before + session[turn] for before, session in zip(said, spec["sessions"], strict=True)]
        outputs = yield said
        said = [before + output for before, output in zip(said, outputs, strict=True)]


def growing(spec: dict[str, Any]) -> Any:
    """An agent: its prompt grows by its own short output and a longer result, again and again."""
    prompt = spec["task"]
    for result in [*spec["results"], []]:
        (output,) = yield [prompt]
        prompt = prompt + output + result


SCENARIOS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shared_prompt": shared_prompt,
    "sessions": sessions,
    "growing": growing,
}


def build_engine(spec: dict[str, Any]) -> Any:
    """An in-process `LLM` for the mode of the spec."""
    proposers_mode, speculative = MODES[spec["mode"]]
    keep_engine_in_process(proposers_mode)
    from bench.interpreter import choose_runner, run_recurrent_states

    choose_runner(spec["runner"])
    if spec["recurrent"]:
        run_recurrent_states()
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else float32 products of Triton have the precision of TF32
    from vllm import LLM

    config = {"method": "mtp", "num_speculative_tokens": spec["k"]}
    arguments = {
        "dtype": spec["dtype"],
        "max_model_len": spec["max_model_len"],
        "max_num_seqs": spec["at_once"],
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    of_mode = {
        "speculative_config": None if speculative is None else config | speculative,
        "enable_prefix_caching": True,
    }
    arguments = merge_engine_arguments(arguments, of_mode, spec["engine"])
    return LLM(spec["model"], **for_device(Path(spec["model"]), arguments))


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    report_progress("starting the engine")
    llm = build_engine(spec)
    engine = describe_engine(llm)
    assert_drafted_for(spec["mode"], engine["proposer"])
    llm.collective_rpc(time_propose, args=(True,))
    clock = HostClock() if spec["host_parts"] else None
    if clock is not None:
        clock.watch_engine(llm)
    take_turn()
    report_progress("warming up")
    for name in SCENARIOS:
        play(llm, spec, name, "warm-up")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SCENARIOS}
    for repeat in range(spec["runs"]):
        for name in SCENARIOS:
            take_turn()
            report_progress(f"{name}, run {repeat + 1} of {spec['runs']}")
            runs[name].append(play(llm, spec, name, str(repeat), clock))
    return {**engine, "runs": runs}


def assert_drafted_for(mode: str, proposer: str | None) -> None:
    """Raises `AssertionError` where this package is to draft and doesn't: its plugin is not installed."""
    ours = proposer is not None and proposer.startswith("proposers.")
    assert ours == (MODES[mode][0] == "on"), f"In mode {mode} drafts are made by {proposer}: is the plugin installed?"


def play(llm: Any, spec: dict[str, Any], name: str, tag: str, clock: HostClock | None = None) -> dict[str, Any]:
    """A scenario from an empty prefix cache on: what it took, and what it found in the cache.

    Args:
        clock: of the engine's parts, which is read for each first token, and then emptied.
    """
    llm.reset_prefix_cache()
    hits, (drafts, accepted) = prefix_hits(llm), acceptance_counters(llm)
    streams: list[tuple[list[int], list[int]]] = []
    ttft_ms: list[float] = []
    drafting_ms: list[float] = []
    host_ms: list[dict[str, float]] = []
    seconds = 0.0
    for index, (prompts, done) in enumerate(_batches(llm, spec, name, tag)):
        streams += zip(prompts, done["token_ids"], strict=True)
        seconds += done["seconds"]
        if index:  # the first have nothing to hit
            moments = [done["started"] + ms / 1e3 for ms in done["ttft_ms"]]
            ttft_ms += done["ttft_ms"]
            drafting_ms += [drafting_before(moment, done["passes"]) for moment in moments]
            if clock is not None:
                host_ms += [clock.between(done["started"], moment) for moment in moments]
        if clock is not None:
            clock.calls.clear()
    drafts_now, accepted_now = acceptance_counters(llm)
    before: Sequence[int] = accepted or [0] * len(accepted_now)
    return {
        "prompt_tokens": sum(len(prompt) for prompt, _ in streams),
        "hit_tokens": prefix_hits(llm) - hits,
        "ttft_ms": ttft_ms,
        "ttft_drafting_ms": drafting_ms,
        "ttft_host_ms": host_ms,
        "seconds": seconds,
        "output_tokens": sum(len(output) for _, output in streams),
        "num_drafts": drafts_now - drafts,
        "num_accepted": sum(accepted_now) - sum(before),
        "streams": streams,
    }


def _batches(llm: Any, spec: dict[str, Any], name: str, tag: str) -> Iterator[tuple[list[list[int]], dict[str, Any]]]:
    scenario = SCENARIOS[name](spec)
    prompts = next(scenario)
    for index in range(10_000):
        done = run_batch(llm.llm_engine, prompts, spec["output_tokens"], f"{name}-{tag}-{index}-{time.monotonic_ns()}")
        yield prompts, done | {"passes": llm.collective_rpc(take_propose_times)[0]}
        try:
            prompts = scenario.send(done["token_ids"])
        except StopIteration:
            return


def drafting_before(moment: float, passes: list[tuple[float, float]]) -> float:
    """How many ms of these passes lie before that moment."""
    return 1e3 * sum(max(0.0, min(end, moment) - start) for start, end in passes)


def prefix_hits(llm: Any) -> int:
    """Tokens that were found in the prefix cache so far."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")


if __name__ == "__main__":
    run_worker(measure)
