"""Engine arguments for the device at hand."""

from pathlib import Path
from typing import Any


def for_device(model: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an engine of a tiny model, and on CUDA what it needs there.

    That is an attention backend which takes float32 and heads of 32 (of latent attention none takes float32), kernels
    of Triton for a delta net, whose heads of 64 are none of FlashInfer's, and a cache of so many bytes: they are given
    and not measured, so that other processes may use the GPU meanwhile.
    """
    import torch

    if not torch.cuda.is_available():
        return arguments
    from bench.reference.dense import read_config

    config = read_config(model)
    narrow = config.get("v_head_dim", config.get("head_dim")) != config.get("head_dim")
    latent = "kv_lora_rank" in config
    backend = "FLASH_ATTN_MLA" if latent else "TRITON_ATTN_DIFFKV" if narrow else "TRITON_ATTN"
    speculative = arguments.get("speculative_config")
    return {
        "attention_config": {"backend": backend},
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 30,
        **({"gdn_prefill_backend": "triton"} if "linear_key_head_dim" in config else {}),
        **arguments,
        "speculative_config": speculative and {"attention_backend": backend, **speculative},
    }
