"""The number of drafts of each step, by a controller in place of the scheduler's table (`proposers/adaptive.py`).

vLLM has a table of K by batch size, and where there is one the runner captures decode graphs for every K in it, and
drafts as many as the scheduler says of a step. So a table with every K is configured, and the scheduler asks another.

Where there is a table the scheduler doesn't pad a request's first decode step to the rows of one with drafts. Such a
step, of requests that differ in their rows, is not the uniform one that decode graphs are captured for.
"""

import logging
from typing import Any

from proposers.adaptive import Controller
from proposers.architecture import architecture_of, why_not_on_v2
from proposers.host.patching import patch
from proposers.options import Options

logger = logging.getLogger("vllm.proposers")

NO_POLICY = "none yet: the number of drafts goes by a table of batch sizes"
PLUGIN_POLICY = "vLLM lets a plugin choose the number of drafts of a step"


@patch(
    "vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel",
    ("self",),
    why="the runner captures decode steps for the K's of the table that is configured, which is settled here.",
    upstream=NO_POLICY,
    until=PLUGIN_POLICY,
)
def capture_every_number(original: Any) -> Any:
    def _maybe_disable_dynamic_sd_for_data_parallel(self: Any) -> None:
        if Options.of(self).adapt_drafts:
            _configure_every_number(self)
        original(self)

    return _maybe_disable_dynamic_sd_for_data_parallel


def _configure_every_number(vllm_config: Any) -> None:
    if reason := why_not_adaptive(vllm_config):
        logger.warning("adapt_drafts has no effect: %s.", reason)
        return
    config = vllm_config.speculative_config
    given = config.num_speculative_tokens_per_batch_size
    table = every_number(config.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs)
    # A copy of a config is settled like a new one.
    if given is not None and [tuple(entry) for entry in given] != table:
        raise ValueError(
            f"num_speculative_tokens_per_batch_size={given!r} says how many drafts a step has, and adapt_drafts has "
            "that measured: leave one of them out."
        )
    config.num_speculative_tokens_per_batch_size = table


def why_not_adaptive(vllm_config: Any) -> str | None:
    """Why the number of drafts can't be chosen by measured times here, as the end of a sentence; None where it can."""
    config, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    architecture = architecture_of(config)
    if architecture is None:
        return "nothing is drafted by vllm-mtp-proposers"
    if vllm_config.use_v2_model_runner and (reason := why_not_on_v2(vllm_config, architecture)):
        return f"vLLM's own speculator drafts, since {reason}"
    reasons = {
        "ranks of a data-parallel group would choose differently": parallel.data_parallel_size > 1,
        "with external_launcher each rank has a scheduler and a clock of its own": (
            parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def every_number(max_drafts: int, max_num_seqs: int) -> list[tuple[int, int, int]]:
    """A table of `(from, to, K)` by batch size that has every K, each for a batch as large as can be.

    What decode graphs are captured for goes by the largest batch of each K. An engine of fewer requests than there are
    K's has the largest, 0, and some between; steps under another K are run as those that were not captured are.
    """
    if max_num_seqs == 1:
        return [(1, 1, max_drafts)]
    if max_num_seqs <= max_drafts:
        return [(n, n, max_drafts * (max_num_seqs - n) // (max_num_seqs - 1)) for n in range(1, max_num_seqs + 1)]
    first = max_num_seqs - max_drafts
    return [(1, first, max_drafts), *((first + n, first + n, max_drafts - n) for n in range(1, max_drafts + 1))]


@patch(
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
    ("self",),
    why="a decode graph is looked for among those of the next larger number of tokens only. With graphs for several "
    "K's those are often for another K, and so many batch sizes find none, though there is a larger one for their K.",
    upstream="none yet",
    until="vLLM looks for a decode graph among all that a step fits in",
)
def find_graphs_of_every_number(original: Any) -> Any:
    def _init_candidates(self: Any) -> None:
        original(self)
        if Options.of(self.vllm_config).adapt_drafts:
            for descs in self._capture_descs.values():
                add_larger_graphs(self._candidates, [desc for desc in descs if desc.uniform_token_count is not None])

    return _init_candidates


def add_larger_graphs(candidates: dict[tuple[int, int], list[Any]], descs: list[Any]) -> None:
    """Has a step find the smallest graph of its own K, whatever K those of a size between them are for.

    Args:
        candidates: the host's, by number of tokens and of LoRAs, in the order in which they are tried; extended. They
            go before the others, since a graph of one K doesn't run a step that another could.
        descs: of the captured decode graphs, the largest first.
    """
    for (num_tokens, num_loras), found in candidates.items():
        fitting = [desc for desc in descs if desc.num_tokens >= num_tokens and desc.num_active_loras == num_loras]
        smallest = {(desc.uniform_token_count, desc.num_ubatches): desc for desc in fitting}
        found[:0] = [desc for desc in smallest.values() if desc not in found]


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    ("self", "vllm_config", ...),
    why="the table of K by batch size, which the scheduler asks in every step, is the place to choose K.",
    upstream=NO_POLICY,
    until=PLUGIN_POLICY,
)
def choose_by_a_controller(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        adapts = Options.of(vllm_config).adapt_drafts and why_not_adaptive(vllm_config) is None
        if adapts and self.dynamic_sd_lookup is not None:
            self.dynamic_sd_lookup = Controller(self.num_spec_tokens)

    return __init__


def controller_of(scheduler: Any) -> Controller | None:
    """What chooses K there; None: vLLM does."""
    lookup = scheduler.dynamic_sd_lookup
    return lookup if isinstance(lookup, Controller) else None


def end_step(scheduler: Any, controller: Controller, step: Any) -> None:
    """Has the controller learn of a step whose output the scheduler has taken in."""
    _learn(controller, step)
    if not step.num_scheduled_tokens or not scheduler.has_unfinished_requests():
        controller.pause()
    if scheduler.log_stats:
        from vllm import envs

        controller.report(every=envs.VLLM_LOG_STATS_INTERVAL)


def _learn(controller: Controller, step: Any) -> None:
    controller.acceptance.forget(step.finished_req_ids)
    if step.num_scheduled_tokens:
        num_drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        prompt_rows = step.total_num_scheduled_tokens - len(step.num_scheduled_tokens) - num_drafts
        controller.learn(step.num_spec_tokens_to_schedule, list(step.num_scheduled_tokens), prompt_rows)


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",
    ("self", "spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"),
    why="it is told of every request how many of its drafts were accepted, with statistics switched off, too.",
    upstream=NO_POLICY,
    until=PLUGIN_POLICY,
)
def count_accepted_drafts(original: Any) -> Any:
    def make_spec_decoding_stats(
        self: Any,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        if controller := controller_of(self):
            # A grammar took some away; what it left says how good drafts are.
            invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
            controller.acceptance.observe(request_id, num_draft_tokens - invalid, num_accepted_tokens)
        return original(
            self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    return make_spec_decoding_stats


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler.shutdown",
    ("self",),
    why="short runs end before the interval of the controller's log line.",
    upstream=NO_POLICY,
    until=PLUGIN_POLICY,
)
def report_at_the_end(original: Any) -> Any:
    def shutdown(self: Any) -> None:
        if controller := controller_of(self):
            controller.report()
        original(self)

    return shutdown


PATCHES = (
    capture_every_number,
    find_graphs_of_every_number,
    choose_by_a_controller,
    count_accepted_drafts,
    report_at_the_end,
)
