"""One tensor-parallel rank of a setup that has several: an engine and an oracle, started by `bench.oracle.ranks`.

    python -m bench.oracle.rank '{"model": ..., "count": ..., "seed": ..., "setup": ..., "faults": [...], ...}'

plays the same schedules once for each of the faults, which it plants beforehand, and prints a list of the reports as
one line of JSON, the last.
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench.interpreter import choose_runner_from_environment
from bench.oracle.driver import run_schedules
from bench.oracle.schedules import setup_called


def run_rank(
    model: str, count: int, seed: int, setup: str, modules: int | None, graphs: bool, faults: list[str]
) -> list[dict[str, Any]]:
    """The reports of this rank as JSON, one for each of `faults` (names of `bench.oracle.faults.FAULTS`)."""
    # Imports vLLM, which must not happen before the runner is chosen.
    from bench.oracle.faults import FAULTS

    return [
        run_schedules(
            Path(model),
            count,
            seed,
            modules=modules,
            setups=[setup_called(setup)],
            plant=FAULTS[fault],
            graphs=graphs,
            progress=True,
        ).to_json()
        for fault in faults
    ]


if __name__ == "__main__":
    choose_runner_from_environment()
    print("\n" + json.dumps(run_rank(**json.loads(sys.argv[1]))))
