"""The records in bench/results, and how their figures are shown."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent.parent / "bench" / "results"


@cache
def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def show_ratio(value: float | None, more_is_better: bool = True) -> str:
    """In bold where this package is the worse one."""
    shown = show(value, 2)
    worse = value is not None and (float(shown) < 1 if more_is_better else float(shown) > 1)
    return f"**{shown}**" if worse else shown


def span(values: Iterable[float], digits: int = 2) -> str:
    """`0.83 to 0.85`, or the one figure where both are the same."""
    values = list(values)
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def sentences(text: str, bullet: str = "") -> str:
    """The text in lines as long as a page's."""
    return textwrap.fill(" ".join(text.split()), 120, initial_indent=bullet, subsequent_indent=" " * len(bullet))


def below_one(ratios: Iterable[float]) -> int:
    """How many are, as they are shown."""
    return sum(float(f"{ratio:.2f}") < 1 for ratio in ratios)


def table_of_records() -> str:
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        environment = environment_of(json.loads(path.read_text()))
        if environment is not None:
            cells = (environment.get(key) for key in ("device", "vllm", "commit"))
            rows.append([f"`{path.name}`", environment["date"][:10], *(cell or "-" for cell in cells)])
    return table(["record", "date", "device", "vLLM", "commit"], rows)


def environment_of(found: Any) -> dict[str, Any] | None:
    """Where and when it was measured; None for the oracle's, which say nothing of speed."""
    if isinstance(found, list) or "schedules" in found:
        return None
    if "environment" in found:
        return dict(found["environment"])
    return dict(next(iter(found["modes"].values()))["environment"]) if "modes" in found else dict(found)
