"""The README's picture: tokens/s without speculation, with vLLM's drafter and with this package's."""

from dataclasses import dataclass
from pathlib import Path

from tools.tables import cpu, gpu, serving

PICTURE = "docs/throughput.svg"
COLOURS = {"no speculation": "#9a9a9a", "vLLM's drafter": "#d98c3f", "this package": "#2f6fb0"}


@dataclass(frozen=True)
class Panel:
    """One run.

    Attributes:
        speeds: output tokens/s of each of `COLOURS`, by batch.
    """

    title: str
    batches: list[str]
    speeds: list[list[float]]


def panels() -> list[Panel]:
    served = serving.speeds()
    batches = [str(batch) for batch in cpu.cpu(256)["settings"]["batches"]]
    return [
        Panel("H200, as served, prompts of 256", list(served), list(served.values())),
        Panel("H200, batches, prompts of 4096", gpu.LONG.batches, [gpu_speeds(gpu.LONG, x) for x in gpu.LONG.batches]),
        Panel("Two CPU cores, batches of 256", batches, [cpu.cpu_speeds(256, batch) for batch in batches]),
    ]


def gpu_speeds(run: gpu.Run, batch: str) -> list[float]:
    """On the V2 runner, which is vLLM's default on CUDA. Raises `KeyError` for what was not measured."""
    speeds = {mode: run.get(mode, "output_tokens_per_s", batch) for mode in ("none", "upstream-v2", "ours-v2")}
    if missing := [mode for mode, speed in speeds.items() if speed is None]:
        raise KeyError(f"{run.name} has no tokens/s of {', '.join(missing)} at batch {batch}")
    return [speed for speed in speeds.values() if speed is not None]


def label(speed: float) -> str:
    return f"{speed:,.0f}"


def draw(path: Path) -> None:
    """Bars as high as the multiple of no speculation, each with its tokens/s: of batches 1 and 64 on one scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = panels()
    # Text stays text and nothing is drawn at random or dated, so that the same records give the same file.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "picture", "font.size": 9, "font.family": "sans-serif"}
    with pyplot.rc_context(settings):
        widths = [len(panel.batches) for panel in shown]
        figure, axes = pyplot.subplots(
            1, len(shown), figsize=(10, 3.6), sharey=True, layout="constrained", width_ratios=widths
        )
        for place, panel in zip(axes, shown, strict=True):
            for i, (name, colour) in enumerate(COLOURS.items()):
                for j, speeds in enumerate(panel.speeds):
                    at, height = j + (i - 1) * 0.28, speeds[i] / speeds[0]
                    place.bar(at, height, 0.26, color=colour, label=name if j == 0 else None)
                    inside = {"ha": "center", "va": "top", "rotation": 90, "color": "white", "fontsize": 8}
                    place.text(at, height - 0.05, label(speeds[i]), **inside)
            place.axhline(1, color="#9a9a9a", linewidth=0.8, zorder=0)
            place.set_title(panel.title, fontsize=10, pad=4)
            place.set_xticks(range(len(panel.batches)), panel.batches)
            place.set_xlabel("requests at a time")
            place.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("tokens/s, over no speculation")
        names = axes[0].get_legend_handles_labels()
        figure.legend(*names, frameon=False, loc="outside upper center", ncols=len(COLOURS), fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
        pyplot.close(figure)
