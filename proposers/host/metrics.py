"""The controller's choices among vLLM's metrics.

The process that exports metrics is another than the scheduler's, and is told a fixed set of fields of each step. How
many drafts were verified, and of how many requests, is among them, so what K a step had can be read there.
"""

from typing import Any

from proposers.host.patching import patch
from proposers.options import Options

EXPORTER = "vllm.v1.metrics.loggers:PrometheusStatLogger"
NO_METRIC = "none yet: vLLM counts drafts, and no steps"
WITH_METRIC = "vLLM counts steps by their number of drafts, or lets a plugin export metrics without switching them on"


@patch(
    f"{EXPORTER}.__init__",
    ("self", "vllm_config", ...),
    why="metrics are made here. A stat logger of a plugin's would have the statistics of all engines switched on.",
    upstream=NO_METRIC,
    until=WITH_METRIC,
)
def add_steps_by_drafts(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        self.steps_by_drafts = {}
        if vllm_config.speculative_config is None or not Options.of(vllm_config).adapt_drafts:
            return
        counter = self._counter_cls(
            name="vllm:spec_decode_num_steps",
            documentation="Steps in which requests decoded, by the drafts of each request that they verified.",
            labelnames=["model_name", "engine", "num_drafts"],
        )
        numbers = range(vllm_config.speculative_config.num_speculative_tokens + 1)
        for engine, labels in self.per_engine_labelvalues.items():
            self.steps_by_drafts[engine] = [counter.labels(*labels, str(number)) for number in numbers]

    return __init__


@patch(
    f"{EXPORTER}.record",
    ("self", "scheduler_stats", "iteration_stats", ...),
    why="metrics are counted here, step by step.",
    upstream=NO_METRIC,
    until=WITH_METRIC,
)
def count_steps_by_drafts(original: Any) -> Any:
    def record(
        self: Any, scheduler_stats: Any, iteration_stats: Any, *args: Any, engine_idx: int = 0, **kwargs: Any
    ) -> None:
        original(self, scheduler_stats, iteration_stats, *args, engine_idx=engine_idx, **kwargs)
        counters = self.steps_by_drafts.get(engine_idx)
        if counters is not None and scheduler_stats is not None and iteration_stats is not None:
            drafts = scheduler_stats.spec_decoding_stats
            if drafts is not None:
                counters[-(-drafts.num_draft_tokens // drafts.num_drafts)].inc()  # a request at its end has fewer
            elif iteration_stats.inter_token_latencies_iter:  # of requests that have had their first token before
                counters[0].inc()

    return record


PATCHES = (add_steps_by_drafts, count_steps_by_drafts)
