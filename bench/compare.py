"""No speculation, vLLM's own proposer and ours on the same prompts, one process each."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.corpus import held_out_prompts
from bench.environment import describe_environment, without_folder, write_record
from bench.processes import run_modes
from bench.reference.acceptance import reference_acceptance
from bench.spread import quartiles, show_quartiles
from bench.workers.compare import PROPOSERS_MODE

SCHEMA = "vllm-mtp-proposers/compare/1"


def add_arguments(parser: argparse.ArgumentParser, model: str | None = None) -> None:
    """`model` is the default of `--model`, which must be given where there is none."""
    parser.add_argument(
        "--model", required=model is None, default=model, help="folder of the checkpoint, with its MTP layers"
    )
    parser.add_argument("--modes", default="none,upstream,ours", help="of none, upstream, ours")
    parser.add_argument("--k", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--batch", default="1,4", help="batch sizes, separated by commas")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per run, from the held-out files")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3, help="repetitions of every batch size in each process")
    parser.add_argument(
        "--by-turns", action="store_true", help="all modes' engines at once, and a run of each by turns"
    )
    parser.add_argument("--dtype", default="float32", help="float32 makes lossless mean equal to the bit")
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine arguments, as a JSON object")
    parser.add_argument("--speculative-config", type=json.loads, default={}, help="further entries, as a JSON object")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--plot", type=Path, help="PNG file for acceptance and step time, side by side")


def run(args: argparse.Namespace) -> int:
    result = compare(args)
    print(format_table(result))
    write_outputs(result, args)
    return 0 if result["lossless"] in (True, None) else 1


def write_outputs(result: dict[str, Any], args: argparse.Namespace) -> None:
    write_record(result, args.json)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(result, args.plot)


def compare(args: argparse.Namespace, begins: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """Runs every mode and returns the record that `--json` writes.

    Args:
        begins: is told which part begins: "engines", "runs", where the modes run by turns, and "reference".

    Raises:
        ValueError: a mode that doesn't exist.
        RuntimeError: a mode's process failed; the message ends with the end of its log.
    """
    modes = parse_modes(args.modes, PROPOSERS_MODE)
    from transformers import AutoTokenizer

    spec = {
        "model": args.model,
        "k": args.k,
        "batches": [int(x) for x in args.batch.split(",")],
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "runs": args.runs,
        "dtype": args.dtype,
        "engine": args.engine,
        "speculative_config": args.speculative_config,
        "prompts": held_out_prompts(AutoTokenizer.from_pretrained(args.model), args.prompts, args.prompt_tokens),
    }
    architecture = json.loads(Path(args.model, "config.json").read_text()).get("architectures", [None])[0]
    settings = {key: value for key, value in spec.items() if key != "prompts"}
    settings |= {"model": without_folder(args.model), "num_prompts": args.prompts, "by_turns": args.by_turns}
    specs = [{**spec, "mode": mode} for mode in modes]
    begins("engines")
    results = run_modes(specs, by_turns=args.by_turns, when_up=lambda: begins("runs"))
    raw = dict(zip(modes, results, strict=True))
    begins("reference")
    hashes = {mode: raw[mode]["output_sha256"] for mode in modes}
    entries = {mode: summarise(raw[mode], spec["batches"]) for mode in modes}
    lengths: dict[str, float] = {}  # modes that gave the same tokens have the same reference
    for mode, entry in entries.items():
        if mode != "none" and architecture == "Step3p5ForCausalLM":
            if hashes[mode] not in lengths:
                print(f"{mode}: computing what exact drafts would reach", file=sys.stderr, flush=True)
                streams = list(zip(spec["prompts"], raw[mode]["token_ids"], strict=True))
                reference = reference_acceptance(Path(args.model), streams, args.k)
                lengths[hashes[mode]] = reference["acceptance_length"]
            length = lengths[hashes[mode]]
            entry["reference_acceptance_length"] = round(length, 4)
            entry["acceptance_vs_reference"] = round(entry["acceptance_length"] / length, 4)
    return {
        "schema": SCHEMA,
        "environment": describe_environment(),
        "settings": settings,
        "modes": entries,
        # Without a run of `none` there is nothing to be equal to.
        "lossless": len(set(hashes.values())) == 1 if "none" in hashes else None,
        "text": raw[modes[-1]]["text"],
    }


def parse_modes(text: str, known: Iterable[str]) -> list[str]:
    """Raises `ValueError` for a mode that doesn't exist."""
    modes = text.split(",")
    if unknown := set(modes) - set(known):
        raise ValueError(f"--modes has {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    return modes


def summarise(raw: dict[str, Any], batches: list[int]) -> dict[str, Any]:
    """One mode's entry: figures by batch size, acceptance over all runs."""
    by_batch = {batch: [run for run in raw["runs"] if run["batch"] == batch] for batch in batches}
    drafts, accepted = raw["num_drafts"], raw["num_accepted_per_position"]
    reached = [drafts, *accepted[:-1]]
    return {
        "runner": raw["runner"],
        "proposer": raw["proposer"],
        "output_tokens_per_s": {
            str(batch): quartiles([run["output_tokens"] / run["seconds"] for run in runs], 1)
            for batch, runs in by_batch.items()
        },
        "step_ms": {
            str(batch): quartiles([ms for run in runs for ms in run["step_ms"]]) for batch, runs in by_batch.items()
        },
        "yardstick_ms": quartiles([ms for run in raw["runs"] for ms in run["yardstick_ms"]]),
        "acceptance_length": round(1 + sum(accepted) / drafts, 4) if drafts else 1.0,
        # Position i counts if all before it were accepted too.
        "acceptance_per_position": [round(count / drafts, 4) for count in accepted] if drafts else [],
        "acceptance_conditional": [
            round(count / before, 4) if before else None for count, before in zip(accepted, reached, strict=True)
        ]
        if drafts
        else [],
        "output_sha256": raw["output_sha256"],
        "runs": [run | {name: quartiles(run[name]) for name in ("step_ms", "yardstick_ms")} for run in raw["runs"]],
    }


def format_table(result: dict[str, Any]) -> str:
    modes = result["modes"]
    rows = [["", *modes]]
    rows.append(["proposer", *(entry["proposer"] or "-" for entry in modes.values())])
    for batch in map(str, result["settings"]["batches"]):
        speeds = {mode: entry["output_tokens_per_s"][batch]["median"] for mode, entry in modes.items()}
        base = speeds.get("none")
        rows.append(
            [
                f"tokens/s, batch {batch}",
                *(f"{speed:.0f}" + (f"  ({speed / base:.2f}x)" if base else "") for speed in speeds.values()),
            ]
        )
        rows.append([f"step ms, batch {batch}", *(show_quartiles(entry["step_ms"][batch]) for entry in modes.values())])
    rows.append(["the host: yardstick ms", *(show_quartiles(entry["yardstick_ms"]) for entry in modes.values())])
    rows.append(["acceptance length", *(f"{entry['acceptance_length']:.3f}" for entry in modes.values())])
    rows.append(
        [
            "accepted by position",
            *(" ".join(f"{x:.3f}" for x in entry["acceptance_per_position"]) or "-" for entry in modes.values()),
        ]
    )
    if any("acceptance_vs_reference" in entry for entry in modes.values()):
        ratios = (entry.get("acceptance_vs_reference") for entry in modes.values())
        rows.append(["of exact drafts'", *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios)])
    return "\n".join([table(rows), f"lossless: {json.dumps(result['lossless'])}"])


def table(rows: list[list[str]]) -> str:
    """Columns as wide as they need to be, and a rule below the first row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(max(lines, key=len)), *lines[1:]])


def draw(result: dict[str, Any], path: Path) -> None:
    """Acceptance per position and step time of each mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    batches = [str(batch) for batch in result["settings"]["batches"]]
    colours = dict(zip(result["modes"], ("#888888", "#d98c3f", "#2f6fb0"), strict=False))
    width = 0.8 / len(result["modes"])
    for i, (mode, entry) in enumerate(result["modes"].items()):
        accepted = entry["acceptance_per_position"]
        if accepted:
            label = f"{mode}, length {entry['acceptance_length']:.2f}"
            left.plot(range(1, len(accepted) + 1), accepted, marker="o", color=colours[mode], label=label)
        places = [j + (i - (len(result["modes"]) - 1) / 2) * width for j in range(len(batches))]
        steps = [entry["step_ms"][batch] for batch in batches]
        medians = [s["median"] for s in steps]
        spread = [[s["median"] - s["q1"] for s in steps], [s["q3"] - s["median"] for s in steps]]
        right.bar(places, medians, width, yerr=spread, capsize=3, color=colours[mode], label=mode)
    left.set(xlabel="draft position", ylabel="share accepted", ylim=(0, 1), title="Acceptance")
    left.set_xticks(range(1, result["settings"]["k"] + 1))
    right.set(xlabel="batch", ylabel="ms", title="Step time, median and quartiles")
    right.set_xticks(range(len(batches)), batches)
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
