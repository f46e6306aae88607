"""What the commands' plots have in common. matplotlib is imported when something is drawn: it is an extra."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def check_plot(path: Path | None) -> None:
    """To be called before anything is measured. Raises `ValueError` where a plot is asked for that can't be drawn."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install '.[bench]', or leave the plot out.")


def make_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of so many inches, which is drawn into a file and needs no display, and its axes as an array."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: Any, path: Path) -> None:
    """Writes the file, whose ending says which format; its folder is made where it is missing."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


class Bars:
    """One of `count` series of bars that stand side by side, one bar of each series per group.

    Attributes:
        width: of a bar; groups are 1 apart.
    """

    def __init__(self, axes: Any, index: int, count: int) -> None:
        self.width = 0.8 / count
        self._axes, self._offset = axes, (index - (count - 1) / 2) * self.width

    def draw(self, heights: Sequence[float], **style: Any) -> None:
        places = [group + self._offset for group in range(len(heights))]
        self._axes.bar(places, heights, self.width, **style)

    def draw_quartiles(self, spreads: Sequence[dict[str, float]], **style: Any) -> None:
        """Bars up to the medians, with whiskers at the quartiles (`bench.spread.quartiles`)."""
        below = [spread["median"] - spread["q1"] for spread in spreads]
        above = [spread["q3"] - spread["median"] for spread in spreads]
        self.draw([spread["median"] for spread in spreads], yerr=[below, above], capsize=3, **style)
