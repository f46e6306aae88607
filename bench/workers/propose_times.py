"""When each drafting pass of an engine ran, by the host's clock."""

import time
from typing import Any

from bench.workers.engine import drafter_of


def time_propose(worker: Any, on_device: bool = False) -> None:
    """For `collective_rpc`: has every further drafting pass of a worker timed, for `take_propose_times`.

    Args:
        on_device: on CUDA, when the device computes a pass, and not when the host launches it.
    """
    import torch

    drafter = drafter_of(worker.model_runner)
    worker.propose_times = times = []
    if drafter is None:
        return
    mark = _record_event if on_device and torch.cuda.is_available() else time.perf_counter
    original = drafter.propose

    def propose(*args: Any, **kwargs: Any) -> Any:
        before = mark()
        result = original(*args, **kwargs)
        times.append((before, mark()))
        return result

    drafter.propose = propose


def take_propose_times(worker: Any) -> list[tuple[float, float]]:
    """For `collective_rpc`: when each pass since the last call began and ended, by `time.perf_counter`."""
    taken = list(worker.propose_times)
    worker.propose_times.clear()
    if not taken or isinstance(taken[0][0], float):
        return taken
    import torch

    # Events know how far apart they are: so one of now tells when the others were.
    torch.cuda.synchronize()
    clock, now = time.perf_counter(), _record_event()
    now.synchronize()
    return [(clock - start.elapsed_time(now) / 1e3, clock - end.elapsed_time(now) / 1e3) for start, end in taken]


def _record_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
