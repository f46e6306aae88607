"""The kernels against their PyTorch versions, on poisoned outputs and fresh random inputs."""

import dataclasses

import pytest
import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp.graphs import StaticInputs, fill_one_by_one
from mtp.groups import DraftGroup
from mtp.layers import fuse_gemma_norms
from mtp.rows import PassInputs, StepRows
from mtp.slots import write_group_by_group, write_slot_mappings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 7_777_777
MAX_NUM_TOKENS = 1500


def make_group(gid: int, num_reqs: int) -> DraftGroup:
    """Entries past a table's end are another's, and so large that following one leaves memory."""
    block_size = (16, 32, 48, 2**30)[gid % 4]
    width, more = (int(x) for x in torch.randint(1, 40, (2,)))
    table = torch.full((num_reqs, width + more), 2**31 - 1, dtype=torch.int32)
    table[:, :width] = torch.randint(0, 2**30, (num_reqs, width))
    buffer = torch.full((MAX_NUM_TOKENS,), POISON, dtype=torch.int64, device=DEVICE)
    return DraftGroup(gid, block_size, buffer, block_table=table.to(DEVICE)[:, :width])


@pytest.mark.parametrize("seed", range(40))
def test_slots_of_all_groups_are_those_of_the_reference(seed: int) -> None:
    torch.manual_seed(seed)
    num_groups, num_reqs = (int(x) for x in torch.randint(1, 9, (2,)))
    num_tokens, max_model_len = (int(x) for x in torch.randint(1, 1000, (2,)))
    padded = num_tokens + int(torch.randint(0, 300, ()))
    groups = [make_group(gid, num_reqs) for gid in range(num_groups)]
    req_indices = torch.randint(0, num_reqs, (num_tokens,), device=DEVICE)
    positions = torch.randint(-5, 1500, (num_tokens,), device=DEVICE)
    arguments = (groups, num_reqs, req_indices, positions, max_model_len, padded)
    write_group_by_group(*arguments)
    expected = [group.slot_mapping.clone() for group in groups]
    for group in groups:
        group.slot_mapping.fill_(POISON)
    write_slot_mappings(*arguments)
    for group, slots in zip(groups, expected, strict=True):
        assert torch.equal(group.slot_mapping, slots)
        assert (slots[num_tokens:padded] == PADDING_SLOT_ID).all()
        assert (slots[padded:] == POISON).all()


@pytest.mark.parametrize(
    ("num_reqs", "size", "with_history"),
    [(1, 1, True), (3, 8, True), (70, 72, True), (128, 128, False), (5, 300, False)],
)
def test_the_inputs_of_a_recorded_pass_are_those_of_the_reference(num_reqs: int, size: int, with_history: bool) -> None:
    torch.manual_seed(num_reqs)
    starts = torch.cat([torch.zeros(1), torch.randint(1, 5, (num_reqs,)).cumsum(0)]).int().to(DEVICE)
    num_rows = int(starts[-1])
    numbers = lambda count, dtype: torch.randint(0, 10**6, (count,), dtype=dtype, device=DEVICE)  # noqa: E731
    rows = StepRows(
        numbers(num_rows + 3, torch.int32),
        numbers(num_rows + 3, torch.int64),
        torch.randn(num_rows + 3, 8, device=DEVICE),
        numbers(num_reqs, torch.int64),
        starts,
    )
    slots = numbers(num_reqs, torch.int32) if with_history else None
    inputs = PassInputs(rows, numbers(num_reqs, torch.int64), slots)
    seq_lens = numbers(num_reqs, torch.int32)
    ours, reference = (StaticInputs.make(300, 4, 300, 8, torch.float32, DEVICE) for _ in range(2))
    for static in (ours, reference):
        for x in tensors_of(static):
            x.fill_(POISON)
        static.history_slots.fill_(300)
        static.rows.query_start_loc[0] = 0
    ours.fill(inputs, num_rows, seq_lens, size)
    fill_one_by_one(reference, inputs, num_rows, seq_lens, size)
    reference.rows.hidden_states[:num_rows] = rows.hidden_states[:num_rows]
    for x, wanted in zip(tensors_of(ours), tensors_of(reference), strict=True):
        assert torch.equal(x, wanted)


def tensors_of(static: StaticInputs) -> list[torch.Tensor]:
    rows = [getattr(static.rows, field.name) for field in dataclasses.fields(static.rows)]
    return [*rows, static.next_token_ids, static.history_slots, static.seq_lens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 128, 192, 4096])
def test_norms_are_the_hosts(vllm_config, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    norm = GemmaRMSNorm(size, 1e-5).to(DEVICE)
    norm.weight.data.normal_()
    wide = torch.randn(7, 3 * 2 * size + 5, device=DEVICE).to(dtype)
    inputs = [wide[:, 5 : 5 + size], wide[:, 5:].view(7, 6, size)[:, 2:4]]
    expected = [norm.forward_native(x) for x in inputs]
    assert fuse_gemma_norms(torch.nn.Sequential(norm)) == 1
    for x, host in zip(inputs, expected, strict=True):
        ours = norm(x)
        assert ours.shape == host.shape
        assert ours.dtype == dtype
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + norm.weight.double())
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=rounding)
        torch.testing.assert_close(ours, host, rtol=rounding, atol=rounding)
