"""Medians with their spread, and how fast the host was meanwhile."""

import time
from collections.abc import Iterable, Sequence

import numpy as np


def quartiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """`median`, `q1` and `q3`, rounded to so many digits; NaN for no values."""
    q1, median, q3 = np.percentile(values, [25, 50, 75]) if len(values) else (float("nan"),) * 3
    return {"median": round(float(median), digits), "q1": round(float(q1), digits), "q3": round(float(q3), digits)}


def ratios_in_pairs(pairs: Iterable[tuple[float, float]], digits: int = 3) -> dict[str, float]:
    """`quartiles` of the first of each pair over the second.

    By turns a pair's runs come right after one another, so what slows the machine slows both.
    """
    return quartiles([mine / other for mine, other in pairs], digits)


def show_quartiles(spread: dict[str, float], digits: int = 2) -> str:
    """`median [q1, q3]` of what `quartiles` returned."""
    return f"{spread['median']:.{digits}f} [{spread['q1']:.{digits}f}, {spread['q3']:.{digits}f}]"


def yardstick_ms() -> float:
    """How long this thread needs for a fixed piece of Python, about 10 ms of it on a quiet core.

    Modes run one after the other, on machines that others use: where it differs between two of them, so does what they
    were measured on.
    """
    before = time.perf_counter()
    total = 0
    for i in range(200_000):
        total += i * i % 7
    return (time.perf_counter() - before) * 1e3
