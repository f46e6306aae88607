"""Counters of what was written and what was not, in vLLM's log and its Prometheus metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from proposers.hidden_states.admission import REASONS

COUNTERS = {
    "records_written": "Records of hidden states that are in place.",
    "records_failed": "Records of hidden states that were asked for and could not be written.",
    "rows_written": "Rows of hidden states that are in place.",
    "bytes_written": "Bytes of hidden states that are in place.",
}
GAUGES = {
    "records_in_flight": "Records of hidden states that are on their way.",
    "backlog_bytes": "Bytes of hidden states that are on their way and not on disk yet.",
    "quota_reached": "1 while there is no room under disk_quota_bytes, else 0.",
}
SKIPPED = "records_skipped"


def skipped(reason: str) -> str:
    """The name under which records are counted that were skipped for that reason."""
    return f"{SKIPPED}_{reason}"


@dataclass
class HiddenStatesStats(KVConnectorStats):
    """Counts since the last report, and where things stand, by name."""

    data: dict[str, Any] = field(default_factory=dict)

    def count(self, **counts: int) -> None:
        for name, value in counts.items():
            self.data[name] = self.data.get(name, 0) + value

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            else:
                self.count(**{name: value})
        return self

    def reduce(self) -> dict[str, int | float]:
        always = {name: self.data.get(name, 0) for name in COUNTERS}
        return always | {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not self.data


class HiddenStatesPromMetrics(KVConnectorPromMetrics):
    """`vllm:hidden_states_*`, by engine; records that were skipped by reason, too."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, dict(per_engine_labelvalues))
        self._metrics: dict[str, dict[int, Any]] = {}
        for kind, documented in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES)):
            for name, documentation in documented.items():
                metric = kind(name=f"vllm:hidden_states_{name}", documentation=documentation, labelnames=labelnames)
                self._add(name, metric, [])
        metric = self._counter_cls(
            name=f"vllm:hidden_states_{SKIPPED}",
            documentation="Records of hidden states that were skipped, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        for reason in REASONS:
            self._add(skipped(reason), metric, [reason])

    def _add(self, name: str, metric: Any, more: list[object]) -> None:
        self._metrics[name] = {
            engine: metric.labels(*values, *more) for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            metric.set(value) if name in GAUGES else metric.inc(value)
