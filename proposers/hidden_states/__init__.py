"""Hidden states on disk: the KV connector that writes them, the record, and exporters to what trainers read."""

from proposers.hidden_states.record import Record, RecordDataset, RecordInfo, load

__all__ = ["Record", "RecordDataset", "RecordInfo", "load"]
