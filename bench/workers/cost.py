"""One draft of `bench cost`, in a process of its own: `python -m bench.workers.cost SPEC.json RESULT.json`."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.processes import report_progress
from bench.spread import quartiles
from bench.workers.engine import describe_engine, keep_engine_in_process, merge_engine_arguments, run_batch, run_worker

BLOCK_SIZE = 32


@dataclass(slots=True)
class Pass:
    """One call of `propose`.

    Attributes:
        batch: requests.
        target_rows: of the step that it follows, over all requests.
        rows: of its first forward, over all requests.
        forwards: calls of the draft model.
    """

    batch: int
    target_rows: int
    rows: int = 0
    forwards: int = 0
    ms: float = 0.0


def build_engine(spec: dict[str, Any]) -> Any:
    """An in-process `LLM` with dummy weights: what a pass costs does not depend on what it drafts."""
    keep_engine_in_process("on")
    from vllm import LLM

    longest = max(spec["prompt_tokens"], *spec["prompt_rows"]) + spec["output_tokens"] + spec["k"] + 1
    batch = max(spec["batches"])
    defaults = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": spec["dtype"],
        "max_model_len": longest,
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(longest, batch * spec["prompt_tokens"]),
        "block_size": BLOCK_SIZE,
        # Of all groups together, of which the target has up to three.
        "num_gpu_blocks_override": 3 * batch * (-(-longest // BLOCK_SIZE) + 1),
        "enable_prefix_caching": False,
    }
    of_mode = {"speculative_config": {"method": "mtp", "num_speculative_tokens": spec["k"]}}
    return LLM(spec["model"], **merge_engine_arguments(defaults, of_mode, spec["engine"]))


def watch_passes(llm: Any) -> list[Pass]:
    """Has every further pass put into a list."""
    import torch

    passes: list[Pass] = []
    finish: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def wrap(worker: Any) -> None:
        drafter = worker.model_runner.drafter
        propose = drafter.propose

        def timed_propose(**kwargs: Any) -> Any:
            metadata = kwargs["common_attn_metadata"]
            passes.append(Pass(metadata.num_reqs, metadata.num_actual_tokens))
            finish()
            before = time.perf_counter()
            drafts = propose(**kwargs)
            finish()
            passes[-1].ms = (time.perf_counter() - before) * 1e3
            return drafts

        def count(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if passes:
                passes[-1].rows = passes[-1].rows or kwargs["positions"].shape[-1]
                passes[-1].forwards += 1

        drafter.propose = timed_propose
        drafter.model.register_forward_pre_hook(count, with_kwargs=True)

    llm.collective_rpc(wrap)
    return passes


def summarise(passes: list[Pass], batch: int, target_rows: int, kind: str) -> dict[str, Any]:
    """One point: of the passes of this size, the times and what was run.

    Raises:
        RuntimeError: there were none.
    """
    chosen = [each for each in passes if (each.batch, each.target_rows) == (batch, target_rows)]
    if not chosen:
        seen = sorted({(each.batch, each.target_rows) for each in passes})
        raise RuntimeError(f"No {kind} pass had {batch} requests and {target_rows} rows of the target; seen: {seen}.")
    return {
        "kind": kind,
        "batch": batch,
        "rows": chosen[-1].rows,
        "forwards": chosen[-1].forwards,
        "passes": len(chosen),
        "ms": quartiles([each.ms for each in chosen]),
    }


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    report_progress("starting the engine")
    llm = build_engine(spec)
    passes, rng, points = watch_passes(llm), random.Random(0), []

    def run(batch: int, prompt_tokens: int, output_tokens: int, runs: int, tag: str) -> None:
        """Runs once to warm up, and so many times for `passes`."""
        for repeat in range(runs + 1):
            if repeat == 1:
                passes.clear()
            prompts = [[rng.randrange(1, spec["vocab_size"]) for _ in range(prompt_tokens)] for _ in range(batch)]
            run_batch(llm.llm_engine, prompts, output_tokens, f"{tag}-{repeat}")

    for batch in spec["batches"]:
        report_progress(f"batch {batch}")
        run(batch, spec["prompt_tokens"], spec["output_tokens"], spec["runs"], f"decode-{batch}")
        points.append(summarise(passes, batch, batch * (spec["k"] + 1), "decode"))
    for rows in spec["prompt_rows"]:
        report_progress(f"a prompt of {rows} rows")
        run(1, rows, 1, 4 * spec["runs"], f"prompt-{rows}")
        points.append(summarise(passes, 1, rows, "prompt"))
    groups = llm.collective_rpc(lambda worker: len(worker.model_runner.drafter.groups.all))[0]
    return {**describe_engine(llm), "groups": groups, "points": points}


if __name__ == "__main__":
    run_worker(measure)
