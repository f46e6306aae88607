"""Hidden-state extraction: what is kept, how it is written to disk, and the records that come of it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proposers.hidden_states.layout import RecordInfo
    from proposers.hidden_states.record import Record, RecordDataset, load

__all__ = ["Record", "RecordDataset", "RecordInfo", "load"]


def __getattr__(name: str) -> Any:
    # On first use: front ends import this package for the plan alone, and records need torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from proposers.hidden_states import record

    return getattr(record, name)
