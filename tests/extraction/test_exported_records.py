"""Exports of a real engine's records, read as their consumers read them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from proposers.hidden_states import RecordDataset
from proposers.hidden_states.__main__ import main
from proposers.hidden_states.final_norm import FinalNorm
from tests.support import record_scenarios
from tests.support.children import TINY
from tests.support.forked_engine import run
from tests.support.record_scenarios import records_engine

LAYERS = [4, 2, 6]


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some requests of the tiny model, with their outputs."""
    root = tmp_path_factory.mktemp("records")
    run(record_scenarios.two_ranks, records_engine(root, LAYERS), root=str(root))
    return root


@pytest.fixture(params=["speculators", "modelopt", "specforge"])
def exported(request: pytest.FixtureRequest, extracted: Path, tmp_path: Path, monkeypatch: Any) -> tuple[str, Path]:
    arguments = ["export", "--to", request.param, "--records", str(extracted), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["records", *arguments, "--model", TINY])
    assert main() == 0
    return request.param, tmp_path / "out"


def samples(consumer: str, out: Path) -> list[dict[str, torch.Tensor]]:
    """The files in order, each as tensors without a batch dimension: ids, aux `[T, (L-1)H]`, last `[T, H]`, mask."""
    if consumer == "speculators":
        files = [load_file(out / f"hs_{i}.safetensors") for i in range(2)]
        return [
            {"ids": f["token_ids"], "aux": f["hidden_states"][:, :-1].flatten(1), "last": f["hidden_states"][:, -1]}
            for f in files
        ]
    if consumer == "modelopt":
        files = [torch.load(path, weights_only=True) for path in sorted(out.glob("*.pt"))]
        assert [f["conversation_id"] for f in files] == [path.stem for path in sorted(out.glob("*.pt"))]
        names = {"ids": "input_ids", "aux": "aux_hidden_states", "last": "hidden_states", "mask": "loss_mask"}
        return [{key: f[name] for key, name in names.items()} for f in files]
    files = [torch.load(out / "rows_0-5000" / f"data_{i}.ckpt", weights_only=True) for i in range(2)]
    names = {"aux": "aux_hidden_state", "last": "hidden_state"}
    unbatched = [{key: f[name].squeeze(0) for key, name in names.items()} for f in files]
    assert all(f["hidden_state"].shape[0] == f["aux_hidden_state"].shape[0] == 1 for f in files)
    return [u | {"ids": f["input_ids"], "mask": f["loss_mask"]} for u, f in zip(unbatched, files, strict=True)]


def test_every_consumer_gets_equal_ids_matching_lengths_and_finite_values(
    exported: tuple[str, Path], extracted: Path
) -> None:
    dataset = RecordDataset(extracted)
    read = samples(*exported)
    assert len(read) == len(dataset) == 2
    for i, sample in enumerate(read):
        record = dataset[i]
        rows = record.info.rows
        assert torch.equal(sample["ids"], record.token_ids)
        assert sample["aux"].shape == (rows, 2 * 192)
        assert sample["last"].shape == (rows, 192)
        assert torch.equal(sample["aux"], record.hidden_states[:, :2].flatten(1))
        assert sample["last"].isfinite().all()
        if "mask" in sample:
            prompt = record.info.num_prompt_tokens
            assert sample["mask"].tolist() == [0] * prompt + [1] * (rows - prompt)


def test_the_last_hidden_state_is_the_one_that_the_consumers_head_wants(exported: tuple[str, Path]) -> None:
    consumer, out = exported
    norm = FinalNorm(TINY)
    head = load_file(f"{TINY}/model.safetensors")["lm_head.weight"].float()
    for sample in samples(consumer, out):
        # speculators applies the final norm itself; the other consumers apply the head to what they read.
        last = norm(sample["last"]) if consumer == "speculators" else sample["last"]
        predicted = (last @ head.T).argmax(-1)
        output = slice(-8, -1)  # greedy output: what a row predicts is the token after it
        assert torch.equal(predicted[output], sample["ids"][-7:])


def test_the_export_states_its_convention(exported: tuple[str, Path]) -> None:
    consumer, out = exported
    facts = json.loads((out / "export.json").read_text())
    assert facts["consumer"] == consumer
    assert facts["records"] == 2
    assert facts["aux_layer_ids"] == ([3, 1] if consumer == "specforge" else [4, 2])
    assert ("layer j + 1" in facts["convention"]) == (consumer == "specforge")
