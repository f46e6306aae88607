"""Engines that extract hidden states, what lies in their store, and dense references to compare with."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from tests.oracle.dense import DenseModel, Reference
from tests.scenarios import generate, metrics, runner

# Tiny models of one family each, as transformers makes them: three layers, so that the last is not the second.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    # Layers that hand on a residual which nobody adds.
    "cohere": ("Cohere", {"logit_scale": 1.0, "eos_token_id": 0, "layer_norm_eps": 1e-5}),
    # Layers without a residual.
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_inner": 96, "n_positions": 512, "vocab_size": 128}),
    "gemma2": ("Gemma2", {"sliding_window": 64, "query_pre_attn_scalar": 32}),
    "mimo": ("Qwen2", {}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5, "block_auto_adjust_ff_dim": False, "conv_L_cache":3, "conv_dim":64,"conv_bias":False, "conv_use_xavier_init":False,"block_multiple_of":32,"block_ffn_dim_multiplier":1.0,"block_dim":64,"block_ff_dim":96,"block_use_swiglu":True,"block_norm_eps":1e-5,"block_mlp_init_scale":1.0,"block_out_init_scale":1.0}),
    "qwen3next": ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4, "num_experts_per_tok":2, "decoder_sparse_step":1, "mlp_only_layers":[0,1], "linear_num_key_heads":2, "linear_num_value_heads":2, "linear_key_head_dim":32, "linear_value_head_dim":32, "moe_intermediate_size":64,"shared_expert_intermediate_size":64, "partial_rotary_factor":0.5}),
    "deepseek": ("DeepseekV3", {"q_lora_rank": None, "kv_lora_rank": 512, "head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_key_value_heads": 2, "first_k_dense_replace": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 64}),
    "gemma3": ("Gemma3", {"sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}),
}


def extract(layer_ids: list[int] | None, **more: Any) -> dict[str, Any]:
    """Engine arguments for extracting these layers' hidden states."""
    hf_config = {} if layer_ids is None else {"eagle_aux_hidden_state_layer_ids": layer_ids}
    config = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": hf_config},
    }
    return {"speculative_config": config | more}


def write_model(family: str, folder: Path) -> str:
    """Writes a tiny model of that family, with random weights, and returns its path."""
    import transformers

    name, more = FAMILIES[family]
    suffix = "TextConfig" if family == "gemma3" else "Config"
    config = getattr(transformers, name + suffix)(**SIZES | more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms: all ones would hide a norm too many or too few
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return str(folder)


class StoreReader:
    """Reads, after every step, all rows that the store holds of the running requests, through their block tables."""

    def __init__(self, llm: LLM) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        self.steps = 0
        self._runner = runner(llm)
        self._sample = self._runner.sample_tokens
        self._runner.sample_tokens = self._read

    def _read(self, *args: Any) -> Any:
        store, batch = self._runner.drafter.store, self._runner.input_batch
        table = batch.block_table[store.kv_cache_group_id].get_device_tensor(batch.num_reqs)
        self.steps += 1
        for i, req_id in enumerate(batch.req_ids):
            length = int(self._runner.seq_lens[i])
            blocks = table[i, : -(-length // store.block_size)].long()
            self.rows[req_id.split("-")[0]] = store.rows[blocks].flatten(0, 1)[:length].clone()
        return self._sample(*args)


@functools.cache
def dense(model: str) -> Callable[[list[int]], torch.Tensor]:
    """Token ids to `[num_tokens, num_layers + 1, hidden_size]`, the residual stream by vLLM's ids.

    By this project's own reference for Step-3.5, which transformers doesn't have, and by transformers for the others.
    """
    config = json.loads(Path(model, "config.json").read_text())
    return _by_reference(model) if config["model_type"].startswith("step3p5") else _by_transformers(model)


def _by_reference(model: str) -> Callable[[list[int]], torch.Tensor]:
    weights = DenseModel(Path(model))

    def run(token_ids: list[int]) -> torch.Tensor:
        reference = Reference(weights)
        reference.update(token_ids, len(token_ids) - 1)
        return reference.residual_stream()

    return run


def _by_transformers(model: str) -> Callable[[list[int]], torch.Tensor]:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    after_last: list[torch.Tensor] = []
    layers = reference.model.layers if hasattr(reference, 'model') else reference.transformer.h
    layers[-1].register_forward_hook(lambda m, a, out: after_last.append(out[0] if isinstance(out, tuple) else out))

    @torch.no_grad()
    def run(token_ids: list[int]) -> torch.Tensor:
        after_last.clear()
        states = reference(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([*states[:-1], after_last[0]]).transpose(0, 1)

    return run


def prompts(count: int, shared: int = 0) -> list[list[int]]:
    """Random token ids; every prompt begins with the same `shared` tokens."""
    generator = torch.Generator().manual_seed(count)
    start = torch.randint(1, 128, (shared,), generator=generator).tolist()
    lengths = torch.randint(3, 150, (count,), generator=generator).tolist()
    return [start + torch.randint(1, 128, (n,), generator=generator).tolist() for n in lengths]


def parity(llm: LLM) -> dict[str, Any]:
    """Compares every row of every layer of many requests with the dense reference."""
    config = llm.llm_engine.vllm_config
    reader = StoreReader(llm)
    drafter = runner(llm).drafter
    worst, checked, short = torch.zeros(len(drafter.plan.layer_ids)), 0, 0
    for batch in (prompts(1), prompts(16), prompts(8, shared=96), prompts(8, shared=96)):
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for output in generate(llm, batch, params):
            # The last token was sampled and not run.
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
            expected = dense(config.model_config.model)(tokens)[:, list(drafter.plan.layer_ids)]
            rows = reader.rows[output.request_id]
            short += len(rows) < len(tokens)
            rows = rows[: len(tokens)]
            checked += rows.shape[0]
            error = (rows.float() - expected).abs().amax((0, 2)) / expected.abs().amax((0, 2))
            worst = torch.maximum(worst, error)
    return {
        "worst": worst.tolist(),
        "rows": checked,
        "short": short,
        "steps": reader.steps,
        "metrics": metrics(llm),
        "blocks": config.cache_config.num_gpu_blocks,
        "async": config.scheduler_config.async_scheduling,
        "groups": [type(g.kv_cache_spec).__name__ for g in runner(llm).kv_cache_config.kv_cache_groups],
    }
