"""Room for hidden states: how many blocks remain, and which group they are anchored to."""

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from mtp.groups import bind_kv_groups, choose_anchor
from mtp.store import CacheOnlyAttention
from proposers.hidden_states.plan import ExtractionPlan
from proposers.plugin import register
from tests.support import layouts
from tests.support.layouts import (
    AVAILABLE,
    GDN,
    SHAPES,
    compare,
    config_of,
    full,
    lay_out,
    mla,
    sliding,
    without_the_plugin,
)

MIXED = [name for name in SHAPES if "+" in name]
STEP = SHAPES["full + sliding, Step-3.5"]
DENSE = SHAPES["dense, Llama-3.1-8B"]


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


# The number of blocks: vLLM has the rows in a KV cache group of their own, and bills all groups at the widest page.


@pytest.mark.parametrize("name", SHAPES)
def test_the_cache_and_its_rows_fill_the_memory(name: str) -> None:
    found = compare(SHAPES[name])
    assert 0.98 <= found.ours.num_blocks / found.bound <= 1


@pytest.mark.parametrize("name", SHAPES)
def test_as_many_requests_fit_as_with_a_group_of_its_own_and_more_where_caches_are_mixed(name: str) -> None:
    found = compare(SHAPES[name])
    assert found.ours.requests >= (2 if name in MIXED else 1) * found.upstream.requests


def bytes_of(layout: KVCacheConfig, row_bytes: int) -> int:
    """What a worker allocates: the pool of the cache, and a row for every slot of the anchor."""
    block_size = layout.kv_cache_groups[choose_anchor(layout.kv_cache_groups)].kv_cache_spec.block_size
    return layout.kv_cache_tensors[0].size + layout.num_blocks * block_size * row_bytes


@pytest.mark.parametrize("name", SHAPES)
def test_no_more_is_allocated_than_there_is(name: str) -> None:
    config = config_of(SHAPES[name])
    row_bytes = ExtractionPlan.of(config).stored_bytes
    assert bytes_of(lay_out(config, SHAPES[name].specs)[0], row_bytes) <= AVAILABLE
    with without_the_plugin():
        assert bytes_of(lay_out(config_of(SHAPES[name]), SHAPES[name].specs)[0], row_bytes) > AVAILABLE


def test_a_rank_pays_for_its_slice_and_where_there_are_none_for_whole_rows() -> None:
    shape = SHAPES["full + sliding, Step-3.5 at TP 8"]
    config = config_of(shape)
    plan = ExtractionPlan.of(config)
    assert (plan.num_slices, plan.slice_size, 8 * plan.stored_bytes) == (8, 512, plan.row_bytes)
    blocks = lay_out(config, shape.specs)[0].num_blocks
    config.model_config.model_arch_config.hidden_size += 4
    assert ExtractionPlan.of(config).num_slices == 1
    assert lay_out(config, shape.specs)[0].num_blocks < blocks / 3


def test_workers_with_different_memory_agree_on_the_smaller_number() -> None:
    config = config_of(STEP)
    small, large = (lay_out(config, STEP.specs, available)[0] for available in (AVAILABLE // 2, AVAILABLE))
    both = layouts.get_kv_cache_configs(config, [dict(STEP.specs)] * 2, [AVAILABLE, AVAILABLE // 2])
    assert [layout.num_blocks for layout in both] == [small.num_blocks] * 2
    assert small.num_blocks < large.num_blocks


def test_a_number_of_blocks_that_the_user_fixed_is_kept() -> None:
    config = config_of(STEP, num_gpu_blocks_override=3000)
    assert lay_out(config, STEP.specs)[0].num_blocks == 3000


def test_memory_that_would_do_for_the_cache_and_not_for_its_rows_is_refused() -> None:
    enough = 8192 * 2 * 8 * 128 * 2 * 32 + (1 << 22)  # one request of 8192 tokens, and the null block
    with without_the_plugin():
        assert lay_out(config_of(DENSE), DENSE.specs, enough)[0].num_blocks > 8192 // 16
    with pytest.raises(ValueError, match="is larger than the available KV cache memory"):
        lay_out(config_of(DENSE), DENSE.specs, enough)


# The anchor.


def grouped(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{i}.attn"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=7, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("specs", "anchor"),
    [
        ([full(8)], 0),
        ([mla()], 0),
        ([sliding(8, 64), full(8), full(4)], 1),
        ([GDN, GDN, full(2, 256, 544)], 2),
        # Every block of the pool has a block's rows, so small blocks waste less on the other groups.
        ([full(8, block_size=32), full(8, block_size=16)], 1),
        ([sliding(8, 64), UniformTypeKVCacheSpecs.from_specs({"layers.1.attn": full(8), "x": full(4)})], 1),
    ],
    ids=["dense", "mla", "sliding first", "recurrent first", "smaller blocks", "specs of one type"],
)
def test_the_anchor_is_a_group_that_keeps_every_token(specs: list[KVCacheSpec], anchor: int) -> None:
    config = grouped(*specs)
    assert choose_anchor(config.kv_cache_groups) == anchor
    assert choose_anchor(generate_scheduler_kv_cache_config([config]).kv_cache_groups) == anchor


@pytest.mark.parametrize("specs", [[sliding(8, 64), GDN], []], ids=["sliding and recurrent", "no cache"])
def test_without_a_full_attention_group_the_error_names_the_groups(specs: list[KVCacheSpec]) -> None:
    message = "group 0: SlidingWindowSpec of layers.0.attn; group 1: MambaSpec of layers.1.attn"
    with pytest.raises(ValueError, match=message if specs else "there are no KV cache groups"):
        choose_anchor(grouped(*specs).kv_cache_groups)


def test_a_model_without_a_full_attention_group_is_refused_before_anything_is_allocated() -> None:
    specs = {name: sliding(8, 512) for name in STEP.specs}
    with pytest.raises(ValueError, match="this model has none"):
        lay_out(config_of(STEP), specs)


# The layer.


def allocate(layer: CacheOnlyAttention, config: KVCacheConfig) -> torch.Tensor:
    """As the extractor does it."""
    anchor, device = choose_anchor(config.kv_cache_groups), torch.device("cpu")
    groups = bind_kv_groups(config, {anchor: []}, 16, device)
    return layer.allocate(groups.primary, config, device)


def test_the_layer_is_in_no_group_and_its_rows_are_the_anchors_slots() -> None:
    config = config_of(DENSE)
    layer = CacheOnlyAttention(config, "rows", 3, 8, torch.float32)
    assert config.compilation_config.static_forward_context["rows"] is layer
    assert layer.get_kv_cache_spec(config) is None
    rows = allocate(layer, grouped(sliding(8, 64), full(8)))
    assert layer.anchor is not None
    assert layer.anchor.kv_cache_group_id == 1
    assert rows.shape == (7, 16, 3, 8)
    assert layer.kv_cache is rows


def test_rows_go_to_their_slots_and_padding_to_the_null_block() -> None:
    layer = CacheOnlyAttention(config_of(DENSE), "rows", 2, 4, torch.float32)
    cache = allocate(layer, grouped(full(8)))
    cache.fill_(-1)
    rows = torch.arange(5 * 8, dtype=torch.float32).view(5, 2, 4)
    layer.impl.do_kv_cache_update(layer, rows, cache, torch.tensor([33, 16, 111, -1, -1]))
    assert torch.equal(cache[2, 1], rows[0])
    assert torch.equal(cache[1, 0], rows[1])
    assert torch.equal(cache[6, 15], rows[2])
    cache[[2, 1, 6], [1, 0, 15]] = -1
    assert (cache[1:] == -1).all()


def test_two_layers_of_one_name_are_refused() -> None:
    config = config_of(DENSE)
    CacheOnlyAttention(config, "rows", 3, 8, torch.float32)
    with pytest.raises(ValueError, match="There is a layer rows already"):
        CacheOnlyAttention(config, "rows", 3, 8, torch.float32)
