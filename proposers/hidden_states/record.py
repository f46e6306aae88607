"""The record: one request's hidden states and token ids in a safetensors file that says what they are.

A file holds one record, or, where its name ends in `.shard.safetensors`, many. vLLM isn't needed to read either.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from proposers.hidden_states import fp8

SCHEMA = "vllm-mtp-proposers/hidden-states/1"
CONVENTION = "id i is the residual stream entering layer i; N is the output of the last layer, before the final norm"
SUFFIX, SHARD_SUFFIX = ".safetensors", ".shard.safetensors"

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""A torch dtype's name, and safetensors' name for it."""


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What a record says of itself.

    Attributes:
        layer_ids: what lies along the second dimension of the hidden states, by `convention`.
        num_layers: N, the decoder layers of the model.
        rows: T.
        first_position: the sequence position of row 0; rows are consecutive.
        num_prompt_tokens: of the whole prompt, whether it is in the rows or not.
        finish_reason: why the request ended: `stop`, `length` or `repetition`.
        encoding: how the hidden states are stored: `plain`, in `dtype`, or `fp8_e4m3`, with scales; `load` gives either
            in `dtype`.
    """

    layer_ids: tuple[int, ...]
    num_layers: int
    dtype: str
    model: str
    rows: int
    first_position: int
    num_prompt_tokens: int
    finish_reason: str
    request_id: str
    encoding: str = fp8.PLAIN
    convention: str = CONVENTION
    schema: str = SCHEMA

    def to_metadata(self) -> dict[str, str]:
        """As safetensors holds it: every value is text, those that aren't text themselves as JSON."""
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in asdict(self).items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None) -> "RecordInfo":
        """Raises `ValueError` for metadata of something else."""
        values: dict[str, Any] = dict(metadata or {})
        if values.get("schema") != SCHEMA:
            raise ValueError(
                f"The schema is {values.get('schema')!r}, and {SCHEMA!r} is what this version reads: the file was not "
                "written by HiddenStatesConnector, or by another version of it."
            )
        for key in ("layer_ids", "num_layers", "rows", "first_position", "num_prompt_tokens"):
            values[key] = json.loads(values[key])
        return cls(**values | {"layer_ids": tuple(values["layer_ids"])})


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
        if info.encoding == fp8.ENCODING:
            scales = file.get_tensor(f"{prefix}{fp8.SCALES}")
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


def safetensors_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str], size: int | None = None
) -> bytes:
    """The start of a safetensors file, so that the tensors can follow as a stream.

    Args:
        tensors: name, dtype by safetensors' name, shape and bytes, in the order in which they follow.
        size: bytes to pad it to; without it, the next multiple of 8.

    Raises:
        ValueError: it is longer than `size`.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(entries).encode()
    length = -(-len(text) // 8) * 8 if size is None else size - 8
    if len(text) > length:
        raise ValueError(f"The header takes {len(text)} bytes and has room for {length}.")
    return length.to_bytes(8, "little") + text.ljust(length)
