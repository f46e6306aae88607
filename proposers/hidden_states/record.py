"""The record: one request's hidden states and token ids in a safetensors file that says what they are.

A file holds one record, or, where its name ends in `.shard.safetensors`, many. vLLM isn't needed to read either.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from proposers.hidden_states import fp8
from proposers.hidden_states.layout import ENCODING, SCALES, SHARD_SUFFIX, SUFFIX, RecordInfo


class Drafts(NamedTuple):
    """The steps of a request that verified drafts, in their order.

    Attributes:
        rows: `[S]` int32, the sequence position that a step's drafts follow.
        counts: `[S, 2]` int32, how many were drafted and how many of those accepted.
        tokens: `[S, K]` int32, the drafts; -1 beyond them, and for rejected ones that a preemption has wiped out.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor


class Record(NamedTuple):
    """One request.

    Attributes:
        hidden_states: `[T, L, H]` in the model's dtype.
        token_ids: `[T]` int64, the tokens at these rows.
        info: what they are.
        drafts: what was drafted meanwhile, where the connector's `record_drafts` is set.
    """

    hidden_states: torch.Tensor
    token_ids: torch.Tensor
    info: RecordInfo
    drafts: Drafts | None = None


def load(path: str | Path, name: str | None = None) -> Record:
    """Reads a record.

    Args:
        path: what `kv_transfer_params["hidden_states_path"]` says, or `["hidden_states_shard"]`.
        name: what `kv_transfer_params["hidden_states_name"]` says; needed for a shard, and for nothing else.

    Raises:
        ValueError: not a record, or a shard without that name.
        FileNotFoundError: there is no such file.
    """
    with _opened(path) as file:
        metadata = file.metadata() or {}
        prefix = ""
        if "records" in metadata:
            records = json.loads(metadata["records"])
            if name not in records:
                raise ValueError(
                    f"{path} holds {len(records)} records and none called {name!r}. Give one of its names."
                )
            metadata, prefix = records[name], f"{name}."
        elif name is not None:
            raise ValueError(f"{path} is one record and no shard, so it has none called {name!r}. Leave the name out.")
        try:
            info = RecordInfo.from_metadata(metadata)
        except ValueError as error:
            raise ValueError(f"{path} is no record. {error}") from None
        hidden_states = file.get_tensor(f"{prefix}hidden_states")
        if info.encoding == ENCODING:
            scales = file.get_tensor(f"{prefix}{SCALES}")
            hidden_states = fp8.dequantize(hidden_states, scales, getattr(torch, info.dtype))
        return Record(hidden_states, file.get_tensor(f"{prefix}token_ids"), info, _drafts(file, prefix))


def _drafts(file: Any, prefix: str) -> Drafts | None:
    try:
        return Drafts(*(file.get_tensor(f"{prefix}draft_{name}") for name in Drafts._fields))
    except SafetensorError:  # it has none
        return None


class RecordDataset(torch.utils.data.Dataset):
    """The records under a folder, sharded or not; what is still being written isn't there.

    They are in the order of their names, numbers in them by their value: with names that count, a record has the index
    that its sender gave it.

    Attributes:
        entries: the path of each, and its name in there where that is a shard.
        names: under the folder, or in a shard.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a shard in it is none.
    """

    def __init__(self, folder: str | Path) -> None:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is no folder, so there are no records under it.")
        named = ((name or _name(Path(folder), path), path, name) for path, name in _entries(Path(folder)))
        ordered = sorted(named, key=lambda entry: (_by_number(entry[0]), str(entry[1])))
        self.entries = [(path, name) for _, path, name in ordered]
        self.names = [name for name, *_ in ordered]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Record:
        return load(*self.entries[index])


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix().removesuffix(SUFFIX)


def _by_number(name: str) -> list[tuple[str, int]]:
    """A key that orders names as one counts: 9 before 10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _entries(folder: Path) -> Iterator[tuple[Path, str | None]]:
    paths = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # an engine may remove its own meanwhile
        paths += [Path(here, name) for name in names if name.endswith(SUFFIX) and not name.startswith(".")]
    for path in sorted(paths):
        if not path.name.endswith(SHARD_SUFFIX):
            yield path, None
            continue
        with _opened(path) as file:
            metadata = file.metadata() or {}
        if "records" not in metadata:
            raise ValueError(f"{path} is no shard of records, whatever its name says.")
        for name in json.loads(metadata["records"]):
            yield path, name


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}.") from error
