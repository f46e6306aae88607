"""Records of what has finished when an engine is shut down: they are written before it goes."""

import logging
from typing import Any

from proposers.hidden_states.plan import ExtractionPlan, connector_of_records
from proposers.host.patching import patch

logger = logging.getLogger("vllm.proposers")

_UNTIL = "vLLM waits for the pending work of KV connectors at shutdown"


@patch(
    "vllm.v1.engine.core:EngineCore.shutdown",
    ("self",),
    why="rows are read out in the step after the one in which their request ends, and an engine in its caller's "
    "process takes no step after the caller's last. One in a process of its own does by itself, if it is given time.",
    upstream="none yet",
    until=_UNTIL,
)
def finish_records(original: Any) -> Any:
    def shutdown(self: Any) -> None:
        from vllm.v1.engine.core import EngineCoreProc

        scheduler = getattr(self, "scheduler", None)
        connector = connector_of_records(getattr(scheduler, "connector", None))
        if connector is not None and not isinstance(self, EngineCoreProc):
            _take_last_steps(self, connector)
        original(self)

    return shutdown


def _take_last_steps(engine_core: Any, connector: Any) -> None:
    from vllm.v1.request import RequestStatus

    try:
        engine_core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        while connector.has_pending_push_work():
            engine_core.step_fn()
    except Exception:  # of an engine that has failed before
        logger.exception("The engine ends without the records of its last requests.")


@patch(
    "vllm.v1.engine.utils:CoreEngineProcManager.__init__",
    ("self", ...),
    why="how long an engine's process may take to end is asked of one who has no configuration.",
    upstream="none yet",
    until=_UNTIL,
)
def note_records(original: Any) -> Any:
    def __init__(self: Any, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        self.has_records = ExtractionPlan.of(vllm_config) is not None
        original(self, *args, vllm_config=vllm_config, **kwargs)

    return __init__


@patch(
    "vllm.v1.engine.utils:CoreEngineProcManager.shutdown",
    ("self", "timeout"),
    why="a server that is told to stop kills its engine at once, with all records that are on their way.",
    upstream="none yet",
    until=_UNTIL,
)
def leave_time_for_records(original: Any) -> Any:
    def shutdown(self: Any, timeout: float | None = None) -> None:
        from vllm import envs

        if self.has_records and timeout is not None:
            timeout = max(timeout, envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)
        original(self, timeout)

    return shutdown


PATCHES = (finish_records, note_records, leave_time_for_records)
