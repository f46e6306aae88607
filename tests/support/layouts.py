"""KV cache layouts of known model shapes, and how many blocks hidden states leave them, ours and vLLM's own way.

`python -m tests.support.layouts` prints the table.
"""

import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from proposers import plugin
from proposers.hidden_states.plan import ExtractionPlan
from proposers.host import patching as compat
from tests.support.engine_arguments import extract

BF16 = torch.bfloat16
AVAILABLE = 20 << 30


def get_kv_cache_configs(
    config: VllmConfig, specs: list[dict[str, KVCacheSpec]], available: list[int]
) -> list[KVCacheConfig]:
    """vLLM's own, which releases have in different places: the layout of each worker."""
    try:
        planning: Any = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:  # before 0.33
        planning = importlib.import_module("vllm.v1.core.kv_cache_utils")
        return planning.get_kv_cache_configs(config, specs, available)
    return planning.get_kv_cache_configs(config, specs, available, planning.get_global_kv_cache_groups(config, specs))


@dataclass(frozen=True)
class Shape:
    """A model as one of its tensor-parallel ranks sees it: the spec of each layer in order, the width of its stream."""

    hidden_size: int
    layers: tuple[KVCacheSpec, ...]
    layer_ids: tuple[int, ...]
    ranks: int = 1

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        return {f"model.layers.{i}.attn": spec for i, spec in enumerate(self.layers)}


def full(kv_heads: int, head_size: int = 128, block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=kv_heads, head_size=head_size, dtype=BF16)


def sliding(kv_heads: int, window: int, head_size: int = 128, block_size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=kv_heads, head_size=head_size, dtype=BF16, sliding_window=window
    )


def mla() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=BF16)


def every(period: int, count: int, rare: KVCacheSpec, common: KVCacheSpec) -> tuple[KVCacheSpec, ...]:
    """`count` layers, the first of every `period` a rare one."""
    return tuple(common if i % period else rare for i in range(count))


# Gated delta nets beside attention of 2 heads of 256: vLLM makes the attention's blocks as large as a state.
GDN_BLOCK = 544
GDN = MambaSpec(
    block_size=GDN_BLOCK,
    shapes=((3, 8192), (32, 128, 128)),
    dtypes=(BF16, BF16),
    page_size_padded=full(2, 256, GDN_BLOCK).page_size_bytes,
)

SHAPES = {
    "dense, Llama-3.1-8B": Shape(4096, (full(8),) * 32, (2, 16, 29, 32)),
    "dense, Llama-3.1-70B at TP 8": Shape(8192, (full(1),) * 80, (2, 40, 77, 80), 8),
    "full + sliding, Step-3.5": Shape(4096, every(4, 45, full(8), sliding(8, 512)), (2, 22, 42, 45)),
    "full + sliding, Step-3.5 at TP 8": Shape(4096, every(4, 45, full(1), sliding(1, 512)), (2, 22, 42, 45), 8),
    "full + sliding, Gemma-3-27B": Shape(5376, every(6, 62, full(16), sliding(16, 1024)), (2, 31, 59, 62)),
    "MLA, DeepSeek-V3 at TP 8": Shape(7168, (mla(),) * 61, (2, 30, 58, 61), 8),
    "GDN + full, Qwen3-Next": Shape(2048, every(4, 48, full(2, 256, GDN_BLOCK), GDN), (2, 24, 45, 48)),
}


def config_of(shape: Shape, **more: Any) -> VllmConfig:
    """A real config that extracts from a model of this width and depth."""
    num_layers = len(shape.layers)
    text = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": 64,
        "num_attention_heads": 32,
        "num_hidden_layers": num_layers,
        "vocab_size": 128,
        "max_position_embeddings": 8192,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(text))
        engine = {"model": folder, "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 8192}
        engine["tensor_parallel_size"] = shape.ranks
        config = EngineArgs(**engine, **extract(list(shape.layer_ids)), **more).create_engine_config()
    # Every block holds all layers, as a layout for pages of different sizes must.
    record_kv_cache_layout(config.cache_config, "BLHNC")
    return config


def lay_out(
    config: VllmConfig, specs: dict[str, KVCacheSpec], available: int = AVAILABLE, workers: int = 1
) -> list[KVCacheConfig]:
    """The layout that vLLM makes of these specs, ours or its own by what is installed."""
    return get_kv_cache_configs(config, [dict(specs) for _ in range(workers)], [available] * workers)


@contextmanager
def without_the_plugin() -> Iterator[None]:
    compat.remove_patches()
    try:
        yield
    finally:
        plugin.register()


@dataclass(frozen=True)
class Room:
    """What a layout has room for.

    Attributes:
        num_blocks: of the pool that all groups share; a group's blocks may hold few tokens.
        requests: of `max_model_len` tokens, by vLLM's own reckoning over all groups.
    """

    num_blocks: int
    requests: float


@dataclass(frozen=True)
class Comparison:
    """One shape laid out without extraction, with the rows beside the cache, and with vLLM's layer in its own group.

    Attributes:
        bound: the available memory over the bytes of a block and of its rows.
    """

    plain: Room
    ours: Room
    upstream: Room
    bound: float


def room(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> tuple[Room, KVCacheConfig]:
    layout = lay_out(config, specs)[0]
    return Room(layout.num_blocks, get_max_concurrency_for_kv_cache_config(config, layout)), layout


def compare(shape: Shape) -> Comparison:
    plugin.register()
    config = config_of(shape)
    stored_bytes = ExtractionPlan.of(config).stored_bytes
    ours, _ = room(config, shape.specs)
    with without_the_plugin():
        config = config_of(shape)
        plain, layout = room(config, shape.specs)
        hidden = HiddenStateCacheSpec(
            block_size=shape.layers[0].block_size,
            num_kv_heads=len(shape.layer_ids),
            head_size=shape.hidden_size,
            dtype=BF16,
        )
        upstream, _ = room(config, shape.specs | {"cache_only_layers.0": hidden})
    # What a block of the cache alone takes, by what was allocated for all of them.
    page_bytes = layout.kv_cache_tensors[0].size // layout.num_blocks
    full_group = next(g for g in layout.kv_cache_groups if isinstance(first_spec(g), FullAttentionSpec))
    row_bytes = full_group.kv_cache_spec.block_size * stored_bytes
    return Comparison(plain, ours, upstream, AVAILABLE / (page_bytes + row_bytes))


def first_spec(group: Any) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def main(show: Callable[[str], None] = print) -> None:
    show(
        f"vLLM {vllm.__version__}, {AVAILABLE >> 30} GiB for the cache, four layers' hidden states, bfloat16; blocks, "
        "and requests of 8192 tokens"
    )
    show("| model | no extraction | vLLM's own group | this package | of `available / (page + rows)` |")
    show("|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        found = compare(shape)
        cells = [f"{r.num_blocks}, {r.requests:.1f}" for r in (found.plain, found.upstream, found.ours)]
        show(f"| {name} | {' | '.join(cells)} | {found.ours.num_blocks / found.bound:.4f} |")


if __name__ == "__main__":
    main()
