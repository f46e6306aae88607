"""How a record lies in its file. The process that writes records imports this, and neither torch nor vLLM."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

SCHEMA = "vllm-mtp-proposers/hidden-states/1"
CONVENTION = "id i is the residual stream entering layer i; N is the output of the last layer, before the final norm"
SUFFIX, SHARD_SUFFIX = ".safetensors", ".shard.safetensors"

PLAIN, ENCODING = "plain", "fp8_e4m3"
SCALES = "hidden_states_scales"

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""A torch dtype's name, and safetensors' name for it."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(dtype: Any) -> str:
    """Of a torch dtype, as a record states it."""
    return str(dtype).removeprefix("torch.")


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
    encoding: str = PLAIN
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


class RowBytes(NamedTuple):
    """What a token takes in a record: its layers' values, and their scales, which rows as they are have none of."""

    values: int
    scales: int

    @classmethod
    def of(cls, encoding: str, num_layers: int, hidden_size: int, dtype: str) -> "RowBytes":
        if encoding == ENCODING:
            return cls(num_layers * hidden_size, num_layers * ITEM_BYTES["float32"])
        return cls(num_layers * hidden_size * ITEM_BYTES[dtype], 0)


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
