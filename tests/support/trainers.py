"""Exports as the trainers' own readers load them, in a process of its own.

    python -m tests.support.trainers CONSUMER EXPORT RESULT

Their packages are in `.venv/readers`, without what they ask for besides (`tools/setup.sh`): their pins of PyTorch and
transformers are others' than ours, and their readers need little of it.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.children import ROOT, child_environment

READERS = ROOT / ".venv" / "readers"


def read_by_its_trainer(consumer: str, out: Path) -> list[dict[str, torch.Tensor]]:
    """What the trainer's dataset gives for each record, in its order, by the trainer's names."""
    result = out.parent / "read.pt"
    arguments = [sys.executable, "-m", "tests.support.trainers", consumer, str(out), str(result)]
    environment = child_environment(PYTHONPATH=f"{READERS}:{ROOT}")
    done = subprocess.run(arguments, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(result, weights_only=True)


def speculators(out: Path) -> list[dict[str, torch.Tensor]]:
    """As `speculators train --data-path` does."""
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(max_len=512, datapath=out, on_missing="raise", hidden_states_dtype=torch.float32)
    assert dataset.approx_lengths == [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
    return [dataset[i] for i in range(len(dataset))]


def speculators_fp8(out: Path) -> list[dict[str, torch.Tensor]]:
    """As `--hidden-states-backend fp8` does."""
    from hs_connectors import FP8Transfer

    transfer = FP8Transfer(out, dequantize_dtype=torch.float32)
    return [transfer.get_cached(i) for i in range(len(list(out.glob("hs_*.safetensors"))))]


def modelopt(out: Path) -> list[dict[str, torch.Tensor]]:
    """As `data.mode: offline` with `answer_only_loss` does."""
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    dataset = OfflineSupervisedDataset(sorted(str(path) for path in out.rglob("*.pt")), answer_only_loss=True)
    items = [dataset[i] for i in range(len(dataset))]
    batch = EagleOfflineDataCollator(train_len=512)(items)
    assert batch["base_model_outputs"]["base_hidden_prenorm"] is False
    return [{key: value for key, value in item.items() if isinstance(value, torch.Tensor)} for item in items]


def specforge(out: Path) -> list[dict[str, torch.Tensor]]:
    """As `specforge train` with `data.hidden_states_path` does."""
    from specforge.algorithms.eagle3.data import build_offline_normalizer, build_offline_reader
    from specforge.runtime.data_plane.feature_store import load_feature_file

    reader = build_offline_reader(str(out), run_id="test", ttt_length=7, max_len=512)
    reader.validate_files = True
    normalize: Any = build_offline_normalizer(512)
    paths = [ref.feature_store_uri.removeprefix("file://") for ref in reader.read()]
    return [normalize(load_feature_file(path)) for path in paths]


if __name__ == "__main__":
    _, consumer, out, result = sys.argv
    readers = {"speculators": speculators, "speculators-fp8": speculators_fp8, "modelopt": modelopt}
    torch.save((readers | {"specforge": specforge})[consumer](Path(out)), result)
