"""Records in the layouts that trainers of draft models read.

What differs between them, besides names, is the convention of layer ids, and whether the last hidden state is the one
before or after the final norm; `export.json` beside the files says which it is. `records.jsonl` says whose each is.

| consumer | as of | files | last hidden state | layer ids |
|---|---|---|---|---|
| speculators | 0.9 | an Arrow dataset, `hidden_states/hs_{i}.safetensors` | before, in `[T, L, H]` | same |
| ModelOpt | 0.45 to 0.47 | `{conversation_id}.pt` | after, `[T, H]` | of outputs: one less |
| SpecForge | 0.2 | `rows_{a}-{b}/data_{i}.ckpt` | after, `[1, T, H]` | of outputs: one less |
"""

import json
import logging
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import save_file

from proposers.hidden_states.final_norm import FinalNorm
from proposers.hidden_states.masks import Masks
from proposers.hidden_states.record import Record

logger = logging.getLogger("proposers.hidden_states")


class Sample(NamedTuple):
    """A record as consumers want it.

    Attributes:
        aux: `[T, L - 1, H]`, all layers but the last, in the record's order.
        last: `[T, H]`, after the final norm where the consumer wants that.
        mask: `[T]` int64, 1 where a token is trained on; None where nothing says.
    """

    record: Record
    aux: torch.Tensor
    last: torch.Tensor
    mask: torch.Tensor | None

    @property
    def full_mask(self) -> torch.Tensor:
        """The mask, or ones."""
        return torch.ones_like(self.record.token_ids) if self.mask is None else self.mask


class Exporter(ABC):
    """One consumer's layout.

    Attributes:
        release: of the consumer, that this is the layout of.
        normed: the consumer wants the last hidden state after the final norm.
        id_offset: what to add to a record's layer id to get the consumer's.
        convention: what the consumer means by its ids.
        without_mask: what becomes of a record that nothing says the mask of.
    """

    release: ClassVar[str]
    normed: ClassVar[bool]
    id_offset: ClassVar[int] = 0
    convention: ClassVar[str]
    without_mask: ClassVar[str] = "is trained on as a whole, what users wrote too"

    @abstractmethod
    def write(self, out: Path, index: int, sample: Sample) -> str:
        """Writes one record and returns the path of its file under `out`."""

    def finish(self, out: Path, entries: Sequence[dict[str, Any]]) -> None:  # noqa: B027 (most have nothing to write)
        """Writes what is of all records, which the entries name."""


class Speculators(Exporter):
    release = "0.9"
    normed = False
    convention = "id i is the stream entering layer i, N that leaving the last; the last hidden state is unnormed"

    def __init__(self) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                "speculators reads an Arrow dataset, and what writes one isn't installed: pip install datasets."
            ) from error
        self._datasets = datasets
        self._rows: list[tuple[Any, Any]] = []
        self._counts: Counter[int] = Counter()

    def write(self, out: Path, index: int, sample: Sample) -> str:
        path = f"hidden_states/hs_{index}.safetensors"
        (out / path).parent.mkdir(exist_ok=True)
        token_ids, mask = sample.record.token_ids, sample.full_mask
        states = torch.cat([sample.aux, sample.last[:, None]], dim=1)
        save_file({"hidden_states": states, "token_ids": token_ids}, out / path)
        self._rows.append((token_ids.numpy(), mask.numpy()))
        trained, counts = token_ids[mask.bool()].unique(return_counts=True)
        self._counts.update(dict(zip(trained.tolist(), counts.tolist(), strict=True)))
        return path

    def finish(self, out: Path, entries: Sequence[dict[str, Any]]) -> None:
        columns = {
            "input_ids": [token_ids for token_ids, _ in self._rows],
            "loss_mask": [mask for _, mask in self._rows],
            "seq_len": [len(token_ids) for token_ids, _ in self._rows],
            "name": [entry["name"] for entry in entries],
            "request_id": [entry["request_id"] for entry in entries],
        }
        dataset = self._datasets.Dataset.from_dict(columns)
        dataset.with_format("torch").save_to_disk(out)
        torch.save(dict(self._counts), out / "token_freq.pt")  # of the tokens that are trained on, for a smaller head


class ModelOpt(Exporter):
    release = "0.45 to 0.47"
    normed = True
    id_offset = -1
    convention = (
        "id j is the output of layer j (transformers' hidden_states[j + 1]), since ModelOpt 0.45; the last is normed"
    )
    without_mask = "has no mask, so that training on answers alone refuses it"

    def write(self, out: Path, index: int, sample: Sample) -> str:
        conversation_id = f"{index:08d}"
        fields = {
            "input_ids": sample.record.token_ids,
            "hidden_states": sample.last,
            "aux_hidden_states": sample.aux.flatten(1).contiguous(),
            "conversation_id": conversation_id,
        }
        if sample.mask is not None:
            fields["loss_mask"] = sample.mask
        torch.save(fields, out / f"{conversation_id}.pt")
        return f"{conversation_id}.pt"


class SpecForge(Exporter):
    release = "0.2"
    normed = True
    id_offset = -1
    convention = "id j is the output of layer j, the stream entering layer j + 1; the last hidden state is normed"
    per_folder = 5000

    def write(self, out: Path, index: int, sample: Sample) -> str:
        start = index // self.per_folder * self.per_folder
        path = f"rows_{start}-{start + self.per_folder}/data_{index}.ckpt"
        (out / path).parent.mkdir(exist_ok=True)
        fields = {
            "input_ids": sample.record.token_ids,
            "loss_mask": sample.full_mask,
            "hidden_state": sample.last[None],
            "aux_hidden_state": sample.aux.flatten(1)[None].contiguous(),
        }
        torch.save(fields, out / path)
        return path


EXPORTERS: dict[str, type[Exporter]] = {"speculators": Speculators, "modelopt": ModelOpt, "specforge": SpecForge}


def loss_mask(record: Record) -> torch.Tensor | None:
    """`[T]` int64: 1 at the output's tokens; None where a record has prompt rows alone, which may be anyone's."""
    positions = record.info.first_position + torch.arange(record.info.rows)
    mask = (positions >= record.info.num_prompt_tokens).long()
    return mask if mask.any() else None


def export(
    records: Iterable[Record] | Iterable[tuple[str, Record]],
    consumer: str,
    out: str | Path,
    model: str | Path | None = None,
    masks: Masks | None = None,
) -> int:
    """Writes records in a consumer's layout and returns their number.

    Args:
        records: in this order, if need be with their names; without, the request's id is the name.
        consumer: one of `EXPORTERS`.
        out: a folder, which appears when all records are in it. It may exist if it is empty.
        model: the checkpoint, for consumers that want the last hidden state after the final norm.
        masks: which tokens to train on. Records that it hasn't are trained on their output, if they have any.

    Raises:
        ValueError: records that the consumer can't use, or no model where one is needed.
        FileExistsError: there is something there.
    """
    if consumer not in EXPORTERS:
        raise ValueError(f"There is no exporter to {consumer!r}, only to {', '.join(EXPORTERS)}.")
    exporter, out = EXPORTERS[consumer](), Path(out)
    if exporter.normed and model is None:
        raise ValueError(f"{consumer} wants the last hidden state after the final norm: name the model's checkpoint.")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is no empty folder. Name another, or remove it.")
    norm = FinalNorm(model) if exporter.normed and model is not None else None
    named = ((r.info.request_id, r) if isinstance(r, Record) else r for r in records)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as partial:
        whole = Path(partial, "whole")
        whole.mkdir()
        count = _write_all(named, consumer, exporter, norm, masks or Masks({}), whole)
        whole.replace(out)
    return count


def _write_all(
    records: Iterable[tuple[str, Record]],
    consumer: str,
    exporter: Exporter,
    norm: FinalNorm | None,
    masks: Masks,
    out: Path,
) -> int:
    """Writes the records and what they are into a folder, and returns their number."""
    first: Record | None = None
    entries: list[dict[str, Any]] = []
    for name, record in records:
        first = first or record
        _check(record, consumer, exporter, first.info.layer_ids)
        at = record.info.layer_ids.index(record.info.num_layers)
        aux = torch.cat([record.hidden_states[:, :at], record.hidden_states[:, at + 1 :]], dim=1)
        last = record.hidden_states[:, at].contiguous()
        mask = masks.of(name, record)
        sample = Sample(record, aux, last if norm is None else norm(last), loss_mask(record) if mask is None else mask)
        path = exporter.write(out, len(entries), sample)
        entries.append(
            {
                "file": path,
                "name": name,
                "request_id": record.info.request_id,
                "first_position": record.info.first_position,
                "rows": record.info.rows,
                "has_mask": sample.mask is not None,
            }
        )
    if first is None:
        raise ValueError("There are no records to export.")
    exporter.finish(out, entries)
    (out / "records.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    ids = [i + exporter.id_offset for i in first.info.layer_ids if i != first.info.num_layers]
    facts = {
        "consumer": f"{consumer} {exporter.release}",
        "records": len(entries),
        "convention": exporter.convention,
        "aux_layer_ids": ids,
        "last_hidden_state": "after the final norm" if exporter.normed else "before the final norm",
        "without_mask": sum(not entry["has_mask"] for entry in entries),
        "windows": sum(entry["first_position"] > 0 for entry in entries),
    }
    (out / "export.json").write_text(json.dumps(facts, indent=1) + "\n")
    _warn(facts, exporter)
    return len(entries)


def _warn(facts: dict[str, Any], exporter: Exporter) -> None:
    if count := facts["without_mask"]:
        logger.warning(
            "%d of %d records are of prompts alone, and nothing says which of their tokens to train on: each %s. Give "
            "their masks in a file (--masks).",
            count,
            facts["records"],
            exporter.without_mask,
        )
    if count := facts["windows"]:
        logger.warning(
            "%d of %d records are windows that begin past position 0, where the trainer takes them to begin: their "
            "first_position is in records.jsonl.",
            count,
            facts["records"],
        )


def _check(record: Record, consumer: str, exporter: Exporter, others: tuple[int, ...]) -> None:
    info, name = record.info, f"The record of request {record.info.request_id}"
    if info.layer_ids != others:
        raise ValueError(f"{name} has the layers {info.layer_ids} and the first one {others}: export them apart.")
    if info.num_layers not in info.layer_ids:
        raise ValueError(f"{name} has the layers {info.layer_ids}; {consumer} needs {info.num_layers}: extract it too.")
    if min(info.layer_ids) + exporter.id_offset < 0:
        raise ValueError(f"{name} has layer 0, the embeddings' output, which {consumer} has no id for.")
    if len(record.token_ids) != len(record.hidden_states):
        raise ValueError(f"{name} has {len(record.token_ids)} tokens and {len(record.hidden_states)} rows.")
    if not record.hidden_states.isfinite().all():
        raise ValueError(f"{name} has hidden states that are not finite.")
