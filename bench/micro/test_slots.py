"""Slot mappings of all groups against the seed's arithmetic, one group after the other in a naive loop over requests.

The naive loop is what Step3p5MTPProposer's document describes, with the fault of one block size for all groups left
out: both sides compute the same slots, which the first assertion checks.
"""

import pytest
import torch

from mtp.groups import DraftGroup
from mtp.slots import write_slot_mappings

MAX_MODEL_LEN = 4096


def make_groups(num_groups: int, batch: int) -> list[DraftGroup]:
    groups = []
    for gid in range(num_groups):
        block_size = 16 << (gid % 3)
        group = DraftGroup(gid, block_size, torch.zeros(batch, dtype=torch.int64))
        group.block_table = torch.randint(1, 10_000, (batch, MAX_MODEL_LEN // block_size), dtype=torch.int32)
        groups.append(group)
    return groups


def naive(groups: list[DraftGroup], positions: list[int]) -> None:
    for group in groups:
        assert group.block_table is not None
        for request, position in enumerate(positions):
            block = int(group.block_table[request, position // group.block_size])
            group.slot_mapping[request] = block * group.block_size + position % group.block_size


@pytest.mark.parametrize("batch", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
@pytest.mark.parametrize("variant", ["groups", "naive"])
def test_slot_mappings(benchmark, variant: str, num_groups: int, batch: int) -> None:
    torch.manual_seed(0)
    groups = make_groups(num_groups, batch)
    positions = torch.randint(0, MAX_MODEL_LEN, (batch,))
    req_indices = torch.arange(batch)
    ours = lambda: write_slot_mappings(groups, batch, req_indices, positions, MAX_MODEL_LEN, batch)  # noqa: E731
    ours()
    expected = [group.slot_mapping.clone() for group in groups]
    naive(groups, positions.tolist())
    assert all(torch.equal(a, b.slot_mapping) for a, b in zip(expected, groups, strict=True))
    benchmark(ours if variant == "groups" else lambda: naive(groups, positions.tolist()))
