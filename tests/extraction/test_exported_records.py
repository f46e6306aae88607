"""Exports of a real engine's records, read by their consumers' own readers."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proposers.hidden_states import RecordDataset, load
from proposers.hidden_states.__main__ import main
from proposers.hidden_states.final_norm import FinalNorm
from tests.support import record_scenarios
from tests.support.children import TINY
from tests.support.forked_engine import run
from tests.support.record_scenarios import records_engine
from tests.support.trainers import read_by_its_trainer

LAYERS = [4, 2, 6]


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some requests of the tiny model, with their outputs."""
    root = tmp_path_factory.mktemp("records")
    run(record_scenarios.two_requests, records_engine(root, LAYERS), root=str(root))
    return root


@pytest.fixture(scope="module", params=["speculators", "modelopt", "specforge"])
def exported(
    request: pytest.FixtureRequest, extracted: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp(request.param) / "out"
    arguments = ["export", "--to", request.param, "--records", str(extracted), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["records", *arguments, "--model", TINY])
        assert main() == 0
    return request.param, out


NAMES = {
    "speculators": ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask"),
    "modelopt": ("input_ids", "aux_hidden_states", "base_model_hidden_states", "loss_mask"),
    "specforge": ("input_ids", "hidden_state", "target", "loss_mask"),
}


@functools.cache
def samples(consumer: str, out: Path) -> list[dict[str, torch.Tensor]]:
    """As the trainer's own reader loads them, not batched: ids, aux `[T, (L-1)H]`, last `[T, H]`, mask."""
    read = read_by_its_trainer(consumer, out)
    unbatched = [{k: v.squeeze(0) for k, v in item.items()} if consumer == "specforge" else item for item in read]
    return [dict(zip(("ids", "aux", "last", "mask"), (u[n] for n in NAMES[consumer]), strict=True)) for u in unbatched]


def test_every_consumer_gets_equal_ids_matching_lengths_and_finite_values(
    exported: tuple[str, Path], extracted: Path
) -> None:
    consumer, out = exported
    dataset = RecordDataset(extracted)
    read = samples(consumer, out)
    assert len(read) == len(dataset) == 2
    for i, sample in enumerate(read):
        record = dataset[i]
        rows = record.info.rows
        assert torch.equal(sample["ids"], record.token_ids)
        assert sample["aux"].shape == (rows, 2 * 192)
        assert sample["last"].shape == (rows, 192)
        assert torch.equal(sample["aux"], record.hidden_states[:, :2].flatten(1))
        assert sample["last"].isfinite().all()
        # SpecForge's own reader takes the last token out: there is none after it.
        trained = rows - record.info.num_prompt_tokens
        without = consumer == "specforge"
        mask = [0] * record.info.num_prompt_tokens + [1] * (trained - without) + [0] * without
        assert sample["mask"].tolist() == mask


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
    assert facts["consumer"].split()[0] == consumer
    assert (facts["records"], facts["without_mask"], facts["windows"]) == (2, 0, 0)
    assert facts["aux_layer_ids"] == ([4, 2] if consumer == "speculators" else [3, 1])
    assert ("output of layer j" in facts["convention"]) == (consumer != "speculators")


def test_records_in_eight_bits_are_what_speculators_fp8_transfer_reads(tmp_path: Path) -> None:
    """As they are written, without an export."""
    done = run(record_scenarios.two_requests, records_engine(tmp_path, LAYERS, dtype="fp8"), root=str(tmp_path)).value
    # Three bits after the first, of values that are compared with the largest.
    assert all(facts["tokens equal"] and 1e-5 < facts["worst"] < 1 / 16 for facts in done["outputs"])
    dataset = RecordDataset(tmp_path)
    for i, (path, _) in enumerate(dataset.entries):
        path.rename(tmp_path / f"hs_{i}.safetensors")
    read = read_by_its_trainer("speculators-fp8", tmp_path)
    assert len(read) == 2
    for i, sample in enumerate(read):
        record = load(tmp_path / f"hs_{i}.safetensors")
        assert torch.equal(sample["hidden_states"], record.hidden_states)
        assert torch.equal(sample["token_ids"], record.token_ids)
