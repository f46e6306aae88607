"""Exports of records: what consumers cannot use, failures that leave nothing, and the final norm of every model."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import save_file

from proposers.hidden_states import Record, RecordInfo
from proposers.hidden_states.__main__ import main
from proposers.hidden_states.export import export
from proposers.hidden_states.final_norm import FinalNorm
from proposers.hidden_states.masks import Masks
from tests.support.children import TINY
from tests.support.tiny_models import FAMILIES, SIZES, write_model


def record(layer_ids: tuple[int, ...] = (1, 4), value: float = 1.0, tokens: int = 3) -> Record:
    info = RecordInfo(layer_ids, 4, "float32", "m", 3, 0, 3, "stop", "r")
    return Record(torch.full((3, len(layer_ids), 8), value), torch.arange(tokens), info)


@pytest.mark.parametrize(
    ("consumer", "made", "message"),
    [
        ("speculators", [], "There are no records to export"),
        ("speculators", [record((1, 2))], "speculators needs 4: extract it too"),
        ("speculators", [record(), record((2, 4))], "has the layers (2, 4) and the first one (1, 4)"),
        ("speculators", [record(value=float("nan"))], "not finite"),
        ("speculators", [record(tokens=4)], "has 4 tokens and 3 rows"),
        ("specforge", [record((0, 4))], "which specforge has no id for"),
        ("modelopt", [record((0, 4))], "which modelopt has no id for"),
        ("modelopt", [record()], "name the model's checkpoint"),
        ("others", [record()], "There is no exporter to 'others', only to speculators"),
    ],
)
def test_what_a_consumer_cannot_use_is_refused(consumer: str, made: list[Record], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is checked below)
        export(made, consumer, tmp_path, None if message.startswith("name the model") else TINY)
    assert message in str(caught.value)


def test_an_export_is_not_mixed_with_another(tmp_path: Path) -> None:
    assert export([record()], "speculators", tmp_path) == 1
    with pytest.raises(FileExistsError, match="exists and is no empty folder"):
        export([record()], "speculators", tmp_path)


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="export them apart"):
        export([record(), record(), record((2, 4))], "speculators", tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []
    assert export([record()], "speculators", tmp_path / "deep" / "out") == 1
    names = {path.name for path in (tmp_path / "deep").rglob("*")}
    assert names > {"out", "export.json", "records.jsonl", "dataset_info.json", "hidden_states", "hs_0.safetensors"}


@pytest.mark.parametrize(
    ("records", "out", "model", "message"),
    [
        ("missing", "out", TINY, "missing is no folder"),
        ("file", "out", TINY, "file is no folder"),
        ("records", "out", "missing", "missing is no local folder with a checkpoint's config.json"),
        ("records", "file", TINY, "file exists and is no empty folder"),
        ("records", "records/out", TINY, "records/out is under"),
        ("junk", "out", TINY, "junk/0.safetensors is no whole safetensors file"),
        ("foreign", "out", TINY, "foreign/0.safetensors is no record. The schema is None"),
        ("shard", "out", TINY, "shard/0.shard.safetensors is no shard of records"),
    ],
)
def test_what_the_command_cannot_do_is_said_in_a_line(
    records: str, out: str, model: str, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    for name in ("records", "junk", "foreign", "shard"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "junk" / "0.safetensors").write_bytes(b"junk")
    for name in ("foreign/0.safetensors", "shard/0.shard.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
    arguments = ["--records", str(tmp_path / records), "--out", str(tmp_path / out), "--model", str(tmp_path / model)]
    monkeypatch.setattr("sys.argv", ["records", "export", "--to", "modelopt", *arguments])
    assert main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def of_llama(rows: int, first: int = 0, prompt: int = 3, request_id: str = "r") -> Record:
    info = RecordInfo((1, 3), 3, "float32", "m", rows, first, prompt, "stop", request_id)
    return Record(torch.ones(rows, 2, 64), torch.arange(rows), info)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


def masks_of(consumer: str, out: Path) -> list[list[int] | None]:
    """Of each record, in order."""
    if consumer == "speculators":
        return [mask.tolist() for mask in datasets.load_from_disk(out)["loss_mask"]]
    paths = sorted([*out.rglob("*.pt"), *out.rglob("*.ckpt")])
    masks = [torch.load(p, weights_only=True).get("loss_mask") for p in paths if p.name != "token_freq.pt"]
    return [None if mask is None else mask.tolist() for mask in masks]


CONSUMERS = ["speculators", "modelopt", "specforge"]


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_what_nothing_says_the_mask_of_is_warned_of(consumer: str, llama: str, tmp_path: Path, caplog: Any) -> None:
    export([of_llama(3), of_llama(5)], consumer, tmp_path / "out", llama)
    assert "1 of 2 records are of prompts alone" in caplog.text
    of_prompt = None if consumer == "modelopt" else [1, 1, 1]
    assert masks_of(consumer, tmp_path / "out") == [of_prompt, [0, 0, 0, 1, 1]]
    assert json.loads((tmp_path / "out" / "export.json").read_text())["without_mask"] == 1


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_masks_come_from_a_file_by_name_or_by_request(consumer: str, llama: str, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "masks.jsonl").write_text(
        '{"name": "a/1", "loss_mask": [1, 0, 1]}\n\n{"request_id": "r2", "loss_mask": [0, 1, 1, 0, 1, 1]}\n'
    )
    named = [("a/1", of_llama(3)), ("a/2", of_llama(4, first=2, request_id="r2")), ("a/3", of_llama(4))]
    export(named, consumer, tmp_path / "out", llama, Masks.read(tmp_path / "masks.jsonl"))
    assert masks_of(consumer, tmp_path / "out") == [[1, 0, 1], [1, 0, 1, 1], [0, 0, 0, 1]]
    assert "prompts alone" not in caplog.text
    assert "1 of 3 records are windows that begin past position 0" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mask", "line 1, is no JSON"),
        ("[]", "line 1, has no name"),
        ('{"name": "r", "loss_mask": [0, 2]}', "line 1, has no name, or no loss_mask of zeros and ones"),
        ('{"name": "r", "loss_mask": [0]}', "mask of r has 1 tokens, and its record ends at 3"),
    ],
)
def test_masks_that_mean_nothing_are_refused(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "masks.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        export([of_llama(3)], "speculators", tmp_path / "out", masks=Masks.read(tmp_path / "masks.jsonl"))


def test_an_export_keeps_names_and_request_ids(tmp_path: Path) -> None:
    export(
        [("b/2", of_llama(3, request_id="x")), ("a/1", of_llama(3, request_id="y"))], "speculators", tmp_path / "out"
    )
    lines = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    files = ["hidden_states/hs_0.safetensors", "hidden_states/hs_1.safetensors"]
    assert [(line["file"], line["name"], line["request_id"]) for line in lines] == [
        (files[0], "b/2", "x"),
        (files[1], "a/1", "y"),
    ]
    rows = datasets.load_from_disk(tmp_path / "out")
    assert (list(rows["name"]), list(rows["request_id"])) == (["b/2", "a/1"], ["x", "y"])


def test_the_ids_of_modelopt_and_specforge_are_those_of_outputs_of_layers(llama: str, tmp_path: Path) -> None:
    for consumer in CONSUMERS:
        export([of_llama(5)], consumer, tmp_path / consumer, llama)
    facts = {consumer: json.loads((tmp_path / consumer / "export.json").read_text()) for consumer in CONSUMERS}
    assert {consumer: f["aux_layer_ids"] for consumer, f in facts.items()} == {
        "speculators": [1],
        "modelopt": [0],
        "specforge": [0],
    }
    assert facts["modelopt"]["consumer"] == "modelopt 0.45 to 0.47"


@pytest.mark.parametrize("family", [*FAMILIES, "mimo"])
def test_the_final_norm_is_the_one_of_transformers(family: str, tmp_path: Path) -> None:
    """Among them a layer norm, and an RMS norm by another name."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(write_model(family, tmp_path), dtype=torch.float32)
    hidden = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = (model.model.embedding_norm if family == "lfm2" else model.model.norm)(hidden)
    found = FinalNorm(tmp_path)(hidden.requires_grad_())  # a draft head is trained through it
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert hidden.grad is not None


def write_norms(folder: Path, model_type: str, *names: str, **more: Any) -> Path:
    """A checkpoint with nothing but norms, each of other weights."""
    (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": model_type, **more}))
    save_file({name: torch.full((64,), 2.0 + i) for i, name in enumerate(names)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("family", "factor", "more"),
    [
        ("gemma3_text", 3.0, {}),
        ("gemma3n_text", 2.0, {"num_kv_shared_layers": 0}),
        ("gemma4_text", 2.0, {}),
        ("minimax_m3_vl_text", 3.0, {"num_experts_per_tok": 1, "num_local_experts": 2}),
        ("qwen2", 2.0, {}),
        ("step3p5", 3.0, {"rms_norm_eps": 1e-5}),
        ("vaultgemma", 3.0, {}),
    ],
)
def test_what_the_norm_does_with_its_weight_is_the_familys_own(
    family: str, factor: float, more: dict[str, Any], tmp_path: Path
) -> None:
    hidden = torch.ones(1, 64)
    found = FinalNorm(write_norms(tmp_path, family, "model.norm.weight", **more))(hidden)
    torch.testing.assert_close(found, factor * hidden, rtol=1e-4, atol=0)


@pytest.mark.parametrize("family", ["gemma17", "qwen4_exp_text"])  # the latter mixes streams before its norm
def test_a_family_whose_norm_is_not_known_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not known, so the hidden states after it"):
        FinalNorm(write_norms(tmp_path, family, "model.norm.weight"))


def test_a_checkpoint_without_a_known_norm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint has 0 norms of a name"):
        FinalNorm(write_norms(tmp_path, "qwen2", "a.vision.norm.weight"))


@pytest.mark.parametrize(
    "other",
    ["model.mtp_layers.0.final_layernorm.weight", "mtp.norm.weight", "a.vision.norm.weight", "visual.norm.weight"],
)
def test_the_norms_of_drafts_and_of_other_parts_are_not_taken_for_the_final_one(other: str, tmp_path: Path) -> None:
    norm = FinalNorm(write_norms(tmp_path, "qwen2", "model.norm.weight", other))
    hidden = torch.ones(1, 64)
    torch.testing.assert_close(norm(hidden), 2 * hidden, rtol=1e-4, atol=0)


def test_two_norms_that_might_be_the_final_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint has 2 norms of a name"):
        FinalNorm(write_norms(tmp_path, "qwen2", "model.norm.weight", "model.language_model.norm.weight"))
