"""One mode of `bench extract`, in a process of its own: `python -m bench.extraction_worker SPEC.json RESULT.json`."""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from bench.worker import PROPOSERS_MODE, describe_engine, report_progress

# How often a row is copied between the model and the file, by the code: ours writes the captured stream to a buffer,
# scatters it to the store and gathers it to the host; vLLM's stacks it, copies it to a buffer, scatters, gathers.
COPIES = {"none": 0, "upstream": 4, "ours": 3}


def build_engine(spec: dict[str, Any]) -> Any:
    """An in-process `LLM` for the mode of the spec."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["MTP_PROPOSERS"] = PROPOSERS_MODE[spec["mode"]]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    return LLM(
        spec["model"],
        dtype=spec["dtype"],
        max_model_len=spec["prompt_tokens"] + spec["output_tokens"] + 2,
        max_num_seqs=spec["batch"],
        disable_log_stats=False,
        enable_prefix_caching=False,  # every run computes the same prompts anew
        **extraction_arguments(spec),
        **spec["engine"],
    )


def extraction_arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """What makes an engine extract, in each mode."""
    if spec["mode"] == "none":
        return {}
    ours = spec["mode"] == "ours"
    extra = {"storage_root" if ours else "shared_storage_path": spec["storage"]}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": spec["layer_ids"]}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector" if ours else "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        },
    }


def run_prompts(engine: Any, spec: dict[str, Any], prompts: list[list[int]], max_tokens: int, tag: str) -> Any:
    """Generates greedily for all prompts, `batch` at a time, and takes the times.

    Returns:
        seconds until every request had a token, seconds after that until every answer was there, and the answers.
    """
    from vllm import SamplingParams

    extra = {} if spec["mode"] == "none" else {"kv_transfer_params": {"include_output_tokens": True}}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
    prefill = decode = 0.0
    answers: list[dict[str, Any]] = []
    for start in range(0, len(prompts), spec["batch"]):
        part = prompts[start : start + spec["batch"]]
        began = time.perf_counter()
        for i, prompt in enumerate(part):
            engine.add_request(f"{tag}-{start + i}", {"prompt_token_ids": prompt}, params)
        waiting, first = {f"{tag}-{start + i}" for i in range(len(part))}, began
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if waiting:
                waiting -= {output.request_id for output in outputs}
                first = time.perf_counter()
            answers += [read_answer(output) for output in outputs if output.finished]
        prefill += first - began
        decode += time.perf_counter() - first
    return prefill, decode, answers


def read_answer(output: Any) -> dict[str, Any]:
    params = output.kv_transfer_params or {}
    path = params.get("hidden_states_path")
    return {
        "tokens": [*output.prompt_token_ids, *output.outputs[0].token_ids],
        "path": path,
        "there": path is not None and Path(path).exists(),
    }


def host_bytes(spec: dict[str, Any]) -> int | None:
    """The most that waited for the writers at one time."""
    if spec["mode"] != "ours":
        return None
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().peak_host_bytes


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    report_progress("starting the engine")
    llm = build_engine(spec)
    engine = llm.llm_engine
    result: dict[str, Any] = {**describe_engine(llm), "runs": [], "answers": []}
    run_prompts(engine, spec, spec["prompts"], 4, "warm-up")
    for run in range(spec["runs"]):
        report_progress(f"run {run + 1} of {spec['runs']}")
        # A prefill is over when its answer is there, and so is its record.
        *seconds, prefilled = run_prompts(engine, spec, spec["prompts"], 1, f"prefill-{run}")
        _, decode_s, decoded = run_prompts(engine, spec, spec["prompts"], spec["output_tokens"], f"decode-{run}")
        answers = prefilled + decoded
        result["runs"].append(
            {
                "prefill_s": round(sum(seconds), 4),
                "decode_s": round(decode_s, 4),
                "files_missing": sum(not answer["there"] for answer in answers),
            }
        )
        result["answers"] = answers  # of the last run: they are the same in all
    result["num_gpu_blocks"] = engine.vllm_config.cache_config.num_gpu_blocks
    result["copies"] = COPIES[spec["mode"]] + (spec["mode"] != "none" and spec["platform"] == "cuda")
    result["peak_host_bytes"] = host_bytes(spec)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def main() -> None:
    spec_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(spec_file.read_text()))))


if __name__ == "__main__":
    main()
