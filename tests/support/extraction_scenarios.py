"""Scenarios for `tests.support.forked_engine.run`: engines that extract hidden states, and what lies in their store."""

from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from bench.reference.residual import residual_stream_of
from bench.workers.engine import drafter_of
from tests.support.scenarios import class_path, generate, metrics, runner


class StoreReader:
    """Reads, after every step, all rows that the store holds of the running requests, through their block tables."""

    def __init__(self, model_runner: Any) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        self.steps = 0
        self._runner = model_runner
        self._sample = self._runner.sample_tokens
        self._runner.sample_tokens = self._read

    def _read(self, *args: Any) -> Any:
        store, batch = self._runner.hidden_states_extractor.store, self._runner.input_batch
        table = batch.block_table[store.anchor.kv_cache_group_id].get_device_tensor(batch.num_reqs)
        self.steps += 1
        for i, req_id in enumerate(batch.req_ids):
            length = int(self._runner.seq_lens[i])
            blocks = table[i, : -(-length // store.block_size)].long()
            self.rows[plain_id(req_id)] = store.rows[blocks].flatten(0, 1)[:length].clone()
        return self._sample(*args)


class Witness:
    """Keeps the residual stream of every token as the layers saw it, by hooks of its own, for want of a reference.

    (vLLM's CPU build computes MLA and short convolutions otherwise than transformers does, with or without us.)
    """

    def __init__(self, llm: LLM) -> None:
        self.streams: dict[str, dict[int, torch.Tensor]] = {}
        self._runner = runner(llm)
        self._seen: list[torch.Tensor] = []
        model = self._runner.model.model
        for layer in model.layers:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.layers[-1].register_forward_hook(lambda layer, args, output: self._seen.append(sum(output)))
        self._runner.model.register_forward_hook(self._sort)

    def _enter(self, layer: Any, args: Any, kwargs: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self._seen.append(sum(given))

    def _sort(self, model: Any, args: Any, output: Any) -> None:
        streams, self._seen = torch.stack(self._seen, dim=1), []
        starts = self._runner.query_start_loc.cpu.tolist()
        for i, req_id in enumerate(self._runner.input_batch.req_ids):
            rows = streams[starts[i] : starts[i + 1]]
            first = int(self._runner.seq_lens[i]) - len(rows)
            self.streams.setdefault(plain_id(req_id), {}).update(enumerate(rows, first))


def plain_id(req_id: str) -> str:
    """The id of a request without what vLLM has put after it."""
    return req_id.split("-")[0]


def prompts(count: int, shared: int = 0) -> list[list[int]]:
    """Random token ids; every prompt begins with the same `shared` tokens."""
    generator = torch.Generator().manual_seed(count)
    start = torch.randint(1, 128, (shared,), generator=generator).tolist()
    lengths = torch.randint(3, 150, (count,), generator=generator).tolist()
    return [start + torch.randint(1, 128, (n,), generator=generator).tolist() for n in lengths]


def state(llm: LLM) -> dict[str, Any]:
    """What extracts, in which layout, and how it went."""
    config, drafter = llm.llm_engine.vllm_config, drafter_of(runner(llm))
    return {
        "proposer": class_path(drafter),
        "metrics": metrics(llm),
        "num_blocks": config.cache_config.num_gpu_blocks,
        "specs": [type(g.kv_cache_spec).__name__ for g in runner(llm).kv_cache_config.kv_cache_groups],
        "store": [*drafter.store.rows.shape] if getattr(drafter, "store", None) else None,
    }


def parity(llm: LLM, *, witnessed: bool = False) -> dict[str, Any]:
    """Compares every row of every layer of many requests with the dense reference, or with what the layers saw.

    Returns:
        the largest error of each layer over the largest value of that layer, and counts.
    """
    reader, witness = StoreReader(runner(llm)), Witness(llm) if witnessed else None
    layer_ids = list(runner(llm).hidden_states_extractor.plan.layer_ids)
    worst, num_rows, num_missing = torch.zeros(len(layer_ids)), 0, 0
    # The last batch finds the prefixes of the one before it in the cache, and so do its own later requests.
    for batch in (prompts(1), prompts(16), prompts(8, shared=96), prompts(8, shared=96)):
        for output in generate(llm, batch, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)):
            # The last token was sampled and not run.
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
            if witness is None:
                expected = residual_stream_of(llm.llm_engine.vllm_config.model_config.model)(tokens)
            else:
                seen = witness.streams[output.request_id]
                expected = torch.stack([seen[position] for position in range(len(tokens))]).float()
            rows = reader.rows[output.request_id][: len(tokens)].float()
            num_missing += len(tokens) - len(rows)
            num_rows += len(rows)
            expected = expected[: len(rows), layer_ids]
            worst = torch.maximum(worst, (rows - expected).abs().amax((0, 2)) / expected.abs().amax((0, 2)))
    counts = {"num_rows": num_rows, "num_missing": num_missing, "num_steps": reader.steps}
    return {"worst": worst.tolist(), **counts, **state(llm)}


def decode(llm: LLM, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> dict[str, Any]:
    """Generations, and how many positions each step verified."""
    num_tokens, execute = [], runner(llm).execute_model

    def counting(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            num_tokens.append(scheduler_output.total_num_scheduled_tokens)
        return execute(scheduler_output, *args, **kwargs)

    runner(llm).execute_model = counting
    params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **sampling})
    tokens = [list(output.outputs[0].token_ids) for output in generate(llm, prompts, params)]
    proposer = drafter_of(runner(llm))
    extracting = {} if proposer is None else {"proposer": class_path(proposer)}
    return {"tokens": tokens, "num_tokens": num_tokens, "metrics": metrics(llm), **extracting}


def copies_rows(llm: LLM) -> bool:
    """Whether the host's copy of a block, which some prefix hits of recurrent models call for, has its rows."""
    model_runner, rows = runner(llm), runner(llm).hidden_states_extractor.store.rows
    rows[3] = 1.0
    rows[5] = 2.0
    copy_kv_cache_blocks_inplace(model_runner.kv_caches, len(rows), [KVCacheBlockCopy(3, 5)])
    return bool((rows[5] == 1.0).all())


def ranks(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Of a tensor-parallel engine: the width of each rank's rows, and whether all together are the reference's."""
    llm.collective_rpc(_start_reading)
    (output,) = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    read = llm.collective_rpc(_stop_reading)
    config = llm.llm_engine.vllm_config
    layer_ids = config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
    expected = residual_stream_of(config.model_config.model)(tokens)[:, layer_ids]
    slices = [torch.tensor(part["rows"]) for part in read]
    rows = torch.cat(slices, dim=-1)
    return {
        "widths": [part.shape[-1] for part in slices],
        "num_blocks": [part["num_blocks"] for part in read],
        "worst": float((rows - expected).abs().max() / expected.abs().max()),
    }


def _start_reading(worker: Any) -> None:
    worker.model_runner.reader = StoreReader(worker.model_runner)


def _stop_reading(worker: Any) -> dict[str, Any]:
    model_runner = worker.model_runner
    (rows,) = model_runner.reader.rows.values()
    return {"num_blocks": model_runner.kv_cache_config.num_blocks, "rows": rows.tolist()}
