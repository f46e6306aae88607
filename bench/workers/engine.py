"""What all workers share: an engine in their own process, what runs in it, and how its steps are timed from outside.

A worker's process is started as `python -m bench.workers.NAME SPEC.json RESULT.json` (`bench/processes.py`).
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.spread import yardstick_ms


def run_worker(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """What every worker does: reads the spec that its command line names, and writes what was measured."""
    spec_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(spec_file.read_text()))))


def keep_engine_in_process(proposers_mode: str, runner: str | None = None) -> None:
    """Sets what vLLM reads from the environment when it is first imported.

    Args:
        proposers_mode: `MTP_PROPOSERS`.
        runner: `VLLM_USE_V2_MODEL_RUNNER`; None: vLLM's choice.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["MTP_PROPOSERS"] = proposers_mode
    if runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def merge_engine_arguments(
    defaults: Mapping[str, Any], of_mode: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a mode's engine. What `--engine` asks for goes before the defaults.

    Raises:
        ValueError: it asks for something that makes the mode what it is.
    """
    if taken := sorted(of_mode.keys() & asked.keys()):
        raise ValueError(f"--engine has {', '.join(taken)}, which the modes set themselves: leave it out.")
    return {**defaults, **of_mode, **asked}


def random_prompts(vocab_size: int, count: int, num_tokens: int) -> list[list[int]]:
    """`count` prompts of random token ids, the same in every process."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def drafter_of(runner: Any) -> Any:
    """The V1 runner's proposer, the V2 runner's speculator, or what extracts; None where there is none of them."""
    names = ("drafter", "speculator", "hidden_states_extractor")
    return next((proposer for name in names if (proposer := getattr(runner, name, None)) is not None), None)


def describe_engine(llm: Any) -> dict[str, str | None]:
    """The runner and the proposer that are really in use."""

    def inspect(worker: Any) -> dict[str, str | None]:
        runner = worker.model_runner
        drafter = drafter_of(runner)
        name = lambda x: f"{type(x).__module__}.{type(x).__qualname__}"  # noqa: E731
        return {"runner": name(runner), "proposer": None if drafter is None else name(drafter)}

    return llm.collective_rpc(inspect)[0]


def add_requests(engine: Any, prompts: list[list[int]], params: Any, tag: str) -> list[str]:
    """Gives all prompts to the engine at once and returns the ids of the requests."""
    request_ids = [f"{tag}-{i}" for i in range(len(prompts))]
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    return request_ids


def run_batch(engine: Any, prompts: list[list[int]], output_tokens: int, tag: str) -> dict[str, Any]:
    """Generates greedily for all prompts at once.

    Returns:
        `token_ids` of each prompt's output; `started`, by `time.perf_counter`, and `seconds` in all; `ttft_ms`, when
        each request had its first token; of the steps in which every request decoded, `step_ms`, `decode_spans` (when
        they began and ended) and their `decode_tokens_per_s`: steps that prefill, and those after the first request has
        ended, would be figures of another batch size; `yardstick_ms` before and after.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    yardstick = [yardstick_ms()]
    started = time.perf_counter()
    request_ids = add_requests(engine, prompts, params, tag)
    lengths = dict.fromkeys(request_ids, 0)
    finished: dict[str, list[int]] = {}
    ttft_ms: dict[str, float] = {}
    decode_spans: list[tuple[float, float]] = []
    decoded = 0
    while engine.has_unfinished_requests():
        all_decode = min(lengths.values()) > 0 and not finished
        generated, before = sum(lengths.values()), time.perf_counter()
        outputs = engine.step()
        after = time.perf_counter()
        for output in outputs:
            token_ids = list(output.outputs[0].token_ids)
            if token_ids and not lengths[output.request_id]:
                ttft_ms[output.request_id] = (after - started) * 1e3
            lengths[output.request_id] = len(token_ids)
            if output.finished:
                finished[output.request_id] = token_ids
        if all_decode and not finished:
            decode_spans.append((before, after))
            decoded += sum(lengths.values()) - generated
    seconds = time.perf_counter() - started
    step_ms = [(end - start) * 1e3 for start, end in decode_spans]
    return {
        "started": started,
        "seconds": seconds,
        "yardstick_ms": [*yardstick, yardstick_ms()],
        "token_ids": [finished[request_id] for request_id in request_ids],
        "step_ms": step_ms,
        "ttft_ms": [ttft_ms[request_id] for request_id in request_ids],
        "decode_spans": decode_spans,
        "decode_tokens_per_s": decoded / sum(step_ms) * 1e3 if step_ms else float("nan"),
    }


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def acceptance_counters(llm: Any) -> tuple[int, list[int]]:
    """Draft passes that were verified so far, and accepted drafts by position."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    drafts = values.get("vllm:spec_decode_num_drafts")
    accepted = values.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return (int(drafts.value) if drafts else 0), ([int(x) for x in accepted.values] if accepted else [])
