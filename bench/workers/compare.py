"""One mode of a comparison, in a process of its own: `python -m bench.workers.compare SPEC.json RESULT.json`."""

import hashlib
import json
from typing import Any

from bench.processes import report_progress, take_turn
from bench.workers.engine import (
    acceptance_counters,
    describe_engine,
    keep_engine_in_process,
    merge_engine_arguments,
    run_batch,
    run_worker,
)
from proposers.options import KEY

CHEAP = {
    "ours-fp8": ("draft_weights",),
    "ours-vocabulary": ("draft_vocabulary",),
    "ours-cheap": ("draft_weights", "draft_vocabulary"),
}
"""Options of modes whose drafts are to be cheap."""
ALL_ROWS = "ours-all-rows"
"""The mode with a prefix cache, which is emptied before each run: for its sake modules run over all of a prompt."""
# `MTP_PROPOSERS` of each mode.
MODES = {"none": "off", "upstream": "upstream", "ours": "on", ALL_ROWS: "on", **dict.fromkeys(CHEAP, "on")}


def build_engine(spec: dict[str, Any]) -> Any:
    """An in-process `LLM` for the mode of the spec."""
    keep_engine_in_process(MODES[spec["mode"]])
    from vllm import LLM

    values = {"draft_weights": "fp8", "draft_vocabulary": spec["draft_vocabulary_file"]}
    cheap = {name: values[name] for name in CHEAP.get(spec["mode"], ())}
    speculative = {"method": "mtp", "num_speculative_tokens": spec["k"], **spec["speculative_config"]}
    defaults = {
        "dtype": spec["dtype"],
        "max_model_len": spec["prompt_tokens"] + spec["output_tokens"] + spec["k"] + 1,
        "max_num_seqs": max(spec["batches"]),
        "disable_log_stats": False,
        "skip_tokenizer_init": not spec["has_tokenizer"],
        "enable_prefix_caching": False,  # every run computes the same prompts anew
    }
    of_mode: dict[str, Any] = {"speculative_config": None if spec["mode"] == "none" else speculative}
    if spec["mode"] == ALL_ROWS:
        of_mode["enable_prefix_caching"] = True
    if cheap:
        of_mode["additional_config"] = {KEY: cheap}
    return LLM(spec["model"], **merge_engine_arguments(defaults, of_mode, spec["engine"]))


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    report_progress("starting the engine")
    llm = build_engine(spec)
    for batch in spec["batches"]:  # kernels are compiled for a shape when they first meet it
        take_turn()
        report_progress(f"warming up batch {batch}")
        run_batch(llm.llm_engine, spec["prompts"][:batch], spec["output_tokens"], f"warm-up-{batch}")
    drafts_before, accepted_before = acceptance_counters(llm)
    runs = []
    digest = hashlib.sha256()
    for batch in spec["batches"]:
        for repeat in range(spec["runs"]):
            take_turn()
            report_progress(f"batch {batch}, run {repeat + 1} of {spec['runs']}")
            llm.reset_prefix_cache()
            run, token_ids = run_prompts(llm.llm_engine, spec, batch, f"{batch}-{repeat}")
            digest.update(json.dumps(token_ids).encode())
            runs.append(run)
    drafts, accepted = acceptance_counters(llm)
    before = accepted_before or [0] * len(accepted)
    return {
        **describe_engine(llm),
        "runs": runs,
        "token_ids": token_ids,
        "num_drafts": drafts - drafts_before,
        "num_accepted_per_position": [now - then for now, then in zip(accepted, before, strict=True)],
        "output_sha256": digest.hexdigest(),
        "text": llm.get_tokenizer().decode(token_ids[0]) if spec["has_tokenizer"] else None,
    }


def run_prompts(engine: Any, spec: dict[str, Any], batch: int, tag: str) -> tuple[dict[str, Any], list[list[int]]]:
    """Generates for all prompts, `batch` at a time; returns the figures of the run and each prompt's output tokens."""
    seconds = 0.0
    step_ms: list[float] = []
    ttft_ms: list[float] = []
    yardstick: list[float] = []
    token_ids: list[list[int]] = []
    for start in range(0, len(spec["prompts"]), batch):
        part = spec["prompts"][start : start + batch]
        done = run_batch(engine, part, spec["output_tokens"], f"{tag}-{start}")
        seconds += done["seconds"]
        token_ids += done["token_ids"]
        yardstick += done["yardstick_ms"]
        ttft_ms += done["ttft_ms"]
        step_ms += done["step_ms"] if len(part) == batch else []  # fewer at the end are another batch size
    run = {
        "batch": batch,
        "seconds": round(seconds, 4),
        "output_tokens": sum(map(len, token_ids)),
        "step_ms": [round(x, 4) for x in step_ms],
        "ttft_ms": [round(x, 4) for x in ttft_ms],
        "yardstick_ms": [round(x, 4) for x in yardstick],
    }
    return run, token_ids


if __name__ == "__main__":
    run_worker(measure)
