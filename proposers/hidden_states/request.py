"""What a configuration and a request ask of the connector, and the names of records."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args

from proposers.hidden_states.layout import ENCODING, PLAIN, SHARD_SUFFIX, SUFFIX

RECORDS_PER_FOLDER = 1000
ENCODINGS = {"model": PLAIN, "fp8": ENCODING}
_MAX_PART_BYTES, _MAX_NAME_BYTES = 200, 1000


@dataclass(frozen=True, slots=True)
class Settings:
    """`kv_connector_extra_config`.

    Attributes:
        storage_root: the folder that everything is written under.
        layer_ids: what is kept, where the speculative method isn't extraction (`ExtractionPlan.of` checks them).
        include_output_tokens: rows of the output too, where a request doesn't say.
        sharded: few large files in place of one per request.
        shard_bytes: a shard is closed when it has that many, and whenever nothing else is left to do.
        shard_seconds: and when its first record has waited that long.
        ring_bytes: host memory between the device and the writers.
        writer_threads: files that are written at the same time; a sharded engine has one.
        dtype: of the files' rows: `model`, as they are, or `fp8`.
        lock_files: a `.lock` beside each file, which readers of vLLM's `ExampleHiddenStatesConnector` want to take.
        wait_for_records: an answer waits for its record and carries its path. None: where extraction is the
            speculative method, and not beside one that drafts.
        sample_rate: the share of the requests that say nothing of a record which get one.
        bytes_per_second: of records; None: as many as the disk takes.
        disk_quota_bytes: of all files under the storage root; None: as many as there is room for.
        record_drafts: a record has what was drafted for its request, step by step, and how much of it was accepted.
    """

    storage_root: str
    layer_ids: Sequence[int] | None = None
    include_output_tokens: bool = False
    sharded: bool = False
    shard_bytes: int = 1 << 30
    shard_seconds: float = 5.0
    ring_bytes: int = 256 << 20
    writer_threads: int = 4
    dtype: str = "model"
    lock_files: bool = False
    wait_for_records: bool | None = None
    sample_rate: float = 1.0
    bytes_per_second: int | None = None
    disk_quota_bytes: int | None = None
    record_drafts: bool = False

    @classmethod
    def of(cls, extra: dict[str, Any]) -> "Settings":
        """Raises `ValueError` for keys and values that it doesn't know."""
        known = {field.name: _plain_type(field.type) for field in fields(cls)}
        if unknown := sorted(set(extra) - set(known)):
            raise ValueError(f"kv_connector_extra_config has {', '.join(unknown)}; there are {', '.join(known)}.")
        if not isinstance(extra.get("storage_root"), str) or not extra["storage_root"]:
            raise ValueError(
                f"kv_connector_extra_config has storage_root={extra.get('storage_root')!r}: name the folder that "
                "hidden states are to be written under."
            )
        for key, value in extra.items():
            if key != "layer_ids":  # the plan checks them
                _check_setting(key, value, known[key])
        if extra.get("dtype", "model") not in ENCODINGS:
            raise ValueError(
                f"kv_connector_extra_config has dtype={extra['dtype']!r}; there are {', '.join(ENCODINGS)}."
            )
        if extra.get("sample_rate", 1) > 1:
            raise ValueError(
                f"kv_connector_extra_config has sample_rate={extra['sample_rate']}: it is a share up to 1."
            )
        return cls(**extra)

    @property
    def encoding(self) -> str:
        """As a record states it."""
        return ENCODINGS[self.dtype]


def _plain_type(annotation: Any) -> type:
    """Without None, which stands for what isn't set."""
    plain: type = next((one for one in get_args(annotation) if one is not NoneType), annotation)
    return plain


def _check_setting(key: str, value: Any, wanted: type) -> None:
    allowed: Any = (int, float) if wanted is float else wanted
    if not isinstance(value, allowed) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"kv_connector_extra_config has {key}={value!r}, which is no {wanted.__name__}.")
    if wanted in (int, float) and value <= 0:
        raise ValueError(f"kv_connector_extra_config has {key}={value}: it has to be above 0.")


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """`kv_transfer_params` of a request.

    Attributes:
        extract: whether to write a record at all.
        include_output_tokens: rows of the output too; the token that was sampled last was not run and has none.
        window: sequence positions `[start, stop)` to keep of those.
        name: the record's path under the storage root, without suffix; the connector's choice where there is none.
        asked_for: it says itself that there is to be a record, so it isn't sampled.
    """

    extract: bool
    include_output_tokens: bool
    window: tuple[int, int] | None
    name: str | None
    asked_for: bool

    @classmethod
    def of(cls, params: Any, include_output_tokens: bool, has_others: bool = False) -> "RecordRequest":
        """What a request asks for.

        Args:
            has_others: keys that aren't known here are other connectors', within vLLM's `MultiConnector`.

        Raises:
            ValueError: for what can't be done.
        """
        if params is None:
            params = {}
        if not isinstance(params, dict):
            raise ValueError(f"kv_transfer_params is {params!r} and should be an object.")
        if not has_others:
            known = [field.name for field in fields(cls) if field.name != "asked_for"]
            if unknown := sorted(map(str, set(params) - set(known))):
                raise ValueError(f"kv_transfer_params has {', '.join(unknown)}; there are {', '.join(known)}.")
        defaults = {"extract": True, "include_output_tokens": include_output_tokens}
        flags = {key: params.get(key, default) for key, default in defaults.items()}
        for key, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"kv_transfer_params has {key}={value!r}, which is neither true nor false.")
        name = params.get("name")
        return cls(
            **flags,
            window=_window(params.get("window")),
            name=None if name is None else checked_name(name),
            asked_for="extract" in params or name is not None,
        )

    def rows(self, num_prompt_tokens: int, num_tokens: int) -> tuple[int, int]:
        """Positions `[start, stop)` to write.

        Args:
            num_tokens: prompt and output.

        Raises:
            ValueError: the window has none of the request's rows.
        """
        computed = num_tokens - 1 if self.include_output_tokens else num_prompt_tokens
        if self.window is None:
            return 0, computed
        start, stop = self.window[0], min(self.window[1], computed)
        if start >= stop:
            raise ValueError(f"window={list(self.window)} has none of the request's rows, which are [0, {computed}).")
        return start, stop


def _window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    if not isinstance(window, list | tuple) or len(window) != 2 or any(type(bound) is not int for bound in window):
        raise ValueError(f"window is {window!r}, and should be two positions, [start, stop).")
    if not 0 <= window[0] < window[1]:
        raise ValueError(f"window={list(window)} is no range of positions: give 0 <= start < stop.")
    return window[0], window[1]


def checked_name(name: Any) -> str:
    """A name that a request gave, without suffix.

    Raises:
        ValueError: it would lead out of the storage root, or is no name for a file.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r}, and should be a path under the storage root.")
    if not name.isprintable():  # before anything is encoded: half a surrogate pair can't be
        raise ValueError(f"name={name!r} has characters that can't be printed.")
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        raise ValueError(f"name={name!r} leads out of the storage root. Give a path under it, without '..'.")
    if any(not part or part.startswith(".") or len(part.encode()) > _MAX_PART_BYTES for part in parts):
        raise ValueError(
            f"name={name!r} has a part that is empty, begins with a dot or is longer than {_MAX_PART_BYTES} bytes."
        )
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"name={name!r} is longer than {_MAX_NAME_BYTES} bytes.")
    if f"{name.removesuffix(SUFFIX)}{SUFFIX}".endswith(SHARD_SUFFIX):
        raise ValueError(f"name={name!r} ends in {SHARD_SUFFIX}, which marks files of many records.")
    return name.removesuffix(SUFFIX)


def generated_name(run: str, number: int, request_id: str) -> str:
    """A name of the connector's choice: no folder has more than `RECORDS_PER_FOLDER`, and no two are equal.

    Args:
        run: what tells this engine from others on the same folder.
        number: of the record, counted by the engine.
        request_id: whatever a client chose; what is no good in a file name becomes `_`.
    """
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", request_id)[:64]
    return f"{run}/{number // RECORDS_PER_FOLDER:06d}/{number:09d}-{readable}"
