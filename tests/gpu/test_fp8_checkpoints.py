"""Checkpoints in 8 bits with block scales, by vLLM's own kernels: on one rank and, where there are two GPUs, on two."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fp8_blocks, scenarios
from tests.support.engine_arguments import ENGINE_ON_CUDA, mtp
from tests.support.forked_engine import run


def accepted(model: str, ranks: int) -> list[int]:
    """Accepted drafts, by position."""
    engine: dict[str, Any] = ENGINE_ON_CUDA | mtp(3, attention_backend="TRITON_ATTN")
    engine |= {"model": model, "dtype": "bfloat16", "tensor_parallel_size": ranks}
    # One rank is looked at in its own process; those of two are vLLM's.
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if ranks > 1 else {}
    return list(run(scenarios.few, engine, env=env).value["metrics"]["spec_decode_num_accepted_tokens_per_pos"])


@pytest.mark.parametrize("ranks", [1, 2][: torch.cuda.device_count()])
def test_modules_with_block_scales_draft_as_what_they_stand_for(ranks: int, tmp_path: Path) -> None:
    wide = accepted(fp8_blocks.checkpoint(fp8_blocks.as_they_stand, tmp_path / "wide"), 1)
    for layout in (fp8_blocks.in_blocks, fp8_blocks.for_ranks):
        found = accepted(fp8_blocks.checkpoint(layout, tmp_path / layout.__name__), ranks)
        # Activations are rounded to 8 bits, too, by these kernels.
        assert all(count > 0 for count in found)
        assert sum(found) > 0.85 * sum(wide) > 40
