"""What a drafting pass costs: its time against batch, number of drafts, KV cache groups, modules and prompt rows."""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.arguments import add_json_argument, numbers
from bench.environment import describe_environment, write_record
from bench.plots import check_plot, make_figure, save
from bench.processes import run_mode
from bench.shapes import TinyConfig
from bench.spread import show_quartiles
from bench.tables import markdown

SCHEMA = "vllm-mtp-proposers/cost/1"

# By modules and KV cache groups of the draft, the attention of the target's layers and of the modules (F: full, S:
# sliding). vLLM puts layers of one kind into groups of one size, so the target's layers have a say in it.
LAYERS = {
    (1, 1): ("FFFFFF", "F"),
    (2, 1): ("FFFFFF", "FF"),
    (2, 2): ("FSSFSS", "FS"),
    (3, 1): ("FFFFFF", "FFF"),
    (3, 2): ("FSSFSS", "FFS"),
    (3, 3): ("FSSFSS", "FSS"),
}
# Every module makes one draft; and in these, fewer and more.
MORE_DRAFTS = {(1, 1): (3,), (3, 3): (1, 2, 6)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modules", type=numbers, default=[1, 2, 3], help="numbers of modules, of 1 to 3")
    parser.add_argument("--groups", type=numbers, default=[1, 2, 3], help="numbers of KV cache groups, up to modules")
    parser.add_argument("--k", type=numbers, help="num_speculative_tokens (default: as many as modules, and some more)")
    parser.add_argument("--batch", type=numbers, default=[1, 2, 4, 8, 16], help="batch sizes")
    parser.add_argument("--prompt-rows", type=numbers, default=[32, 128, 512], help="prompts of a pass of their own")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="prompts of the batches")
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3, help="repetitions after the warm-up")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--engine", type=json.loads, default={"enforce_eager": True}, help="engine arguments, as a JSON object"
    )
    add_json_argument(parser)
    parser.add_argument("--plot", type=Path, help="SVG or PNG file for the curves")


def run(args: argparse.Namespace) -> int:
    check_plot(args.plot)
    result = measure(args)
    print(format_tables(result))
    write_record(result, args.json)
    if args.plot:
        draw(result["points"], args.plot)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every draft in a process of its own and returns the record that `--json` writes.

    Raises:
        ValueError: nothing is left to measure.
        RuntimeError: a process failed, or the engine made other KV cache groups than those asked for.
    """
    drafts = list(choose_drafts(args))
    if not drafts:
        raise ValueError(
            f"There is no draft of {args.modules} modules in {args.groups} groups with K of {args.k}: modules and "
            f"groups are {', '.join(map(str, LAYERS))}, and K is a multiple of the modules, or less than them."
        )
    # Both kinds of layer have equally many heads, so that groups are all that differs.
    base = TinyConfig(num_sliding_heads=TinyConfig.num_full_heads)
    settings = {
        "batches": args.batch,
        "prompt_rows": args.prompt_rows,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "runs": args.runs,
        "dtype": args.dtype,
        "engine": args.engine,
        "vocab_size": base.vocab_size,
    }
    points = []
    for modules, groups, k in drafts:
        target_layers, module_layers = LAYERS[modules, groups]
        config = replace(base, target_layers=target_layers, module_layers=module_layers).to_hf()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            name = f"{modules} modules, {groups} groups, K = {k}"
            raw = run_mode({**settings, "model": folder, "k": k, "mode": name}, "bench.workers.cost")
        if raw["groups"] != groups:
            raise RuntimeError(
                f"The draft of {modules} modules has {raw['groups']} KV cache groups and was to have {groups}: this "
                "vLLM groups layers in another way, so LAYERS must be written anew."
            )
        points += [{"modules": modules, "groups": groups, "k": k, **point} for point in raw["points"]]
    return {
        "schema": SCHEMA,
        "environment": describe_environment(),
        "settings": settings | {"model": asdict(base)},
        "proposer": raw["proposer"],
        "points": points,
    }


def choose_drafts(args: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """Yields the number of modules, of KV cache groups and of drafts (K) of each engine that is to be measured."""
    for modules, groups in LAYERS:
        if modules in args.modules and groups in args.groups:
            usual = (modules, *MORE_DRAFTS.get((modules, groups), ()))
            possible = (k for k in args.k or () if k <= modules or k % modules == 0)
            yield from ((modules, groups, k) for k in sorted(usual if args.k is None else possible))


def format_tables(result: dict[str, Any]) -> str:
    """Two tables in Markdown: decode passes by batch, and passes over a prompt by its rows; medians and quartiles."""
    return "\n\n".join(
        _format_table(result["points"], kind, size, label)
        for kind, size, label in (("decode", "batch", "batch {}"), ("prompt", "rows", "{} rows"))
        if any(point["kind"] == kind for point in result["points"])
    )


def _format_table(points: list[dict[str, Any]], kind: str, size: str, label: str) -> str:
    points = [point for point in points if point["kind"] == kind]
    sizes = sorted({point[size] for point in points})
    heads = ["modules", "groups", "K", "forwards", *(["rows a request"] if kind == "decode" else [])]
    rows = [[*heads, *(f"ms, {label.format(n)}" for n in sizes)]]
    for draft in sorted({_draft_of(point) for point in points}):
        of_draft = {point[size]: point for point in points if _draft_of(point) == draft}
        some = next(iter(of_draft.values()))
        row = [*map(str, draft), str(some["forwards"])]
        row += [f"{some['rows'] / some['batch']:g}"] if kind == "decode" else []
        rows.append(row + [show_quartiles(of_draft[n]["ms"]) if n in of_draft else "-" for n in sizes])
    return markdown(rows)


def _draft_of(point: dict[str, Any]) -> tuple[int, int, int]:
    return point["modules"], point["groups"], point["k"]


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Pass time against batch by modules, by groups and by drafts, and against the rows of a prompt."""
    modules, groups = max((point["modules"], point["groups"]) for point in points)
    usual = [point for point in points if point["k"] == point["modules"]]
    in_one_group = [point for point in usual if point["groups"] == 1]
    all_modules = [point for point in usual if point["modules"] == modules]
    any_k = [point for point in points if _draft_of(point)[:2] == (modules, groups)]
    figure, axes = make_figure(2, 2, (10, 7))
    _draw_curves(axes[0, 0], "Modules, in one group", in_one_group, "decode", "batch", "modules")
    _draw_curves(axes[0, 1], f"KV cache groups of {modules} modules", all_modules, "decode", "batch", "groups")
    _draw_curves(axes[1, 0], f"Drafts a step, {modules} modules", any_k, "decode", "batch", "k")
    _draw_curves(axes[1, 1], "A prompt, in one group", in_one_group, "prompt", "rows", "modules")
    save(figure, path)


def _draw_curves(axes: Any, title: str, points: list[dict[str, Any]], kind: str, size: str, curve: str) -> None:
    """Draws the points of one kind against `size`: a curve for each value of `curve`, in a band of its quartiles."""
    points = sorted((point for point in points if point["kind"] == kind), key=lambda point: point[size])
    for value in sorted({point[curve] for point in points}):
        of_curve = [point for point in points if point[curve] == value]
        sizes = [point[size] for point in of_curve]
        low, middle, high = ([point["ms"][name] for point in of_curve] for name in ("q1", "median", "q3"))
        label = f"K = {value}" if curve == "k" else f"{value} {curve if value > 1 else curve[:-1]}"
        (line,) = axes.plot(sizes, middle, marker="o", label=label)
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(title=title, xlabel=size, ylabel="ms a pass", ylim=(0, None), xscale="log")
    ticks = sorted({point[size] for point in points})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    if points:
        axes.legend(frameon=False)
