"""Records collected while captured graphs verify drafts: the rows of plain extraction, and every step's drafts."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support import live_scenarios
from tests.support.engine_arguments import ENGINE_ON_CUDA, mtp
from tests.support.forked_engine import run
from tests.support.live_scenarios import connector
from tests.support.record_scenarios import records_engine

# Kernels of other batch sizes round otherwise.
TOLERANCE = 1e-3
GRAPHS = {**ENGINE_ON_CUDA, "enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_rows_that_graphs_have_written_are_those_of_plain_extraction(runner: str, tmp_path: Path) -> None:
    live, plain = tmp_path / "live", tmp_path / "plain"
    drafting = mtp(3, attention_backend="TRITON_ATTN") | {"kv_transfer_config": connector(live, record_drafts=True)}
    small = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 64}
    found = run(
        live_scenarios.live, GRAPHS | drafting | small, v2=runner == "v2", root=str(live), count=40, max_tokens=60
    ).value
    engine = ENGINE_ON_CUDA | records_engine(plain)
    worst = run(live_scenarios.plain, engine, root=str(plain), collected=[str(live)]).value["worst"]
    assert found["records"] == found["finished"]
    assert found["wrong"] == []
    assert max(worst.values()) < TOLERANCE
    total: Counter[str] = sum((Counter(facts) for facts in found["drafts"].values()), Counter())
    assert total["accepted"] > 0
    assert [total[kind] for kind in ("other steps", "wrong", "others than scheduled")] == [0] * 3
