"""Arguments of the engines that tests start."""

from typing import Any

from tests.support.children import TINY

# Small blocks put many block boundaries into short prompts; 32 is the CPU backend's unit. The number of blocks is
# fixed because memory sizes it otherwise, and clearing a GiB takes longer than a test.
ENGINE: dict[str, Any] = {
    "model": TINY,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 320,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 400,
    "disable_log_stats": False,
}

# The tiny model's heads are none of FlashAttention's sizes.
ENGINE_ON_CUDA: dict[str, Any] = {
    "attention_config": {"backend": "TRITON_ATTN"},
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
}


def mtp(num_speculative_tokens: int, **more: Any) -> dict[str, Any]:
    """Engine arguments for drafting with the checkpoint's own modules."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_speculative_tokens, **more}}


def offloading(**more: Any) -> dict[str, Any]:
    """Engine arguments for vLLM's offloading connector, which keeps blocks of prompts in host memory."""
    extra = {"cpu_bytes_to_use": 1 << 25, **more}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": config}


def extract(layer_ids: list[int] | None, **more: Any) -> dict[str, Any]:
    """Engine arguments for extracting these layers' hidden states; None: the config names none."""
    hf_config = {} if layer_ids is None else {"eagle_aux_hidden_state_layer_ids": layer_ids}
    config = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": hf_config},
    }
    return {"speculative_config": config | more}
