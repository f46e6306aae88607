"""One mode of a comparison, in a process of its own: `python -m bench.workers.compare SPEC.json RESULT.json`.

The engine stays in this process, so that each of its steps can be timed from outside.
"""

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.processes import report_progress, take_turn
from bench.spread import yardstick_ms

PROPOSERS_MODE = {"none": "off", "upstream": "upstream", "ours": "on"}


def keep_engine_in_process(proposers_mode: str, runner: str | None = None) -> None:
    """Sets what vLLM reads from the environment when it is first imported, under this `MTP_PROPOSERS`.

    Args:
        runner: `VLLM_USE_V2_MODEL_RUNNER`; None: vLLM's choice.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["MTP_PROPOSERS"] = proposers_mode
    if runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def random_prompts(vocab_size: int, count: int, num_tokens: int) -> list[list[int]]:
    """The same in every process."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def drafter_of(runner: Any) -> Any:
    """The V1 runner's proposer or the V2 runner's speculator; None where there is neither."""
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def build_engine(spec: dict[str, Any]) -> Any:
    """An in-process `LLM` for the mode of the spec."""
    keep_engine_in_process(PROPOSERS_MODE[spec["mode"]])
    from vllm import LLM

    speculative = {"method": "mtp", "num_speculative_tokens": spec["k"], **spec["speculative_config"]}
    return LLM(
        spec["model"],
        dtype=spec["dtype"],
        max_model_len=spec["prompt_tokens"] + spec["output_tokens"] + spec["k"] + 1,
        max_num_seqs=max(spec["batches"]),
        speculative_config=None if spec["mode"] == "none" else speculative,
        disable_log_stats=False,
        enable_prefix_caching=False,  # every run computes the same prompts anew
        **spec["engine"],
    )


def describe_engine(llm: Any) -> dict[str, str | None]:
    """The runner and the proposer that are really in use."""

    def inspect(worker: Any) -> dict[str, str | None]:
        runner = worker.model_runner
        drafter = drafter_of(runner)
        name = lambda x: f"{type(x).__module__}.{type(x).__qualname__}"  # noqa: E731
        return {"runner": name(runner), "proposer": None if drafter is None else name(drafter)}

    return llm.collective_rpc(inspect)[0]


def run_batch(engine: Any, prompts: list[list[int]], output_tokens: int, tag: str) -> dict[str, Any]:
    """Generates greedily for all prompts at once.

    `step_ms` has the steps in which every request decoded, `decode_spans` when they began and ended, and
    `decode_tokens_per_s` is theirs: those that prefill, and those after the first has ended, would be figures of
    another batch size. `yardstick_ms` was measured before and after.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    yardstick = [yardstick_ms()]
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{tag}-{i}", {"prompt_token_ids": prompt}, params)
    lengths = dict.fromkeys((f"{tag}-{i}" for i in range(len(prompts))), 0)
    token_ids: dict[str, list[int]] = {}
    step_ms = []
    ttft_ms = []
    decode_spans = []
    decoded = 0
    while engine.has_unfinished_requests():
        all_decode = min(lengths.values()) > 0 and not token_ids
        before = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - before
        before_step = sum(lengths.values())
        for output in outputs:
            ids = list(output.outputs[0].token_ids)
            if ids and not lengths[output.request_id]:
                ttft_ms.append((time.perf_counter() - started) * 1e3)
            lengths[output.request_id] = len(ids)
            if output.finished:
                token_ids[output.request_id] = ids
        if all_decode and not token_ids:
            step_ms.append(elapsed * 1e3)
            decode_spans.append((before, before + elapsed))
            decoded += sum(lengths.values()) - before_step
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "yardstick_ms": [*yardstick, yardstick_ms()],
        "token_ids": [token_ids[f"{tag}-{i}"] for i in range(len(prompts))],
        "step_ms": step_ms,
        "ttft_ms": ttft_ms,
        "decode_spans": decode_spans,
        "decode_tokens_per_s": decoded / sum(step_ms) * 1e3 if step_ms else float("nan"),
    }


def acceptance_counters(llm: Any) -> tuple[int, list[int]]:
    """Draft passes that were verified so far, and accepted drafts by position."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    drafts = values.get("vllm:spec_decode_num_drafts")
    accepted = values.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return (int(drafts.value) if drafts else 0), ([int(x) for x in accepted.values] if accepted else [])


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    report_progress("starting the engine")
    llm = build_engine(spec)
    result: dict[str, Any] = {**describe_engine(llm), "runs": []}
    for batch in spec["batches"]:  # kernels are compiled for a shape when they first meet it
        take_turn()
        report_progress(f"warming up batch {batch}")
        run_batch(llm.llm_engine, spec["prompts"][:batch], spec["output_tokens"], f"warm-up-{batch}")
    base_drafts, base_accepted = acceptance_counters(llm)
    digest = hashlib.sha256()
    for batch in spec["batches"]:
        for repeat in range(spec["runs"]):
            take_turn()
            report_progress(f"batch {batch}, run {repeat + 1} of {spec['runs']}")
            seconds = 0.0
            steps: list[float] = []
            yardstick: list[float] = []
            outputs: list[list[int]] = []
            for start in range(0, len(spec["prompts"]), batch):
                part = spec["prompts"][start : start + batch]
                done = run_batch(llm.llm_engine, part, spec["output_tokens"], f"{batch}-{repeat}-{start}")
                seconds += done["seconds"]
                outputs += done["token_ids"]
                yardstick += done["yardstick_ms"]
                steps += done["step_ms"] if len(part) == batch else []
            digest.update(json.dumps(outputs).encode())
            result["runs"].append(
                {
                    "batch": batch,
                    "seconds": round(seconds, 4),
                    "output_tokens": sum(map(len, outputs)),
                    "step_ms": [round(x, 4) for x in steps],
                    "yardstick_ms": [round(x, 4) for x in yardstick],
                }
            )
            result["token_ids"] = outputs
    drafts, accepted = acceptance_counters(llm)
    drafts -= base_drafts
    accepted = [now - before for now, before in zip(accepted, base_accepted or [0] * len(accepted), strict=True)]
    result |= {"num_drafts": drafts, "num_accepted_per_position": accepted, "output_sha256": digest.hexdigest()}
    result["text"] = llm.get_tokenizer().decode(result["token_ids"][0])
    return result


def run_worker(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """What every worker does: reads the spec that its command line names, and writes what was measured."""
    spec_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(spec_file.read_text()))))


if __name__ == "__main__":
    run_worker(measure)
