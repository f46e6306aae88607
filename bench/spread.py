"""Medians with their spread."""

from collections.abc import Sequence

import numpy as np


def quartiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median and quartiles; NaN for no values."""
    q1, median, q3 = np.percentile(values, [25, 50, 75]) if len(values) else (float("nan"),) * 3
    return {"median": round(float(median), digits), "q1": round(float(q1), digits), "q3": round(float(q3), digits)}
