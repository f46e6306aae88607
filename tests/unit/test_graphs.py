"""What a captured pass leaves as it was. (Replays: `tests/gpu/test_graphs.py`, and by the oracle.)"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from mtp.graphs import PassGraphs
from mtp.groups import KVGroup

CPU = torch.device("cpu")


def make_group(gid: int) -> KVGroup:
    table = torch.full((4, 3), gid, dtype=torch.int32)
    return KVGroup(gid, 16, torch.zeros(32, dtype=torch.int64), ("layer",), block_table=table)


def make_graphs(groups: list[KVGroup], run: Callable[..., torch.Tensor]) -> PassGraphs:
    return PassGraphs(VllmConfig(), run, groups, 4, 4, 64, 4, 8, torch.float32, CPU)


def test_a_pass_reads_the_graphs_tables_and_the_hosts_are_put_back() -> None:
    groups = [make_group(1), make_group(2)]
    hosts = [group.block_table for group in groups]
    seen: list[Any] = []

    def run(inputs: Any, cad: Any) -> torch.Tensor:
        seen.extend(group.block_table for group in groups)
        return torch.zeros(2, 3)

    make_graphs(groups, run).run_static(2)
    assert [table.shape for table in seen] == [(2, 3), (2, 3)]
    assert all(table is not host for table, host in zip(seen, hosts, strict=True))
    assert all(group.block_table is host for group, host in zip(groups, hosts, strict=True))


def test_a_pass_that_fails_leaves_the_hosts_tables_too() -> None:
    groups = [make_group(1), make_group(2)]
    hosts = [group.block_table for group in groups]

    def run(inputs: Any, cad: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        make_graphs(groups, run).run_static(2)
    assert all(group.block_table is host for group, host in zip(groups, hosts, strict=True))
