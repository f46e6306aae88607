"""A worker for the tests of `bench.processes`: notes its turns in a file that all of them share."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench.processes import report_progress, take_turn
from bench.workers.engine import run_worker


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    for turn in range(spec["turns"]):
        report_progress(f"turn {turn}")
        print("a line that is not finished", end="")
        take_turn()
        with Path(spec["shared"]).open("a") as shared:
            shared.write(f"{spec['mode']} {turn} {os.getpid()}\n")
        if turn == spec.get("fails_in"):
            sys.exit("no more of this")
        if turn == spec.get("kills_in"):
            for line in Path(spec["shared"]).read_text().splitlines():
                if not line.startswith(spec["mode"]):
                    os.kill(int(line.split()[-1]), signal.SIGKILL)
            time.sleep(0.2)  # until they are gone
    return {"turns": spec["turns"]}


if __name__ == "__main__":
    run_worker(measure)
