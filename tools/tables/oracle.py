"""What the oracle compared."""

import json
from collections.abc import Callable
from typing import Any

from bench.spread import show_quartiles
from tools.tables.records import RESULTS, record, show, show_ratio, table


def oracle() -> str:
    rows = []
    for label, found in oracle_runs().items():
        wrong = sum(run["rows_mismatched"] + run["drafts_mismatched"] for run in found)
        totals = (sum(run[key] for run in found) for key in ("schedules", "rows_checked", "drafts_checked"))
        replays = sum(run["events"]["replays"] for run in found)
        rows.append([label, *(f"{total:,}" for total in totals), f"{replays:,}", str(wrong)])
    return table(["engine", "schedules", "rows", "drafts", "replayed passes", "wrong"], rows)


def oracle_runs() -> dict[str, list[dict[str, Any]]]:
    """The oracle's records by what they ran on. Only those of GPUs hold several runs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("oracle-*.json")):
        found = json.loads(path.read_text())
        place = path.name.split("-")[1].upper() if isinstance(found, list) else "CPU"
        for run in found if isinstance(found, list) else [found]:
            release = ", vLLM 0.33" if run.get("vllm", "").startswith("0.33") else ""
            label = f"{gpu_of(run) or place}, {run['runner'].upper()}, {run['dtype']}{release}"
            groups.setdefault(label, []).append(run)
    return dict(sorted(groups.items()))


def gpu_of(run: dict[str, Any]) -> str | None:
    """What a run on a GPU ran on, where it says so."""
    return run["device"].split()[-1] if "device" in run else None


def oracle_says() -> str:
    runs = [run for found in oracle_runs().values() for run in found]
    rows, drafts, schedules = (sum(run[key] for run in runs) for key in ("rows_checked", "drafts_checked", "schedules"))
    wrong = sum(run["rows_mismatched"] + run["drafts_mismatched"] for run in runs)
    return (
        f"The records have {schedules} schedules with {rows:,} rows and {drafts:,} drafts, of which {wrong} are wrong."
    )


def architectures() -> str:
    """What it compared of the architectures whose tiny checkpoint it wrote for the run."""
    rows = []
    for path in sorted(RESULTS.glob("oracle-*.json")):
        run = json.loads(path.read_text())
        if isinstance(run, dict) and "architecture" in run:
            wrong = run["rows_mismatched"] + run["drafts_mismatched"]
            counts = [f"{run[key]:,}" for key in ("schedules", "rows_checked", "drafts_checked")]
            where = ", ".join(filter(None, [run["runner"].upper(), gpu_of(run)]))
            cells = [f"`{run['architecture']}`", str(run["modules"]), where, run["dtype"]]
            rows.append([*cells, *counts, str(wrong)])
    return table(["architecture", "modules", "runner", "dtype", "schedules", "rows", "drafts", "wrong"], rows)


def single_modules() -> str:
    """Of models with one module, what a step costs by both proposers on V1."""
    rows = []
    for path in sorted(RESULTS.glob("compare-*.json")):
        found = record(path.stem)
        modes = found["modes"]
        if modes.keys() != {"upstream", "ours"}:
            continue
        is_eager = found["settings"]["engine"].get("enforce_eager", False)
        label = f"`{found['settings']['model']}`" + ("" if is_eager else ", compiled")
        for batch in map(str, found["settings"]["batches"]):
            steps = [modes[mode]["step_ms"][batch] for mode in ("upstream", "ours")]
            lengths = (show(modes[mode]["acceptance_length"], 2) for mode in ("upstream", "ours"))
            ratio = show_ratio(steps[1]["median"] / steps[0]["median"], more_is_better=False)
            rows.append([label, batch, *map(show_quartiles, steps), ratio, *lengths])
    head = ["step, ms, vLLM's", "this package", "ratio", "acceptance length, vLLM's", "this package"]
    return table(["architecture", "batch", *head], rows)


TABLES: dict[str, Callable[[], str]] = {
    "oracle": oracle,
    "oracle-says": oracle_says,
    "architectures": architectures,
    "single-modules": single_modules,
}
