"""The kernels against their PyTorch versions, on poisoned outputs and fresh random inputs."""

import pytest
import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp.groups import DraftGroup
from mtp.norms import fuse_gemma_norms
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
