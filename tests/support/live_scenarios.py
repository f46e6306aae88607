"""Scenarios for `tests.support.forked_engine.run`: records that are collected while an engine drafts."""

import random
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from bench.corpus import held_out_prompts
from bench.reference.residual import residual_stream_of
from proposers.hidden_states import Record, RecordDataset
from tests.support.claiming_connector import LOADED_TOKEN
from tests.support.record_scenarios import LAYERS, RING_BYTES, prompts, settle
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
        "drafter": class_path(getattr(runner(llm), "drafter", None) or getattr(runner(llm), "speculator", None)),
        "runner": type(runner(llm)).__module__,
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "metrics": metrics(llm),
    }


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
    ask = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    written = {}
    for kind, batch in kinds.items():
        before = len(RecordDataset(root).entries)
        for prompt in batch:  # one after the other, so that later ones find the blocks of earlier ones
            llm.generate([{"prompt_token_ids": prompt}], ask, use_tqdm=False)
            settle(llm)
        written[kind] = len(RecordDataset(root).entries) - before
    expected = residual_stream_of(llm.llm_engine.vllm_config.model_config.model)
    worst = max(
        float((record.hidden_states - expected(record.token_ids.tolist())[:, LAYERS]).abs().max())
        for record in RecordDataset(root)
    )
    return {"written": written, "worst": worst, "metrics": metrics(llm)}
