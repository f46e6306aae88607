"""Three minutes with the tiny model: no speculation, vLLM's own proposer and this package, by turns: `make demo`."""

import argparse
import io
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, TextIO

from bench import compare
from bench.environment import write_record
from bench.spread import quartiles, ratios_in_pairs
from bench.tables import table

TINY_MODEL = Path("assets/tiny-step3p5")

NAMES = {"none": "no speculation", "upstream": "vLLM's proposer", "ours": "this package"}
COLOURS = {"none": "#9a9a9a", "upstream": "#d98c3f", "ours": "#2f6fb0"}

# What is said before each part begins; the seconds are those of two quiet cores.
PARTS = {
    "engines": "1 of 3, about 20 seconds: three engines start side by side",
    "runs": "2 of 3, about 20 seconds: each engine generates in its turn, so that a busy machine is busy for all",
    "reference": "3 of 3, a few seconds: a dense reference computes how many exact drafts would have been accepted",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    compare.add_arguments(parser, model=str(TINY_MODEL))
    parser.set_defaults(
        json=Path("results/demo.json"),
        plot=Path("results/demo.png"),
        prompts=4,
        output_tokens=64,
        runs=5,
        by_turns=True,
        engine={"enforce_eager": True},  # compiling would take longer than all the rest
    )


def run(args: argparse.Namespace) -> int:
    if (modes := set(args.modes.split(","))) != NAMES.keys():
        raise ValueError(f"--modes has {', '.join(sorted(modes))}; the demo compares {', '.join(NAMES)}.")
    with redirect_stderr(Dots(sys.stderr)):
        result = compare.compare(args, begins=say)
    print(f"\n\n{format_table(result)}\n")
    print(f"lossless: {str(result['lossless']).lower()} (whether all three gave the same tokens)")
    print(f"{result['modes']['ours']['proposer']} drafted for this package\n\n{conclude(result)}\n")
    write_record(result, args.json)
    draw(result, args.plot)
    print(f"The plot is {args.plot}, the record {args.json}. README.md says how to serve a model of your own.")
    return 0 if result["lossless"] else 1


def say(part: str) -> None:
    print(f"\n{PARTS[part]} ", end="", flush=True)


class Dots(io.TextIOBase):
    """A dot for each line, in place of what it says."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write("." * text.count("\n"))
        self._stream.flush()
        return len(text)


def format_table(result: dict[str, Any]) -> str:
    modes = result["modes"]
    rows = [["", *NAMES.values()]]
    for batch in batches(result):
        median = {mode: modes[mode]["output_tokens_per_s"][batch]["median"] for mode in NAMES}
        cells = (f"{speed:.0f} ({speed / median['none']:.2f}x)" for speed in median.values())
        rows.append([f"tokens/s, {requests(batch)}", *cells])
    rows.append(["tokens a step", *(f"{modes[mode]['acceptance_length']:.2f}" for mode in NAMES)])
    shares = (modes[mode].get("acceptance_vs_reference") for mode in NAMES)
    rows.append(["of what exact drafts reach", *("-" if share is None else f"{share:.2f}" for share in shares)])
    return table(rows)


def conclude(result: dict[str, Any]) -> str:
    """One sentence: how fast this package was beside the others, and which of the three to take."""
    found = []
    best: dict[str, list[str]] = {}
    for batch in batches(result):
        theirs, none = (paired(result, "ours", mode, batch)["median"] for mode in ("upstream", "none"))
        found.append(f"{theirs:.2f} and {none:.2f} times with {requests(batch)}")
        names = [NAMES[mode] for mode in fastest(result, batch)]
        best.setdefault("any of the three" if len(names) == len(NAMES) else " or ".join(names), []).append(
            requests(batch)
        )
    choices = " and ".join(f"{names} with {' and '.join(sizes)}" for names, sizes in best.items())
    return (
        "To conclude: the tokens/s of this package over those of vLLM's proposer and of no speculation were "
        f"{', and '.join(found)}, so for a model of this size on this machine take {choices}."
    )


def fastest(result: dict[str, Any], batch: str) -> list[str]:
    """The mode with the most tokens/s, and those that the spread doesn't tell apart from it."""
    first = max(NAMES, key=lambda mode: quartiles(speeds(result, mode, batch))["median"])
    return [first, *(mode for mode in NAMES if mode != first and paired(result, first, mode, batch)["q1"] <= 1)]


def paired(result: dict[str, Any], mode: str, other: str, batch: str) -> dict[str, float]:
    """Tokens/s of one mode over those of another, turn by turn."""
    return ratios_in_pairs(zip(speeds(result, mode, batch), speeds(result, other, batch), strict=True))


def speeds(result: dict[str, Any], mode: str, batch: str) -> list[float]:
    runs = result["modes"][mode]["runs"]
    return [run["output_tokens"] / run["seconds"] for run in runs if str(run["batch"]) == batch]


def batches(result: dict[str, Any]) -> list[str]:
    return [str(batch) for batch in result["settings"]["batches"]]


def requests(batch: str) -> str:
    return "1 request at a time" if batch == "1" else f"{batch} requests at a time"


def draw(result: dict[str, Any], path: Path) -> None:
    """Tokens/s by batch, with quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = batches(result)
    figure, places = pyplot.subplots(
        1, len(sizes), figsize=(3.5 * len(sizes), 3.6), layout="constrained", squeeze=False
    )
    for axes, batch in zip(places[0], sizes, strict=True):
        for i, mode in enumerate(NAMES):
            found = result["modes"][mode]["output_tokens_per_s"][batch]
            spread = [[found["median"] - found["q1"]], [found["q3"] - found["median"]]]
            axes.bar(i, found["median"], 0.7, yerr=spread, capsize=4, color=COLOURS[mode])
            axes.text(i, found["median"] * 0.03, f"{found['median']:.0f}", ha="center", va="bottom", color="white")
        axes.set_xticks(range(len(NAMES)), [name.replace(" ", "\n") for name in NAMES.values()])
        axes.set_title(requests(batch), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    places[0][0].set_ylabel("tokens/s, median and quartiles")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
