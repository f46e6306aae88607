"""Records in the layouts that trainers of draft models read.

What differs between them, besides names, is the convention of layer ids, and whether the last hidden state is the one
before or after the final norm; `export.json` beside the files says which it is.

| consumer | files | last hidden state | layer ids |
|---|---|---|---|
| speculators | `hs_{i}.safetensors` | before the norm, last of `[T, L, H]` | as in the record |
| ModelOpt | `{conversation_id}.pt` | after the norm, `[T, H]` | as in the record |
| SpecForge | `rows_{a}-{b}/data_{i}.ckpt` | after the norm, `[1, T, H]` | id j is the output of layer j: one less |
"""

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file

from proposers.hidden_states.final_norm import FinalNorm
from proposers.hidden_states.record import Record


class Exporter(ABC):
    """One consumer's layout.

    Attributes:
        normed: the consumer wants the last hidden state after the final norm.
        id_offset: what to add to a record's layer id to get the consumer's.
        convention: what the consumer means by its ids.
    """

    normed: ClassVar[bool]
    id_offset: ClassVar[int] = 0
    convention: ClassVar[str]

    @abstractmethod
    def write(self, out: Path, index: int, record: Record, aux: torch.Tensor, last: torch.Tensor) -> None:
        """Writes one record.

        Args:
            aux: `[T, L - 1, H]`, all layers but the last, in the record's order.
            last: `[T, H]`, after the final norm if `normed`.
        """


class Speculators(Exporter):
    normed = False
    convention = "id i is the stream entering layer i, N that leaving the last; the last hidden state is unnormed"

    def write(self, out: Path, index: int, record: Record, aux: torch.Tensor, last: torch.Tensor) -> None:
        states = torch.cat([aux, last[:, None]], dim=1)
        save_file({"hidden_states": states, "token_ids": record.token_ids}, out / f"hs_{index}.safetensors")


class ModelOpt(Exporter):
    normed = True
    convention = "id i is hidden_states[i] of transformers, the stream entering layer i; the last one is normed"

    def write(self, out: Path, index: int, record: Record, aux: torch.Tensor, last: torch.Tensor) -> None:
        conversation_id = f"{index:08d}"
        fields = {
            "input_ids": record.token_ids,
            "hidden_states": last,
            "aux_hidden_states": aux.flatten(1).contiguous(),
            "loss_mask": loss_mask(record),
            "conversation_id": conversation_id,
        }
        torch.save(fields, out / f"{conversation_id}.pt")


class SpecForge(Exporter):
    normed = True
    id_offset = -1
    convention = "id j is the output of layer j, the stream entering layer j + 1; the last hidden state is normed"
    per_folder = 5000

    def write(self, out: Path, index: int, record: Record, aux: torch.Tensor, last: torch.Tensor) -> None:
        start = index // self.per_folder * self.per_folder
        folder = out / f"rows_{start}-{start + self.per_folder}"
        folder.mkdir(exist_ok=True)
        fields = {
            "input_ids": record.token_ids,
            "loss_mask": loss_mask(record),
            "hidden_state": last[None],
            "aux_hidden_state": aux.flatten(1)[None].contiguous(),
        }
        torch.save(fields, folder / f"data_{index}.ckpt")


EXPORTERS: dict[str, type[Exporter]] = {"speculators": Speculators, "modelopt": ModelOpt, "specforge": SpecForge}


def loss_mask(record: Record) -> torch.Tensor:
    """`[T]` int64: 1 at the output's tokens; where a record has only prompt rows, at all of them."""
    positions = record.info.first_position + torch.arange(record.info.rows)
    mask = (positions >= record.info.num_prompt_tokens).long()
    return mask if mask.any() else torch.ones_like(mask)


def export(records: Iterable[Record], consumer: str, out: str | Path, model: str | Path | None = None) -> int:
    """Writes records in a consumer's layout and returns their number.

    Args:
        consumer: one of `EXPORTERS`.
        out: a folder, which appears when all records are in it. It may exist if it is empty.
        model: the checkpoint, for consumers that want the last hidden state after the final norm.

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
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as partial:
        whole = Path(partial, "whole")
        whole.mkdir()
        count = _write_all(records, consumer, exporter, norm, whole)
        whole.replace(out)
    return count


def _write_all(records: Iterable[Record], consumer: str, exporter: Exporter, norm: FinalNorm | None, out: Path) -> int:
    """Writes the records and what they are into a folder, and returns their number."""
    first: Record | None = None
    count = 0
    for record in records:
        first = first or record
        _check(record, consumer, exporter, first.info.layer_ids)
        at = record.info.layer_ids.index(record.info.num_layers)
        aux = torch.cat([record.hidden_states[:, :at], record.hidden_states[:, at + 1 :]], dim=1)
        last = record.hidden_states[:, at].contiguous()
        exporter.write(out, count, record, aux, last if norm is None else norm(last))
        count += 1
    if first is None:
        raise ValueError("There are no records to export.")
    ids = [i + exporter.id_offset for i in first.info.layer_ids if i != first.info.num_layers]
    facts = {
        "consumer": consumer,
        "records": count,
        "convention": exporter.convention,
        "aux_layer_ids": ids,
        "last_hidden_state": "after the final norm" if exporter.normed else "before the final norm",
    }
    (out / "export.json").write_text(json.dumps(facts, indent=1) + "\n")
    return count


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
