"""Slot mappings against a scalar loop."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp.groups import KVGroup
from mtp.slots import slots_of, write_slot_mappings

POISON = -12345


@dataclass
class Case:
    groups: list[KVGroup]
    num_reqs: int
    req_indices: list[int]
    positions: list[int]
    max_model_len: int
    num_padded_tokens: int


def expected_slots(group: KVGroup, case: Case) -> list[int]:
    """The rule itself, one row at a time, in Python's unbounded integers."""
    slots = []
    for request, position in zip(case.req_indices, case.positions, strict=True):
        block = position // group.block_size
        if 0 <= position < case.max_model_len and block < group.block_table.shape[1]:
            slots.append(int(group.block_table[request, block]) * group.block_size + position % group.block_size)
        else:
            slots.append(PADDING_SLOT_ID)
    return slots + [PADDING_SLOT_ID] * (case.num_padded_tokens - len(slots))


@st.composite
def groups_of(draw: st.DrawFn, num_reqs: int, buffer_size: int) -> KVGroup:
    block_size = draw(st.one_of(st.sampled_from([1, 2, 16, 32, 128, 1024]), st.integers(1, 200)))
    width = draw(st.integers(1, 12))
    spare_rows, gap = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    # Blocks far enough out that a slot does not fit into 32 bits.
    blocks = st.integers(0, 2**31 - 1)
    rows = draw(st.lists(st.lists(blocks, min_size=width, max_size=width), min_size=num_reqs, max_size=num_reqs))
    # A table of the host is a view into a larger one: wider rows, and more of them.
    backing = torch.full((num_reqs + spare_rows, width * gap), POISON, dtype=torch.int32)
    table = backing[:, ::gap][:, :width]
    table[:num_reqs] = torch.tensor(rows, dtype=torch.int32)
    return KVGroup(0, block_size, torch.full((buffer_size,), POISON), block_table=table)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_reqs = draw(st.integers(1, 6))
    num_tokens = draw(st.integers(0, 24))
    num_padded_tokens = num_tokens + draw(st.integers(0, 8))
    buffer_size = num_padded_tokens + draw(st.integers(0, 4))
    max_model_len = draw(st.integers(1, 3000))
    near = st.one_of(st.integers(-3, 3), st.integers(max_model_len - 3, max_model_len + 3))
    positions = st.lists(st.one_of(near, st.integers(-5, 5000)), min_size=num_tokens, max_size=num_tokens)
    requests = st.lists(st.integers(0, num_reqs - 1), min_size=num_tokens, max_size=num_tokens)
    groups = draw(st.lists(groups_of(num_reqs, buffer_size), min_size=0, max_size=4))
    return Case(groups, num_reqs, draw(requests), draw(positions), max_model_len, num_padded_tokens)


@given(cases())
@settings(deadline=None, max_examples=300)
def test_slots_of_all_groups_equal_a_scalar_loop(case: Case) -> None:
    positions = torch.tensor(case.positions, dtype=torch.int64)
    before = positions.clone()
    write_slot_mappings(
        case.groups,
        case.num_reqs,
        torch.tensor(case.req_indices, dtype=torch.int64),
        positions,
        case.max_model_len,
        case.num_padded_tokens,
    )
    for group in case.groups:
        assert group.slot_mapping[: case.num_padded_tokens].tolist() == expected_slots(group, case)
        # What lies past the padded rows belongs to whoever ran a larger pass.
        assert set(group.slot_mapping[case.num_padded_tokens :].tolist()) <= {POISON}
    assert torch.equal(positions, before), "the caller's positions must not change"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_slot_past_32_bits_is_not_cut_off(dtype: torch.dtype) -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    group = KVGroup(0, 1024, torch.full((1,), POISON), block_table=table)
    write_slot_mappings([group], 1, torch.tensor([0], dtype=dtype), torch.tensor([1023], dtype=dtype), 4096, 1)
    assert group.slot_mapping.tolist() == [(2**31 - 1) * 1024 + 1023]


def test_position_33_lies_in_the_second_block_of_32_and_the_third_of_16() -> None:
    table = torch.tensor([[3, 21, 5]], dtype=torch.int32)
    groups = [KVGroup(gid, size, torch.full((1,), POISON), block_table=table) for gid, size in enumerate((16, 32))]
    write_slot_mappings(groups, 1, torch.tensor([0]), torch.tensor([33]), 64, 1)
    assert [group.slot_mapping.tolist() for group in groups] == [[81], [673]]


@pytest.mark.parametrize("table", [None, torch.zeros(1, 4, dtype=torch.int32)], ids=["none", "too few rows"])
def test_a_table_of_too_few_requests_is_refused(table: torch.Tensor | None) -> None:
    group = KVGroup(5, 16, torch.zeros(4, dtype=torch.int64), block_table=table)
    with pytest.raises(RuntimeError, match=r"KV cache group 5 has .*set_per_group_attn_metadata must be called"):
        write_slot_mappings([group], 2, torch.tensor([0, 1]), torch.tensor([1, 2]), 64, 2)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 48), (15, 2), (16, 16), (33, 14), (47, 1)])
def test_a_reader_finds_rows_where_a_pass_would_write_them(first: int, count: int) -> None:
    block_ids = [3, 21, 5]
    group = KVGroup(0, 16, torch.full((count,), POISON), block_table=torch.tensor([block_ids], dtype=torch.int32))
    positions = torch.arange(first, first + count)
    write_slot_mappings([group], 1, torch.zeros(count, dtype=torch.int64), positions, 48, count)
    assert slots_of(block_ids, first, count, 16).tolist() == group.slot_mapping.tolist()


def test_a_reader_of_rows_past_a_requests_blocks_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"\[40, 49\) reach into block 3 of a request that has 3 blocks of 16 tokens"):
        slots_of([3, 21, 5], 40, 9, 16)
