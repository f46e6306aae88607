"""Schedules of a setup with several tensor-parallel ranks: a process per rank, each with an engine and an oracle.

vLLM's `external_launcher` has every rank schedule for itself, so what one process of one rank can do, the watching of a
drafter, all of them can. Every rank compares the key and value heads that are its own, and its drafts.
"""

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from bench.oracle.report import Report
from bench.oracle.schedules import Setup
from bench.processes import child_environment

TIME_LIMIT_S = 1200


def run_on_ranks(
    model: Path,
    count: int,
    seed: int,
    setup: Setup,
    *,
    modules: int | None = None,
    graphs: bool = False,
    faults: Sequence[Sequence[str]] | None = None,
) -> list[list[dict[str, Any]]]:
    """Each rank's reports, as JSON: one for each turn of the schedules.

    Args:
        modules, graphs: as of `bench.oracle.driver.run_schedules`.
        faults: by rank, what to plant there in each turn (`bench.oracle.faults.FAULTS`); None: one turn, no fault.

    Raises:
        RuntimeError: a rank failed; the message ends with what it printed.
    """
    # Here and not above: the engines of this process, too, want to set variables before vLLM is first imported.
    from vllm.utils.network_utils import get_open_port

    port = get_open_port()
    arguments = {"model": str(model), "count": count, "seed": seed, "setup": setup.name}
    arguments |= {"modules": modules, "graphs": graphs}
    with _one_at_a_time(), TemporaryDirectory() as folder:
        outputs = [Path(folder, f"rank-{rank}.txt") for rank in range(setup.ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, output in enumerate(outputs):
                planted = {"faults": faults[rank] if faults else ["none"]}
                processes.append(_start_rank(rank, setup.ranks, port, arguments | planted, output))
            _wait(processes, outputs)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(output.read_text().splitlines()[-1]) for output in outputs]


def _start_rank(
    rank: int, num_ranks: int, port: int, arguments: dict[str, Any], output: Path
) -> subprocess.Popen[bytes]:
    """Starts `bench.oracle.rank` as one of the ranks that meet at this port, and has what it prints in a file."""
    environment = child_environment(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    command = [sys.executable, "-m", "bench.oracle.rank", json.dumps(arguments)]
    with output.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """vLLM gives the shared memory of all engines on the CPU whose ranks are started from outside the same name.

    One that was killed leaves it, and the next would not start.
    """
    with Path(gettempdir(), "vllm-mtp-proposers-ranks.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in Path("/dev/shm").glob("-tp:*-cpushm_*"):
            left.unlink()
        yield


def _wait(processes: list[subprocess.Popen[bytes]], outputs: list[Path]) -> None:
    """Waits for all ranks, or until one fails: the others would wait for it without end.

    Raises:
        RuntimeError: a rank failed, or they are not done in `TIME_LIMIT_S`.
    """
    deadline = time.monotonic() + TIME_LIMIT_S
    while any(running := [process.poll() is None for process in processes]):
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        if failed or time.monotonic() > deadline:
            rank = failed[0] if failed else running.index(True)
            how = f"exited with {processes[rank].returncode}" if failed else f"is not done after {TIME_LIMIT_S} s"
            raise RuntimeError(f"Rank {rank} {how}:\n{outputs[rank].read_text(errors='replace')[-6000:]}")
        time.sleep(0.1)
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        raise RuntimeError(f"Rank {failed[0]} failed:\n{outputs[failed[0]].read_text(errors='replace')[-6000:]}")


def add_ranks(report: Report, ranks: list[dict[str, Any]]) -> None:
    """Adds what the ranks found to a report: rows and drafts of all; events and steps, which are the same, once.

    Raises:
        AssertionError: the ranks didn't run the same steps.
    """
    first = ranks[0]
    assert all(rank["events"] == first["events"] and rank["steps"] == first["steps"] for rank in ranks), ranks
    report.add(first)
    for number, rank in enumerate(ranks[1:], 1):
        report.add(rank | {"schedules": 0, "steps": 0, "passes": 0, "events": {}}, f"Rank {number}: ")
