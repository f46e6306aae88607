"""One mode of `bench gpu`, in a process of its own: `python -m bench.workers.gpu SPEC.json RESULT.json`."""

import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.processes import report_progress, take_turn
from bench.spread import quartiles
from bench.workers.arrivals import measure_arrivals
from bench.workers.engine import (
    acceptance_counters,
    add_requests,
    describe_engine,
    drafter_of,
    keep_engine_in_process,
    merge_engine_arguments,
    random_prompts,
    run_batch,
    run_worker,
)
from bench.workers.launches import Launch, middle_profile, summarise_launches
from bench.workers.propose_times import take_propose_times, time_propose

# `MTP_PROPOSERS`, and the runner that is asked for.
MODES = {
    "none": ("off", None),  # vLLM's choice
    "upstream-v1": ("upstream", "0"),
    "upstream-v2": ("upstream", "1"),
    "ours": ("on", "0"),
    "ours-v2": ("on", "1"),
    "ours-v2-cheap": ("on", "1"),
    "ours-v2-adaptive": ("on", "1"),
    "ours-v2-all-rows": ("on", "1"),
}
CHEAP = "-cheap"
"""How the name of a mode ends whose drafts read weights of 8 bits and score a part of the vocabulary."""
ADAPTIVE = "-adaptive"
"""How the name of a mode ends in which the number of drafts is chosen step by step."""
ALL_ROWS = "-all-rows"
"""How the name of a mode ends that has a prefix cache, emptied before each run: for its sake modules run over all of a
prompt."""
PROFILED_STEPS, PROFILES = 20, 3


def options_of(mode: str, vocab_size: int, size: int, folder: Path) -> dict[str, Any]:
    """Engine arguments of a mode beyond those of all: of one with options of this package.

    Args:
        size: tokens of the draft vocabulary. Which ones they are makes no difference to dummy weights, or to a step's
            time.
        folder: where the list is put; to be kept for as long as the engine.
    """
    if mode.endswith(ADAPTIVE):
        return {"additional_config": {"mtp_proposers": {"adapt_drafts": True}}}
    if mode.endswith(ALL_ROWS):
        return {"enable_prefix_caching": True}
    if not mode.endswith(CHEAP):
        return {}
    file = folder / "draft_vocabulary.json"
    file.write_text(json.dumps(sorted(random.Random(0).sample(range(vocab_size), min(size, vocab_size * 3 // 4)))))
    return {"additional_config": {"mtp_proposers": {"draft_weights": "fp8", "draft_vocabulary": str(file)}}}


def build_engine(spec: dict[str, Any]) -> tuple[Any, int | None]:
    """An in-process `LLM` for the mode of the spec, and the bytes that its graphs take, if they can be told."""
    keep_engine_in_process(*MODES[spec["mode"]])
    from vllm import LLM

    speculative = {
        "method": "mtp",
        "num_speculative_tokens": spec["k"],
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": spec["acceptance_rates"],
        **spec["speculative_config"],
    }
    defaults = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max(spec["prompt_tokens"]) + spec["output_tokens"] + spec["k"] + 1,
        "max_num_seqs": max(spec["batches"]),
        "tensor_parallel_size": spec["tensor_parallel"],
        "disable_log_stats": False,
        "enable_prefix_caching": False,  # every run computes the same prompts anew
    }
    of_mode = options_of(spec["mode"], spec["vocab_size"], spec["draft_vocabulary"], Path(spec["model"]))
    of_mode |= {"speculative_config": None if spec["mode"] == "none" else speculative}
    with GraphMemory() as graph_memory:
        llm = LLM(spec["model"], **merge_engine_arguments(defaults, of_mode, spec["engine"]))
    # Where engines start side by side, what the device lacks afterwards is not what one of them took; several ranks
    # have processes of their own.
    return llm, None if spec["by_turns"] or spec["tensor_parallel"] > 1 else graph_memory.num_bytes


class GraphMemory:
    """What the runners' capture phase takes, read off the device around it."""

    num_bytes = 0

    def __enter__(self) -> "GraphMemory":
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

        self._originals = [(runner, runner.capture_model) for runner in (V1, V2)]
        for runner, original in self._originals:
            runner.capture_model = self._measured(original)
        return self

    def __exit__(self, *_: object) -> None:
        for runner, original in self._originals:
            runner.capture_model = original

    def _measured(self, original: Any) -> Any:
        def capture_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            before = torch.cuda.mem_get_info()[0]
            result = original(runner, *args, **kwargs)
            torch.cuda.synchronize()
            self.num_bytes = before - torch.cuda.mem_get_info()[0]
            return result

        return capture_model


def profile_steps(llm: Any, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """GPU time of `PROFILED_STEPS` decode steps, by kernel family, in ms a step; of several ranks, the first's."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    add_requests(engine, prompts, params, "profile")
    seen: set[str] = set()
    while len(seen) < len(prompts):
        seen |= {output.request_id for output in engine.step()}
    for _ in range(3):
        engine.step()
    llm.collective_rpc(start_profile)
    before = time.perf_counter()
    for _ in range(PROFILED_STEPS):
        engine.step()
    llm.collective_rpc(synchronize)
    wall = (time.perf_counter() - before) * 1e3
    ranks = llm.collective_rpc(stop_profile)
    while engine.has_unfinished_requests():
        engine.step()
    return {"profiled_step_ms": round(wall / PROFILED_STEPS, 4), **summarise_launches(ranks, PROFILED_STEPS)}


def start_profile(worker: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    synchronize(worker)
    worker.step_profiler = profile(activities=[ProfilerActivity.CUDA])
    worker.step_profiler.__enter__()


def synchronize(worker: Any) -> None:
    import torch

    torch.cuda.synchronize()


def stop_profile(worker: Any) -> list[Launch]:
    """The kernels that were launched."""
    import torch

    worker.step_profiler.__exit__(None, None, None)
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in worker.step_profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def copy_bandwidth(worker: Any) -> float:
    """Bytes per second that a large copy on the device moves, read and written.

    Of many the fastest: the clock of a device that had nothing to do rises with the load, and a floor is a floor.
    """
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(100):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / min(times)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    report_progress("starting the engine")
    llm, graph_memory = build_engine(spec)
    result: dict[str, Any] = {**describe_engine(llm), "graph_memory_bytes": graph_memory, "prompts": {}}
    if spec["arrivals"]:
        for length in spec["prompt_tokens"]:
            result["prompts"][str(length)] = measure_arrivals(llm, spec, length)
        return result
    llm.collective_rpc(time_propose)
    for length in spec["prompt_tokens"]:
        prompts = random_prompts(spec["vocab_size"], max(spec["batches"]), length)
        figures: dict[str, dict[str, Any]] = defaultdict(dict)
        for batch, done in run_by_turns(llm, spec, prompts).items():
            found = summarise(done)
            if length == spec["prompt_tokens"][0]:
                take_turn()
                profiles = [profile_steps(llm, prompts[:batch], spec["output_tokens"]) for _ in range(PROFILES)]
                found |= middle_profile(profiles)
            for name, value in found.items():
                figures[name][str(batch)] = value
        result["prompts"][str(length)] = dict(figures)
    take_turn()
    result["weight_bytes"] = llm.collective_rpc(weight_bytes)[0]
    result["copy_bytes_per_s"] = llm.collective_rpc(copy_bandwidth)[0]
    return result


def run_by_turns(llm: Any, spec: dict[str, Any], prompts: list[list[int]]) -> dict[int, list[dict[str, Any]]]:
    """What `run_batch` found in each run, by batch size, with drafts, accepted drafts and times of `propose`.

    By turns: a host that others use is slow for seconds on end, which is as long as all runs of one batch size take.
    """
    length, output_tokens = len(prompts[0]), spec["output_tokens"]
    for batch in spec["batches"]:
        take_turn()
        report_progress(f"prompt {length}, warming up batch {batch}")
        run_batch(llm.llm_engine, prompts[:batch], output_tokens, f"warm-up-{length}-{batch}")
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for repeat in range(spec["runs"]):
        for batch in spec["batches"]:
            take_turn()
            report_progress(f"prompt {length}, batch {batch}, run {repeat + 1} of {spec['runs']}")
            llm.reset_prefix_cache()  # which one of the modes has
            drafts, accepted = acceptance_counters(llm)
            llm.collective_rpc(take_propose_times)
            run = run_batch(llm.llm_engine, prompts[:batch], output_tokens, f"{length}-{batch}-{repeat}")
            drafts_now, accepted_now = acceptance_counters(llm)
            run |= {"drafts": drafts_now - drafts, "accepted": sum(accepted_now) - sum(accepted)}
            times, spans = llm.collective_rpc(take_propose_times)[0], run["decode_spans"]
            run["propose_host_ms"] = [
                (after - before) * 1e3 for before, after in times if any(start <= before < end for start, end in spans)
            ]
            runs[batch].append(run)
    return runs


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one batch size over its runs."""
    speeds = [sum(map(len, run["token_ids"])) / run["seconds"] for run in runs]
    figures: dict[str, Any] = {
        name: quartiles([ms for run in runs for ms in run[name]])
        for name in ("propose_host_ms", "step_ms", "ttft_ms", "yardstick_ms")
    }
    figures["output_tokens_per_s"] = quartiles(speeds, 1)
    figures["decode_tokens_per_s"] = quartiles([run["decode_tokens_per_s"] for run in runs], 1)
    if drafts := sum(run["drafts"] for run in runs):
        figures["acceptance_length"] = round(1 + sum(run["accepted"] for run in runs) / drafts, 4)
    return figures


def weight_bytes(worker: Any) -> dict[str, int]:
    """Bytes of experts, of embeddings, which a step reads a few rows of, and of everything else."""
    runner = worker.model_runner
    drafter = drafter_of(runner)
    totals = {"experts": 0, "embeddings": 0, "dense": 0}
    seen: set[int] = set()
    for model in (runner.model, getattr(drafter, "model", None)):
        for name, parameter in model.named_parameters() if model is not None else ():
            if parameter.data_ptr() not in seen and not name.endswith("wide_weight"):  # read in place of another
                seen.add(parameter.data_ptr())
                kind = "experts" if "experts" in name else "embeddings" if "embed_tokens" in name else "dense"
                totals[kind] += parameter.nbytes
    cheap = getattr(drafter, "cheap", None)
    totals["dense"] += 0 if cheap is None else cheap.copied_bytes
    return totals


if __name__ == "__main__":
    run_worker(measure)
