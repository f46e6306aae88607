"""The draft's KV cache groups, from real specs, real attention layers and vLLM's own kernels."""

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, UniformTypeKVCacheSpecs
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID
from vllm.v1.worker.utils import AttentionGroup

from mtp.attention import can_capture_prompts, leave_sequences_whole, with_lengths_on_host
from mtp.groups import KVGroups, bind_kv_groups, layers_by_module, make_attn_groups
from mtp.slots import write_slot_mappings
from tests.support.rig import CPU, HEAD, WINDOW, add_layer, full, kv_cache, layer_name, make_config, sliding

TARGET_LAYER = "model.layers.0.self_attn.attn"


@pytest.fixture
def config() -> VllmConfig:
    return make_config()


def build(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layers: dict,
    num_modules: int | None = None,
    kernel_block_sizes: list[int] | None = None,
) -> KVGroups:
    modules = num_modules or len(layers)
    attn_groups = make_attn_groups(config, kv_cache_config, kernel_block_sizes, layers, CPU)
    return bind_kv_groups(kv_cache_config, attn_groups, 64, CPU, modules=layers_by_module(layers, modules))


def draft_layers(config: VllmConfig, *specs: FullAttentionSpec | SlidingWindowSpec) -> dict:
    """One layer per module."""
    return {layer_name(i): add_layer(config, layer_name(i), spec) for i, spec in enumerate(specs)}


def test_every_group_has_its_own_block_size_buffer_and_layers(config: VllmConfig) -> None:
    layers = draft_layers(config, full(64), sliding(32), sliding(96))
    cache = kv_cache(
        ([TARGET_LAYER, layer_name(1)], sliding(32)), ([layer_name(2)], sliding(96)), ([layer_name(0)], full(64))
    )
    groups = build(config, cache, layers)
    assert [(g.kv_cache_group_id, g.block_size) for g in groups.all] == [(0, 32), (1, 96), (2, 64)]
    assert [[a.layer_names for a in g.attn_groups] for g in groups.all] == [
        [[layer_name(1)]],
        [[layer_name(2)]],
        [[layer_name(0)]],
    ]
    assert groups.primary.kv_cache_group_id == 0
    assert len({g.slot_mapping.data_ptr() for g in groups.all}) == 3
    assert all(set(g.slot_mapping.tolist()) == {PADDING_SLOT_ID} for g in groups.all), "no slot is real before a step"


def test_modules_know_their_groups(config: VllmConfig) -> None:
    layers = draft_layers(config, full(64), sliding(32), sliding(32))
    cache = kv_cache(([layer_name(1), layer_name(2)], sliding(32)), ([layer_name(0)], full(64)))
    groups = build(config, cache, layers)
    assert [[g.kv_cache_group_id for g in groups.groups_of([m])] for m in range(3)] == [[1], [0], [0]]
    assert groups.all[0].attn_groups[0].layer_names == [layer_name(1), layer_name(2)]


def test_slot_mappings_by_layer_are_views_of_their_groups_buffers(config: VllmConfig) -> None:
    layers = draft_layers(config, full(64), sliding(32))
    groups = build(config, kv_cache(([layer_name(1)], sliding(32)), ([layer_name(0)], full(64))), layers)
    for value, group in enumerate(groups.all):
        group.slot_mapping.fill_(value)
    by_layer = groups.slot_mapping_by_layer(5)
    assert {name: slots.tolist() for name, slots in by_layer.items()} == {
        layer_name(1): [0] * 5,
        layer_name(0): [1] * 5,
    }


def test_groups_without_draft_layers_are_not_kept(config: VllmConfig) -> None:
    layers = draft_layers(config, full(32))
    groups = build(config, kv_cache(([TARGET_LAYER], full(32)), ([layer_name(0)], full(32))), layers)
    groups.bind(0, torch.zeros(2, 4))
    groups.bind(1, torch.ones(2, 4))
    assert [g.kv_cache_group_id for g in groups.all] == [1]
    assert groups.primary.table(2).tolist() == [[1.0] * 4] * 2


def test_a_table_is_cut_to_the_requests_of_the_step(config: VllmConfig) -> None:
    groups = build(config, kv_cache(([layer_name(0)], full(32))), draft_layers(config, full(32)))
    table = torch.arange(12).view(4, 3)
    groups.bind(0, table)
    assert groups.primary.table(2).data_ptr() == table.data_ptr()
    assert groups.primary.table(2).shape == (2, 3)


def test_layers_of_a_uniform_group_keep_their_own_specs(config: VllmConfig) -> None:
    wide = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.float32)
    layers = draft_layers(config, full(32), wide)
    specs = {TARGET_LAYER: full(32), layer_name(0): full(32), layer_name(1): wide}
    cache = kv_cache((list(specs), UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)))
    groups = build(config, cache, layers)
    assert len(groups.all) == 1
    found = [(a.layer_names, a.kv_cache_spec) for a in groups.all[0].attn_groups]
    assert found == [([layer_name(0)], full(32)), ([layer_name(1)], wide)]
    # One slot buffer: the layers differ in what a slot holds and not in where it is.
    assert groups.groups_of([0]) == groups.groups_of([1]) == groups.groups_of([0, 1])
    assert [g.get_metadata_builder().num_kv_heads for g in groups.all[0].attn_groups] == [2, 4]


def test_layers_with_windows_and_without_in_one_uniform_group_are_kept_apart(config: VllmConfig) -> None:
    windowed = FullAttentionSpec(block_size=32, sliding_window=WINDOW, **HEAD)
    layers = draft_layers(config, full(32), windowed)
    specs = {layer_name(0): full(32), layer_name(1): windowed}
    cache = kv_cache((list(specs), UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)))
    groups = build(config, cache, layers)
    assert [a.get_metadata_builder().window_size for a in groups.all[0].attn_groups] == [-1, WINDOW]


def test_a_layer_that_shares_a_cache_has_the_spec_of_the_one_it_shares_with(config: VllmConfig) -> None:
    add_layer(config, TARGET_LAYER, full(32))
    sharing = add_layer(config, layer_name(0), full(32), kv_sharing_target_layer_name=TARGET_LAYER)
    specs = {TARGET_LAYER: full(32)}
    # As the host does it: the sharing layer joins the group's names, and has no spec of its own.
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
    groups = build(config, kv_cache(([TARGET_LAYER, layer_name(0)], uniform)), {layer_name(0): sharing})
    assert [a.kv_cache_spec for a in groups.all[0].attn_groups] == [full(32)]


def test_kernel_blocks_address_the_memory_that_the_slots_name(config: VllmConfig) -> None:
    # The manager counts blocks of 96 tokens, the kernels blocks of 32.
    layers = draft_layers(config, full(96))
    groups = build(config, kv_cache(([layer_name(0)], full(96))), layers, kernel_block_sizes=[32])
    group, attn = groups.attn_groups_of([0])[0]
    assert (group.block_size, attn.kernel_block_size) == (96, 32)
    group.block_table = torch.tensor([[7, 2, 5], [1, 9, 4]], dtype=torch.int32)
    positions = torch.tensor([0, 31, 32, 95, 96, 200, 287])
    requests = torch.tensor([0, 1, 0, 1, 0, 1, 0])
    write_slot_mappings([group], 2, requests, positions, 512, len(positions))
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    lengths = torch.tensor([288, 201], dtype=torch.int32)
    metadata = attn.build_metadata_for_drafting(
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=2,
            num_actual_tokens=2,
            max_query_len=1,
            max_seq_len=288,
            block_table_tensor=group.table(2),
            slot_mapping=group.slot_mapping[:2],
        ),
        1,
    )
    by_kernel = [
        int(metadata.block_table[r, p // 32]) * 32 + p % 32
        for r, p in zip(requests.tolist(), positions.tolist(), strict=True)
    ]
    assert group.slot_mapping[: len(positions)].tolist() == by_kernel


def test_the_order_of_groups_does_not_depend_on_the_order_of_layers(config: VllmConfig) -> None:
    layers = draft_layers(config, full(32), sliding(32), sliding(64))
    cache = kv_cache(([layer_name(2)], sliding(64)), ([layer_name(0)], full(32)), ([layer_name(1)], sliding(32)))
    orders = [list(layers), list(reversed(layers)), [layer_name(1), layer_name(2), layer_name(0)]]
    found = []
    for order in orders:
        groups = build(config, cache, {name: layers[name] for name in order})
        found.append([(g.kv_cache_group_id, [a.layer_names for a in g.attn_groups]) for g in groups.all])
    assert found == [found[0]] * 3
    assert [gid for gid, _ in found[0]] == [0, 1, 2]


def test_a_module_may_have_several_attention_layers_in_several_groups(config: VllmConfig) -> None:
    # An indexer's cache beside the attention's, as in sparse attention: one module, two groups.
    names = ["model.layers.6.attn", "model.layers.6.indexer.attn", "model.layers.7.attn", "model.layers.7.indexer.attn"]
    specs = [full(32), sliding(64), full(32), sliding(64)]
    layers = {name: add_layer(config, name, spec) for name, spec in zip(names, specs, strict=True)}
    cache = kv_cache((names[::2], full(32)), (names[1::2], sliding(64)))
    groups = build(config, cache, layers, num_modules=2)
    assert [[g.kv_cache_group_id for g in groups.groups_of([m])] for m in range(2)] == [[0, 1], [0, 1]]


def test_a_layer_without_a_group_is_named_in_the_error(config: VllmConfig) -> None:
    layers = draft_layers(config, full(32), full(32))
    cache = kv_cache(([TARGET_LAYER, layer_name(0)], full(32)))
    with pytest.raises(ValueError, match="are in no KV cache group") as failure:
        build(config, cache, layers)
    assert layer_name(1) in str(failure.value).split("are in no")[0]
    assert layer_name(0) not in str(failure.value).split("are in no")[0]


def test_no_groups_at_all_is_said_so(config: VllmConfig) -> None:
    with pytest.raises(ValueError, match="there are no groups"):
        build(config, kv_cache(), draft_layers(config, full(32)))


def test_as_many_layer_indices_as_modules_are_wanted() -> None:
    with pytest.raises(ValueError, match=r"The draft has 3 modules, and .* decoder layers \[6, 7\]"):
        layers_by_module([layer_name(0), layer_name(1)], 3)


def test_modules_are_numbered_by_layer_index_and_not_by_name() -> None:
    # By name, layer 10 would come before layer 9.
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.9.b.attn"]
    assert layers_by_module(names, 2) == [["model.layers.9.attn", "model.layers.9.b.attn"], ["model.layers.10.attn"]]


def test_one_module_takes_all_layers_whatever_their_indices() -> None:
    names = ["model.layers.1.attn", "model.layers.0.attn"]
    assert layers_by_module(names, 1) == [sorted(names)]


@pytest.mark.parametrize(
    ("num_reqs", "windows", "max_num_splits", "planned", "whole"),
    [
        (8, [512, 100], 32, False, True),
        (7, [512], 32, False, False),  # too few to fill a device
        (64, [513], 32, False, False),
        (64, [512, None], 32, False, False),  # some sequence may be very long
        (64, [512], 0, False, False),  # the kernel's choice
        (64, [512], 32, True, False),  # planned for splits
    ],
)
def test_sequences_stay_whole_where_splits_would_cost_more_than_they_save(
    num_reqs: int, windows: list[int | None], max_num_splits: int, planned: bool, whole: bool
) -> None:
    # Where all layers are in one KV cache group its spec has a window whether all of them have or not.
    head = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    spec = FullAttentionSpec(**head, sliding_window=100)
    nothing = torch.empty(0)
    metadata = FlashAttentionMetadata(
        num_actual_tokens=4 * num_reqs,
        max_query_len=4,
        query_start_loc=nothing,
        max_seq_len=1000,
        seq_lens=nothing,
        block_table=nothing,
        slot_mapping=nothing,
        scheduler_metadata=nothing if planned else None,
        max_num_splits=max_num_splits,
    )
    leave_sequences_whole(metadata, windows, spec, num_reqs)
    assert metadata.max_num_splits == (1 if whole else max_num_splits)


def test_metadata_of_other_backends_stay_as_they_are() -> None:
    metadata = object()  # which has no attributes to set
    leave_sequences_whole(metadata, [WINDOW], sliding(32), 64)


class TakesAnyLength(TritonMLAMetadataBuilder):
    """As FlashAttention's does, which can't be imported without a GPU."""

    query_len_support = QueryLenSupport.VARLEN


def latent_group(builder_class: type, threshold: int) -> AttentionGroup:
    """Its builder takes windows of up to so many rows as decoding. (To be made properly it needs a GPU.)"""
    builder = object.__new__(builder_class)
    builder.reorder_batch_threshold = threshold
    return AttentionGroup(TritonMLABackend, ["layer"], full(64), 0, metadata_builders=[builder])


def step(query_lens: list[int]) -> CommonAttentionMetadata:
    """Of sequences that the host believes to be two tokens longer than they are."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    seq_lens = torch.full((len(query_lens),), 50, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens + 2,
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=52,
        block_table_tensor=torch.zeros(len(query_lens), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("builder_class", "threshold", "query_lens", "exact"),
    [
        (TritonMLAMetadataBuilder, 4, [4, 4], False),
        (TritonMLAMetadataBuilder, 4, [4, 3], True),  # the second one for a prompt
        (TritonMLAMetadataBuilder, 4, [9, 9], True),
        (TakesAnyLength, 512, [4, 3, 300], False),
        (TakesAnyLength, 512, [4, 513, 3], True),  # what comes after a prompt is one, too
    ],
)
def test_latent_attention_gets_exact_lengths_where_it_takes_a_window_for_a_prompt(
    builder_class: type, threshold: int, query_lens: list[int], exact: bool
) -> None:
    cad = step(query_lens)
    found = with_lengths_on_host(latent_group(builder_class, threshold), cad).seq_lens_cpu_upper_bound
    assert torch.equal(found, cad.seq_lens if exact else cad.seq_lens_cpu_upper_bound)


def test_other_backends_lengths_stay_on_the_device_and_their_prompts_can_be_captured(config: VllmConfig) -> None:
    groups = build(config, kv_cache(([layer_name(0)], full(64))), draft_layers(config, full(64)))
    cad = step([4, 513, 3])
    assert with_lengths_on_host(groups.primary.attn_groups[0], cad) is cad
    assert can_capture_prompts(groups)
    groups.primary.attn_groups.append(latent_group(TakesAnyLength, 512))
    assert not can_capture_prompts(groups)
