"""Records collected while captured graphs verify drafts: the rows of plain extraction, and every step's drafts."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import live_scenarios
from tests.support.engine_arguments import ENGINE_ON_CUDA, mtp
from tests.support.forked_engine import run
from tests.support.live_scenarios import connector
from tests.support.record_scenarios import records_engine

# Kernels of other batch sizes round otherwise.
TOLERANCE = 1e-3
DRAFTING = mtp(3, attention_backend="TRITON_ATTN") | {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
    "num_gpu_blocks_override": 60,
    "max_num_batched_tokens": 64,
}
RUNNERS = ("v1", "v2")


@pytest.fixture(scope="module", params=[1] if torch.cuda.device_count() < 2 else [1, 2], ids=lambda n: f"TP{n}")
def collected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was collected on either runner, whose engines start at the same time, and how far from plain extraction."""
    roots = {runner: tmp_path_factory.mktemp(runner) for runner in RUNNERS}

    def collect(runner: str) -> dict[str, Any]:
        engine = ENGINE_ON_CUDA | DRAFTING | {"tensor_parallel_size": request.param}
        engine |= {"kv_transfer_config": connector(roots[runner], record_drafts=True)}
        arguments = {"root": str(roots[runner]), "count": 40, "max_tokens": 60}
        return run(live_scenarios.live, engine, v2=runner == "v2", **arguments).value

    with ThreadPoolExecutor(len(RUNNERS)) as pool:
        found = dict(zip(RUNNERS, pool.map(collect, RUNNERS), strict=True))
    plain: Path = tmp_path_factory.mktemp("plain")
    folders = [str(root) for root in roots.values()]
    worst = run(live_scenarios.plain, ENGINE_ON_CUDA | records_engine(plain), root=str(plain), collected=folders).value
    for runner, folder in zip(RUNNERS, folders, strict=True):
        found[runner]["worst"] = worst["worst"][folder]
    return found


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_that_graphs_have_written_are_those_of_plain_extraction(
    collected: dict[str, dict[str, Any]], runner: str
) -> None:
    found = collected[runner]
    assert found["records"] == found["finished"]
    assert found["wrong"] == []
    assert found["worst"] < TOLERANCE
    total: Counter[str] = sum((Counter(facts) for facts in found["drafts"].values()), Counter())
    assert total["accepted"] > 0
    assert [total[kind] for kind in ("other steps", "wrong", "others than scheduled")] == [0] * 3
