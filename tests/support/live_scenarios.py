"""Scenarios for `tests.support.forked_engine.run`: records that are collected while an engine drafts."""

import random
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import LLM, SamplingParams

from bench.corpus import held_out_prompts
from bench.reference.residual import residual_stream_of
from proposers.hidden_states import Record, RecordDataset
from proposers.hidden_states.drafts import UNKNOWN_TOKEN
from tests.support.claiming_connector import LOADED_TOKEN
from tests.support.record_scenarios import LAYERS, RING_BYTES, ask, generate, prompts, refusal, settle, standing_still
from tests.support.scenarios import allow_async_scheduling, class_path, metrics, runner

# Whole records of several requests at once, so that none is skipped where that isn't the point.
ROOMY = 100 * RING_BYTES


def connector(root: Path | str, **settings: Any) -> dict[str, Any]:
    """`kv_transfer_config` for collecting into a folder beside whatever drafts."""
    settings = {"storage_root": str(root), "layer_ids": LAYERS, "ring_bytes": ROOMY} | settings
    return {"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer", "kv_connector_extra_config": settings}


def among_others(root: Path | str, **settings: Any) -> dict[str, Any]:
    """The same within vLLM's `MultiConnector`, behind a connector that loads the beginnings of some prompts."""
    loader = {
        "kv_connector": "ClaimingConnector",
        "kv_connector_module_path": "tests.support.claiming_connector",
        "kv_role": "kv_both",
    }
    extra = {"connectors": [loader, connector(root, **settings)]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def draw_requests(llm: LLM, count: int, seed: int, max_tokens: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Texts of all lengths, some with a beginning in common, greedy and sampled, some with a stop token or string."""
    draw = random.Random(seed)
    texts = held_out_prompts(llm.get_tokenizer(), count, 220)
    requests = {}
    for i, text in enumerate(texts):
        start = texts[0][: draw.choice([0, 40, 64, 100])] if i else []
        prompt = [*start, *text[: draw.randint(1, 110)]]
        sampling: dict[str, Any] = {"temperature": draw.choice([0.0, 0.0, 0.5, 1.0])}
        kind = i % 4
        if kind == 1:
            sampling |= {"stop_token_ids": draw.sample(range(4, 1000), 150)}
        if kind == 2:
            sampling |= {"stop": ["se", "(", "re"], "include_stop_str_in_output": draw.random() < 0.5}
        extra = {"extra_args": {"kv_transfer_params": {"include_output_tokens": True}}}
        requests[f"request{i:03d}"] = (
            prompt,
            SamplingParams(max_tokens=draw.randint(1, max_tokens), ignore_eos=True, **sampling, **extra),
        )
    return requests


def live(llm: LLM, root: str, count: int, max_tokens: int, seed: int = 0, aborts: int = 4) -> dict[str, Any]:
    """Requests that come while others run, some of which are aborted; then every record against its request."""
    engine, draw = llm.llm_engine, random.Random(seed)
    requests = draw_requests(llm, count, seed, max_tokens)
    to_abort = set(draw.sample(sorted(requests), aborts))
    seen = watch_steps(engine.engine_core.engine_core.scheduler)
    finished: dict[str, Any] = {}
    aborted: set[str] = set()
    coming = list(requests.items())
    while coming or engine.has_unfinished_requests():
        for request_id, (prompt, params) in coming[: draw.randint(0, 3)]:
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            del coming[0]
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
            elif output.request_id in to_abort - aborted and len(output.outputs[0].token_ids) > 2:
                engine.abort_request([output.request_id])
                aborted.add(output.request_id)
    settle(llm)
    found = {record.info.request_id.rsplit("-", 1)[0]: record for record in RecordDataset(root)}
    return {
        "finished": sorted(finished),
        "records": sorted(found),
        "aborted": sorted(aborted),
        "wrong": [name for name, record in found.items() if not _is_of(record, finished[name])],
        "answers": [output.kv_transfer_params for output in finished.values() if output.kv_transfer_params],
        "reasons": sorted({record.info.finish_reason for record in found.values()}),
        "stop_strings": sum(isinstance(output.outputs[0].stop_reason, str) for output in finished.values()),
        **_who_drafts(llm),
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "metrics": metrics(llm),
        "skipped": skipped(llm),
        "drafts": {
            name: compare_drafts(record, seen[record.info.request_id], requests[name][1].temperature == 0)
            for name, record in found.items()
        },
    }


def _who_drafts(llm: LLM) -> dict[str, str]:
    if llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size > 1:
        return {}  # each rank in a process of its own
    drafter = getattr(runner(llm), "drafter", None) or getattr(runner(llm), "speculator", None)
    return {"drafter": class_path(drafter), "runner": type(runner(llm)).__module__}


def watch_steps(scheduler: Any) -> dict[str, list[tuple[int, list[int], int]]]:
    """By request, of each step whose outputs were taken: the row that the drafts follow, they, how many were right.

    Where steps overlap the scheduler has placeholders for drafts, all of them -1.
    """
    seen: dict[str, list[tuple[int, list[int], int]]] = defaultdict(list)
    update = scheduler.update_from_output

    def watched(scheduler_output: Any, model_runner_output: Any) -> Any:
        before = {request_id: request.num_tokens for request_id, request in scheduler.requests.items()}
        for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            tokens = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request_id]]
            request = scheduler.requests.get(request_id)
            if drafts and len(tokens) and request is not None and request.num_stale_output_tokens == 0:
                seen[request_id].append((before[request_id] - 1, list(drafts), len(tokens) - 1))
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = watched
    return seen


def compare_drafts(record: Record, seen: list[tuple[int, list[int], int]], greedy: bool) -> dict[str, int]:
    """What a record says of its drafts beside what the scheduler has seen: counts of both, and of what is wrong."""
    drafts, tokens = record.drafts, record.token_ids.tolist()
    assert drafts is not None
    seen = [step for step in seen if step[0] < len(tokens)]
    found = zip(drafts.rows.tolist(), drafts.counts.tolist(), drafts.tokens.tolist(), strict=True)
    steps = [(row, kept[:drafted], accepted) for row, (drafted, accepted), kept in found]
    counts = Counter(steps=len(steps))
    counts["other steps"] = [(r, len(d), a) for r, d, a in steps] != [(r, len(d), a) for r, d, a in seen]
    for (row, kept, accepted), (_, asked, _) in zip(steps, seen, strict=False):
        following = tokens[row + 1 :][: accepted + 1]
        counts["accepted"] += accepted
        counts["wrong"] += kept[: min(accepted, len(following))] != following[:accepted]
        counts["unknown"] += UNKNOWN_TOKEN in kept
        counts["others than scheduled"] += max(asked) >= 0 and UNKNOWN_TOKEN not in kept and kept != asked
        rejected = kept[accepted : accepted + 1]
        counts["right and rejected"] += greedy and bool(rejected) and rejected == following[accepted:]
    return dict(counts)


def live_asynchronous(llm: LLM, **arguments: Any) -> dict[str, Any]:
    return live(llm, **arguments)


live_asynchronous.prepare = allow_async_scheduling


def _is_of(record: Record, output: Any) -> bool:
    """Whether a record has the tokens of the answer that have rows, and says why the request ended."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return (
        record.token_ids.tolist() == tokens[:-1]
        and record.info.rows == len(record.hidden_states) == len(tokens) - 1
        and record.info.finish_reason == output.outputs[0].finish_reason
        and record.info.num_prompt_tokens == len(output.prompt_token_ids)
    )


def plain(llm: LLM, root: str, collected: list[str]) -> dict[str, Any]:
    """Extracts the same tokens without drafts: how far the collected rows are from those, by folder."""
    worst = {}
    for folder in collected:
        records = list(RecordDataset(folder))
        prompts = [{"prompt_token_ids": record.token_ids.tolist()} for record in records]
        ask = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"extract": True}})
        outputs = llm.generate(prompts, ask, use_tqdm=False)
        errors = [_distance(record, output) for record, output in zip(records, outputs, strict=True)]
        worst[folder] = max(errors)
    return {"worst": worst, "metrics": metrics(llm)}


def _distance(record: Record, output: Any) -> float:
    from proposers.hidden_states import load

    expected = load(output.kv_transfer_params["hidden_states_path"])
    assert torch.equal(expected.token_ids, record.token_ids)
    return float((record.hidden_states - expected.hidden_states).abs().max() / expected.hidden_states.abs().max())


def beside_a_loader(llm: LLM, root: str) -> dict[str, Any]:
    """Requests whose beginning another connector loads, requests that find their blocks, and others."""
    shared = prompts(96, seed=5)[0]
    kinds = {
        "computed": prompts(40, 90, seed=1),
        "loaded": [[LOADED_TOKEN, *prompt] for prompt in prompts(100, 70, seed=2)],
        "hit": [[LOADED_TOKEN, *prompt] for prompt in prompts(100, 70, seed=2)],
        "hit of computed": [[*shared, 7, 8], [*shared, 9, 10]],
    }
    written = {}
    for kind, batch in kinds.items():
        before = len(RecordDataset(root).entries)
        for prompt in batch:  # one after the other, so that later ones find the blocks of earlier ones
            llm.generate([{"prompt_token_ids": prompt}], ask(12), use_tqdm=False)
            settle(llm)
        written[kind] = len(RecordDataset(root).entries) - before
    asked = generate(llm, prompts(33), ask(4, claim="this", name="asked/for"))
    settle(llm)
    return {
        "written": written,
        "worst": worst_error(llm, root),
        "skipped": skipped(llm),
        "metrics": metrics(llm),
        "asked": [asked[0]["params"], Path(root, "asked/for.safetensors").exists()],
        "refused": refusal(llm, ask(4, claim="this", window=[3])),
    }


def serving_first(llm: LLM, root: str) -> dict[str, Any]:
    """A disk that stands still while requests come and go; then one that writes again."""
    facts: dict[str, Any] = {}
    # Of forty rows the ring takes one record of some thirty; of more than a ring it takes one alone, in pieces.
    for name, lengths in {"short": (20, 22, 24, 26), "long": (150, 26)}.items():
        before = skipped(llm).get("lag", 0)
        with standing_still(llm) as by_itself:
            records = [ask(10, include_output_tokens=True)]
            outputs = [generate(llm, [prompt], records)[0] for prompt in prompts(*lengths)]
            stood_still = not by_itself.is_set()
            files_meanwhile = len(RecordDataset(root))
        settle(llm)
        facts[name] = {
            "answers": [output["output"] for output in outputs],
            "params": [output["params"] for output in outputs],
            "stood still": stood_still,
            "new files meanwhile": files_meanwhile - sum(len(kind["rows"]) for kind in facts.values()),
            "rows": [record.info.rows for record in RecordDataset(root)][sum(len(k["rows"]) for k in facts.values()) :],
            "skipped": skipped(llm).get("lag", 0) - before,
        }
    after = generate(llm, prompts(33), ask(10, name="asked/for"))
    settle(llm)
    facts["worst"] = worst_error(llm, root)
    facts["after"] = [after[0]["params"], Path(root, "asked/for.safetensors").exists()]
    facts["blocks in use"] = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.usage
    return facts


def beside_prompts(llm: LLM, root: str) -> dict[str, Any]:
    """Short requests that end while a long prompt is run in chunks, and one that ends while nothing is.

    Returns:
        of each, the steps from its end up to that which takes its rows out, and whether these ran prompts.
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    steps = watch_takes(scheduler)
    found: dict[str, Any] = {}

    def run(name: str, *others: list[int]) -> None:
        engine.add_request(name, {"prompt_token_ids": prompts(9, seed=len(found))[0]}, ask(1, name=name))
        for i, prompt in enumerate(others):
            engine.add_request(f"{name}-{i}", {"prompt_token_ids": prompt}, ask(8, extract=False))
        ended = None
        while scheduler.has_requests():
            done = engine.step()
            if ended is None and any(output.request_id == name and output.finished for output in done):
                ended = len(steps)
        after = steps[ended:]
        found[name] = [runs_prompts for runs_prompts, takes in after[: 1 + [takes for _, takes in after].index([name])]]

    run("alone")
    run("beside a few chunks", prompts(100, seed=7)[0])
    run("beside many chunks", prompts(300, seed=8)[0])
    scheduler.connector._block_pool = SimpleNamespace(get_num_free_blocks=lambda: 0)
    run("without free blocks", prompts(100, seed=9)[0])
    return {"found": found, "worst": worst_error(llm, root), "records": len(RecordDataset(root))}


def watch_takes(scheduler: Any) -> list[tuple[bool, list[str]]]:
    """Of each step from now on, whether it runs part of a prompt, and whose rows are taken out in it."""
    seen: list[tuple[bool, list[str]]] = []
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        longest = max(output.num_scheduled_tokens.values(), default=0)
        takes = [take.name for take in output.kv_connector_metadata.takes]
        seen.append((longest > 4, takes))  # three drafts and the token before them
        return output

    scheduler.schedule = watched
    return seen


def without_prefix_cache(llm: LLM, root: str) -> dict[str, Any]:
    """The same prompt twice: what is collected, and how many of its blocks have keys."""
    engine = llm.llm_engine.engine_core.engine_core
    finish, keys = engine.scheduler._free_request, []

    def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
        keys.append(len(request.block_hashes))
        return finish(request, *args, **kwargs)

    engine.scheduler._free_request = watched
    llm.generate([{"prompt_token_ids": prompts(100)[0]}] * 2, ask(8), use_tqdm=False)
    settle(llm)
    return {"keys": keys, "records": len(RecordDataset(root)), "worst": worst_error(llm, root)}


def answers(llm: LLM, root: str) -> dict[str, Any]:
    """What answers say that wait for records, of a request that says nothing of one and of two that ask for it."""
    return {
        "sampled out": generate(llm, prompts(50), ask(include_output_tokens=True)),
        "asked for": generate(llm, prompts(50, 7), ask(include_output_tokens=True, extract=True)),
        "skipped": skipped(llm),
    }


def shut_down(llm: LLM, root: str) -> dict[str, Any]:
    """An engine that is shut down when its last answer has come, as a server does that is told to stop."""
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts(30, 50, 70)], ask(12), use_tqdm=False)
    before = len(RecordDataset(root))
    llm.llm_engine.engine_core.shutdown(timeout=0)
    return {"before": before, "rows": sorted(len(record.token_ids) for record in RecordDataset(root))}


def skipped(llm: LLM) -> dict[str, int]:
    """Records that were skipped, by reason."""
    found = [metric for metric in llm.get_metrics() if metric.name == "vllm:hidden_states_records_skipped"]
    return {metric.labels["reason"]: int(metric.value) for metric in found if metric.value}


def worst_error(llm: LLM, root: str) -> float:
    """The largest difference of any record's row from the dense reference's."""
    expected = residual_stream_of(llm.llm_engine.vllm_config.model_config.model)
    return max(
        float((record.hidden_states - expected(record.token_ids.tolist())[:, LAYERS]).abs().max())
        for record in RecordDataset(root)
    )
