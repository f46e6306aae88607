"""One mode of `bench extract`, in a process of its own: `python -m bench.workers.extract SPEC.json RESULT.json`."""

import resource
import time
from pathlib import Path
from typing import Any

from bench.processes import report_progress, take_turn
from bench.workers.engine import (
    acceptance_counters,
    add_requests,
    describe_engine,
    keep_engine_in_process,
    merge_engine_arguments,
    run_worker,
)
from proposers.hidden_states.plan import CONNECTOR, CONNECTOR_OF_THE_HOST, connector_config

# `MTP_PROPOSERS`, and the runner that is asked for; None: the default, which is not the same for all.
MODES = {
    "none": ("off", None),
    "upstream": ("upstream", None),
    "ours": ("on", None),
    "ours-v2": ("on", "1"),
    "ours-fp8": ("on", None),
    "mtp": ("on", None),
    "mtp+records": ("on", None),
    "mtp-v2": ("on", "1"),
    "mtp+records-v2": ("on", "1"),
}

# How often a row is copied between the model and the file, by the code: ours writes the captured stream to a buffer,
# scatters it to the store and gathers it to the host; vLLM's stacks it, copies it to a buffer, scatters, gathers.
COPIES = {"upstream": 4}
COPIES_OF_OURS = 3

# Of a run without a pause, outputs one after the other in quarters of `output_tokens`, which is their mean.
STEADY = (4, 2, 5, 3, 6)


def build_engine(spec: dict[str, Any]) -> Any:
    """An in-process `LLM` for the mode of the spec."""
    keep_engine_in_process(*MODES[spec["mode"]])
    from vllm import LLM

    dummy = {"load_format": "dummy", "skip_tokenizer_init": True} if spec["dummy_weights"] else {}
    defaults = dummy | {
        "dtype": spec["dtype"],
        "max_model_len": spec["prompt_tokens"] + max(STEADY) * spec["output_tokens"] // 4 + 2,
        "max_num_seqs": spec["batch"],
        "disable_log_stats": False,
        "enable_prefix_caching": False,  # every run computes the same prompts anew
    }
    return LLM(spec["model"], **merge_engine_arguments(defaults, extraction_arguments(spec), spec["engine"]))


def has_records(mode: str) -> bool:
    return mode not in ("none", "mtp", "mtp-v2")


def is_ours(mode: str) -> bool:
    """Whether the mode's records are this package's."""
    return MODES[mode][0] == "on" and has_records(mode)


def is_fp8(mode: str) -> bool:
    return mode.endswith("-fp8")


def drafts(mode: str) -> bool:
    return mode.startswith("mtp")


def without_records(mode: str) -> str:
    """The mode that drafts as this one does, and leaves no records."""
    return mode.replace("+records", "")


def extraction_arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """What makes an engine extract, or draft, in each mode."""
    mode = spec["mode"]
    if mode == "none":
        return {}
    ours = is_ours(mode)
    extra = {"storage_root" if ours else "shared_storage_path": spec["storage"]}
    if ours:
        extra |= spec["connector"]
    if is_fp8(mode):
        extra |= {"dtype": "fp8"}
    if drafts(mode):
        drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": spec["drafts"]}}
        if not ours:
            return drafting
        extra |= {"layer_ids": spec["layer_ids"]}
        return drafting | {"kv_transfer_config": connector_config(extra)}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": spec["layer_ids"]}},
        },
        "kv_transfer_config": connector_config(extra, CONNECTOR if ours else CONNECTOR_OF_THE_HOST),
    }


def run_all(engine: Any, prompts: list[list[int]], params: Any, tag: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until every prompt, all given at once, has its answer and so its record; and the answers."""
    began = time.perf_counter()
    add_requests(engine, prompts, params, tag)
    answers = []
    while engine.has_unfinished_requests():
        answers += [read_answer(output) for output in engine.step() if output.finished]
    return time.perf_counter() - began, answers


def run_decode(
    engine: Any, prompts: list[list[int]], params: Any, tag: str
) -> tuple[float, int, float, list[dict[str, Any]]]:
    """Decodes all prompts at once.

    Returns:
        seconds from where everybody has a token to where the first lacks but one, since then records are taken out; the
        tokens in between; seconds from there to the last answer, which waits for its record; the answers.
    """
    add_requests(engine, prompts, params, tag)
    lengths: dict[str, int] = {}
    answers: list[dict[str, Any]] = []
    first = last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                answers.append(read_answer(output))
        now = time.perf_counter(), sum(lengths.values())
        if first is None and len(lengths) == len(prompts):
            first = now
        if last is None and max(lengths.values(), default=0) >= params.max_tokens - 1:
            last = now
    if first is None or last is None or last[0] <= first[0]:
        raise ValueError(
            f"The first of {len(prompts)} requests ended before the last had begun, so there was no decoding to time: "
            "give more --output-tokens, or a smaller --batch."
        )
    return last[0] - first[0], last[1] - first[1], time.perf_counter() - last[0], answers


def ask(spec: dict[str, Any], max_tokens: int) -> Any:
    """Greedy, with a record of all rows where the mode extracts."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"include_output_tokens": True}} if has_records(spec["mode"]) else {}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra)


def read_answer(output: Any) -> dict[str, Any]:
    params = output.kv_transfer_params or {}
    path = params.get("hidden_states_path")
    return {
        "id": output.request_id,
        "tokens": [*output.prompt_token_ids, *output.outputs[0].token_ids],
        "path": path,
        "there": path is not None and Path(path).exists(),
    }


def settle(engine: Any) -> None:
    """Steps until every record is written that no answer waits for."""
    while engine.engine_core.engine_core.scheduler.has_requests():
        engine.step()


def find_records(answers: list[dict[str, Any]], storage: str) -> None:
    """Adds to answers that carry no path those of their records, which have the requests' ids."""
    from proposers.hidden_states import RecordDataset

    records = RecordDataset(storage)
    paths = {records[i].info.request_id.rsplit("-", 1)[0]: str(path) for i, (path, _) in enumerate(records.entries)}
    for answer in answers:
        if answer["id"] in paths:
            answer |= {"path": paths[answer["id"]], "there": True}


def run_steady(llm: Any, spec: dict[str, Any], tag: str) -> dict[str, float]:
    """Keeps `batch` requests running, so that prompts, decoding and writing go on side by side as they do on a server.

    As many again are sent ahead, so that a request whose answer waits for its file leaves its place to another; and
    the requests' parameters differ, one after the other, so that they don't all end together.

    Returns:
        `seconds` from where as many have ended as run at a time, and of that time: `tokens` of prompts that were begun
        to be answered and of outputs, `requests` that ended, and `bytes` of records that were written.
    """
    engine, prompts, batch = llm.llm_engine, spec["prompts"], spec["batch"]
    params = [ask(spec, spec["output_tokens"] * quarters // 4) for quarters in STEADY]
    lengths: dict[str, int] = {}
    begun, number, ended = None, 0, 0
    tokens, requests, bytes_before = 0, 0, 0
    while begun is None or time.perf_counter() - begun < spec["steady_s"]:
        while engine.get_num_unfinished_requests() < 2 * batch:
            prompt = prompts[number % len(prompts)]
            engine.add_request(f"{tag}-{number}", {"prompt_token_ids": prompt}, params[number % len(params)])
            number += 1
        for output in engine.step():
            now = len(output.outputs[0].token_ids)
            new = now - lengths.get(output.request_id, -len(output.prompt_token_ids))
            lengths[output.request_id] = now
            ended += output.finished
            if begun is not None:
                tokens, requests = tokens + new, requests + output.finished
        if begun is None and ended >= batch:
            begun, bytes_before = time.perf_counter(), counted(llm, "bytes_written")
    took, num_bytes = time.perf_counter() - begun, counted(llm, "bytes_written") - bytes_before
    while engine.has_unfinished_requests():
        engine.step()
    settle(engine)
    return {"seconds": round(took, 3), "tokens": tokens, "requests": requests, "bytes": num_bytes}


def remove_records(storage: str, tag: str) -> None:
    """Of a stretch, so that the next one writes to memory that was used before: new memory may cost more."""
    for path in Path(storage).rglob(f"*{tag}-*"):
        path.unlink()


def counted(llm: Any, name: str) -> int:
    """One of the connector's counters, the sum of all labels."""
    name = f"vllm:hidden_states_{name}"
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == name))


def newly_skipped(llm: Any, result: dict[str, Any]) -> int:
    """Records that were skipped since this was asked last."""
    before, result["skipped"] = result.get("skipped", 0), counted(llm, "records_skipped")
    return result["skipped"] - before


def host_bytes(spec: dict[str, Any]) -> int | None:
    """The most that waited for the writers at one time."""
    if not is_ours(spec["mode"]):
        return None
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().peak_host_bytes


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    report_progress("starting the engine")
    llm = build_engine(spec)
    engine, prompts, batch = llm.llm_engine, spec["prompts"], spec["batch"]
    result: dict[str, Any] = {**describe_engine(llm), "runs": []}
    take_turn()
    run_all(engine, prompts, ask(spec, 1), "warm-up-prefill")
    run_all(engine, prompts[:batch], ask(spec, 4), "warm-up-decode")
    settle(engine)
    for run in range(spec["runs"]):
        take_turn()
        report_progress(f"run {run + 1} of {spec['runs']}")
        prefill_s, answers = run_all(engine, prompts, ask(spec, 1), f"prefill-{run}")
        decode_s, decode_tokens, end_s = 0.0, 0, 0.0
        for start in range(0, len(prompts), batch):
            part, tag = prompts[start : start + batch], f"decode-{run}-{start}"
            seconds, tokens, rest, decoded = run_decode(engine, part, ask(spec, spec["output_tokens"]), tag)
            decode_s, decode_tokens, end_s = decode_s + seconds, decode_tokens + tokens, end_s + rest
            answers += decoded
        settle(engine)
        if is_ours(spec["mode"]) and drafts(spec["mode"]):
            find_records(answers, spec["storage"])
        result["runs"].append(
            {
                "prefill_s": round(prefill_s, 4),
                "decode_s": round(decode_s, 4),
                "decode_tokens": decode_tokens,
                "last_answer_ms": round(1e3 * end_s / -(-len(prompts) // batch), 3),
                "files_missing": sum(not answer["there"] for answer in answers) - newly_skipped(llm, result),
            }
        )
        result["answers"] = answers  # of the last run: they are the same in all
    result["num_gpu_blocks"] = engine.vllm_config.cache_config.num_gpu_blocks
    result["copies"] = 0
    if has_records(spec["mode"]):
        result["copies"] = COPIES.get(spec["mode"], COPIES_OF_OURS) + (spec["platform"] == "cuda")
    result["steady"] = []
    for run in range(spec["runs"] if spec["steady_s"] else 0):
        take_turn()
        report_progress(f"{spec['steady_s']:g} seconds without a pause, run {run + 1} of {spec['runs']}")
        done = run_steady(llm, spec, tag := f"steady-{run}")
        report_progress(f"{done['tokens'] / done['seconds']:.0f} tokens per second")
        remove_records(spec["storage"], tag)
        result["steady"].append(done | {"skipped": newly_skipped(llm, result)})
    passes, accepted = acceptance_counters(llm)
    result["tokens_per_pass"] = round(1 + sum(accepted) / passes, 3) if passes else None
    result["peak_host_bytes"] = host_bytes(spec)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


if __name__ == "__main__":
    run_worker(measure)
