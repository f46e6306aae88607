"""MiMo-V2 with all modules of its checkpoint, in the layouts that checkpoints have."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import scenarios
from tests.support.children import MIMO_V2
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import Run, run


def fused(folder: Path) -> str:
    """The same checkpoint with one projection for queries, keys and values."""
    for path in Path(MIMO_V2).glob("*.json"):
        shutil.copy(path, folder)
    tensors = load_file(Path(MIMO_V2, "model.safetensors"))
    for prefix in {name.partition(".q_proj")[0] for name in tensors if ".q_proj." in name}:
        parts = [tensors.pop(f"{prefix}.{part}_proj.weight") for part in "qkv"]
        tensors[f"{prefix}.qkv_proj.weight"] = torch.cat(parts)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


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
    found = drafted(fused(tmp_path), {"tensor_parallel_size": 2}, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert found.value["tokens"] == separate.value["tokens"]
    assert accepted(found) == accepted(separate)


def test_fewer_modules_draft_where_the_config_says_so(tmp_path: Path) -> None:
    for path in Path(MIMO_V2).iterdir():
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = drafted(str(tmp_path))
    assert len(found.value["groups"]) == 1
    assert found.value["tokens"] == drafted(MIMO_V2).value["tokens"]
