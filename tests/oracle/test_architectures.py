"""Every architecture with a tiny checkpoint, under the oracle: no row and no draft is wrong."""

import functools
import json
import os
import sys
from typing import Any

import pytest

from bench.oracle.schedules import SETUPS
from tests.support.children import ROOT, run_command
from tests.support.oracle_children import assert_clean

STUBS = ROOT / "tests" / "support" / "stubs"


@functools.cache
def oracle(name: str, runner: str, *setups: str, mode: str = "on") -> dict[str, Any]:
    """The report of a schedule for each of the setups."""
    arguments = ["--architecture", name, "--runner", runner, "--schedules", str(len(setups)), "--seed", "4"]
    chosen = [word for setup in setups for word in ("--setup", setup)]
    # vLLM's Qwen3.5 imports torchvision, for text too.
    path = os.pathsep.join(filter(None, [str(STUBS), os.environ.get("PYTHONPATH")]))
    done = run_command(
        [sys.executable, "-m", "bench", "oracle", *arguments, *chosen], PYTHONPATH=f"{ROOT}:{path}", MTP_PROPOSERS=mode
    )
    assert done.returncode == (mode != "on"), done.stdout[-2000:] + done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{\n") :])
    return report


# Those of one module where there is no other. MiMo is in the oracle's own schedules, GLM-4.5 in the page on adding an
# architecture. (All have records.)
NAMES = ("ernie4.5-moe", "exaone-moe-two-modules", "qwen3.5-two-modules")


@pytest.mark.parametrize("name", NAMES)
def test_every_row_and_every_draft_is_right(name: str) -> None:
    report = oracle(name, "v1", "chunks")
    assert_clean(report)
    assert report["rows_checked"] > 4_000
    assert report["drafts_checked"] > 100
    # The engine's target is the reference's, or its rows would say nothing.
    assert report["max_target_error"] < report["tolerance"]
    assert len(report["events"]["rejections"]) > 2, "drafts are never right, or always"
    assert report["events"]["chunk_boundaries"] > 0


def test_it_sees_the_token_that_vllms_own_proposer_gives_the_end_of_a_chunk() -> None:
    report = oracle("glm4-moe", "v1", "chunks", mode="upstream")
    assert report["mismatched_by_module"].keys() == {"0"}
    assert "which is known" in report["first_mismatch"]


def test_setups_for_any_model_have_numbers_of_drafts_that_vllm_allows() -> None:
    allowed = {2: {1, 2, 4, 6}, 3: {1, 2, 3, 6}}
    for modules, numbers in allowed.items():
        assert {setup.for_modules(modules).k for setup in SETUPS} <= numbers
