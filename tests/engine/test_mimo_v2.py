"""MiMo-V2 with all modules of its checkpoint, in the layouts that checkpoints have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fp8_blocks, scenarios
from tests.support.checkpoints import Weights, copy_checkpoint, without
from tests.support.children import MIMO_V2, ChildFailedError
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import Run, run


def fused(weights: Weights) -> Weights:
    """The same with one projection for queries, keys and values."""
    for prefix in {name.partition(".q_proj")[0] for name in weights if ".q_proj." in name}:
        parts = [weights.pop(f"{prefix}.{part}_proj.weight") for part in "qkv"]
        weights[f"{prefix}.qkv_proj.weight"] = torch.cat(parts)
    return weights


def drafted(model: str, engine: dict[str, Any] | None = None, **more: Any) -> Run:
    return run(scenarios.few, mtp(3) | {"model": model} | (engine or {}), **more)


def accepted(found: Run) -> list[int]:
    """Accepted drafts, by position."""
    return list(found.value["metrics"]["spec_decode_num_accepted_tokens_per_pos"])


def test_every_module_drafts_in_a_group_of_its_own_and_the_tokens_are_those_without() -> None:
    found = drafted(MIMO_V2)
    assert found.value["proposer"] == "proposers.v1.MultiGroupProposer"
    assert len(found.value["groups"]) == 3
    assert found.value["tokens"] == run(scenarios.few, {"model": MIMO_V2}).value["tokens"]
    assert all(count > 0 for count in accepted(found))


def test_a_fused_projection_drafts_the_same_on_two_ranks(tmp_path: Path) -> None:
    separate = drafted(MIMO_V2)
    model = copy_checkpoint(MIMO_V2, tmp_path, fused)
    found = drafted(model, {"tensor_parallel_size": 2}, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert found.value["tokens"] == separate.value["tokens"]
    assert accepted(found) == accepted(separate)


@pytest.mark.parametrize("layout", [fp8_blocks.in_blocks, fp8_blocks.for_ranks], ids=["separate", "fused"])
def test_modules_with_block_scales_draft_as_what_they_stand_for(
    layout: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    wide = drafted(fp8_blocks.checkpoint(fp8_blocks.as_they_stand, tmp_path / "wide"), {"dtype": "bfloat16"})
    engine = {"model": fp8_blocks.checkpoint(layout, tmp_path / "blocks"), "dtype": "bfloat16"}
    found = run(scenarios.few_in_fp8_blocks, mtp(3) | engine)
    # Not the same to the bit: products are another kernel's, and what is fused for other ranks is quantised once more.
    assert all(count > 0 for count in accepted(found))
    assert sum(accepted(found)) > 0.9 * sum(accepted(wide)) > 50


def test_an_output_projection_that_would_be_copied_without_its_scales_is_refused(tmp_path: Path) -> None:
    def change(weights: Weights) -> Weights:
        name = "model.mtp.layers.1.self_attn.o_proj.weight"
        weights[name], weights[f"{name}_scale_inv"] = fp8_blocks.quantised(weights[name])
        return weights

    with pytest.raises(ChildFailedError, match=r"mtp\.layers\.1\.self_attn\.o_proj\.weight is quantised"):
        drafted(copy_checkpoint(MIMO_V2, tmp_path, change))


def test_fewer_modules_draft_where_the_config_says_so(tmp_path: Path) -> None:
    found = drafted(without(MIMO_V2, tmp_path, num_nextn_predict_layers=1))
    assert len(found.value["groups"]) == 1
    assert found.value["tokens"] == drafted(MIMO_V2).value["tokens"]
