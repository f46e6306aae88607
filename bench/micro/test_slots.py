"""Slot mappings of all groups at once, against plain PyTorch group by group and a naive loop over requests.

The naive loop is what Step3p5MTPProposer's document describes, with the fault of one block size for all groups left
out: all compute the same slots, which the assertions check. On CUDA a figure is that of `CALLS` calls, waited for once:
issued one by one, and captured in one CUDA graph, which is how decode passes run them.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from mtp.groups import KVGroup
from mtp.slots import write_slot_mappings

MAX_MODEL_LEN = 4096
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
CALLS = 100 if CUDA else 1


def make_groups(num_groups: int, batch: int) -> list[KVGroup]:
    groups = []
    for gid in range(num_groups):
        block_size = 16 << (gid % 3)
        group = KVGroup(gid, block_size, torch.zeros(batch, dtype=torch.int64, device=DEVICE))
        table = torch.randint(1, 10_000, (batch, MAX_MODEL_LEN // block_size), dtype=torch.int32)
        group.block_table = table.to(DEVICE)
        groups.append(group)
    return groups


def naive(groups: list[KVGroup], positions: list[int]) -> None:
    for group in groups:
        assert group.block_table is not None
        for request, position in enumerate(positions):
            block = int(group.block_table[request, position // group.block_size])
            group.slot_mapping[request] = block * group.block_size + position % group.block_size


def write_by_ops(*arguments: Any) -> None:
    """Group by group, as where there are no kernels."""
    with mock.patch("mtp.kernels.slots.has_kernels", return_value=False):
        write_slot_mappings(*arguments)


def repeated(call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()
        if CUDA:
            torch.cuda.synchronize()

    return run


def captured(call: Callable[[], None]) -> Callable[[], None]:
    call()  # kernels are compiled, and the table of pointers made, outside of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


@pytest.mark.parametrize("batch", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
@pytest.mark.parametrize("variant", ["at once", "by group"] if CUDA else ["at once", "by group", "naive"])
@pytest.mark.parametrize("how", [repeated, captured] if CUDA else [repeated])
def test_slot_mappings(benchmark, how, variant: str, num_groups: int, batch: int) -> None:
    torch.manual_seed(0)
    groups = make_groups(num_groups, batch)
    positions = torch.randint(0, MAX_MODEL_LEN, (batch,), device=DEVICE)
    req_indices = torch.arange(batch, device=DEVICE)
    arguments = (groups, batch, req_indices, positions, MAX_MODEL_LEN, batch)
    listed = positions.tolist()
    naive(groups, listed)
    expected = [group.slot_mapping.clone() for group in groups]
    for group in groups:
        group.slot_mapping.fill_(-7)
    variants = {
        "at once": lambda: write_slot_mappings(*arguments),
        "by group": lambda: write_by_ops(*arguments),
        "naive": lambda: naive(groups, listed),
    }
    run = how(variants[variant])
    run()
    assert all(torch.equal(a, b.slot_mapping) for a, b in zip(expected, groups, strict=True))
    benchmark.extra_info["calls"] = CALLS
    benchmark(run)
