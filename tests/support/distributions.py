"""Whether two sets of samples come from one distribution."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence


def chi_square(left: Sequence[Hashable], right: Sequence[Hashable], min_expected: float = 5.0) -> tuple[float, int]:
    """Pearson's two-sample statistic and its degrees of freedom; categories too rare to judge count as one."""
    counts = Counter(left), Counter(right)
    total = len(left) + len(right)
    smaller = min(len(left), len(right))
    table: dict[Hashable, list[int]] = {}
    for category in counts[0].keys() | counts[1].keys():
        pair = [count[category] for count in counts]
        key = ("category", category) if sum(pair) * smaller / total >= min_expected else "rare"
        row = table.setdefault(key, [0, 0])
        row[0] += pair[0]
        row[1] += pair[1]
    statistic = 0.0
    for row in table.values():
        for seen, size in zip(row, (len(left), len(right)), strict=True):
            expected = sum(row) * size / total
            statistic += (seen - expected) ** 2 / expected
    return statistic, len(table) - 1


def chi_square_bound(degrees: int, z: float = 3.9) -> float:
    """What the statistic exceeds once in 20000 times by chance (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


def differ(left: Sequence[Hashable], right: Sequence[Hashable]) -> bool:
    """Whether chance can't explain the difference."""
    statistic, degrees = chi_square(left, right)
    return statistic > chi_square_bound(degrees)
