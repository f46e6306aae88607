"""Counters of what was written and what was not, in vLLM's log and its Prometheus metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "records_written": "Records of hidden states that are in place.",
    "records_failed": "Records of hidden states that were asked for and could not be written.",
    "bytes_written": "Bytes of hidden states that are in place.",
}


@dataclass
class HiddenStatesStats(KVConnectorStats):
    """Counts since the last report, by the names in `COUNTERS`."""

    data: dict[str, Any] = field(default_factory=dict)

    def count(self, **counts: int) -> None:
        for name, value in counts.items():
            self.data[name] = self.data.get(name, 0) + value

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.count(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data.get(name, 0) for name in COUNTERS}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class HiddenStatesPromMetrics(KVConnectorPromMetrics):
    """`vllm:hidden_states_*` counters, by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Counter]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:hidden_states_{name}", documentation=documentation, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)
