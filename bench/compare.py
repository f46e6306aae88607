"""No speculation, vLLM's own proposer and ours on the same prompts, one process each."""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.arguments import (
    add_architecture_argument,
    add_draft_vocabulary_argument,
    add_engine_argument,
    add_json_argument,
    add_prompt_arguments,
    add_speculative_argument,
    numbers,
    parse_modes,
)
from bench.corpus import has_tokenizer, held_out_prompts, read_sources
from bench.environment import describe_environment, without_folder, write_record
from bench.plots import Bars, check_plot, make_figure, save
from bench.processes import run_modes
from bench.reference import has_reference
from bench.reference.acceptance import ExactLengths
from bench.spread import quartiles, show_quartiles
from bench.tables import table
from bench.workers.compare import CHEAP, MODES
from proposers import draft_vocabulary

SCHEMA = "vllm-mtp-proposers/compare/1"


def add_arguments(parser: argparse.ArgumentParser, model: str | None = None) -> None:
    """`model` is the default of `--model`, which must be given where there is none."""
    parser.add_argument("--model", default=model, help="folder of the checkpoint, with its MTP layers")
    if model is None:
        add_architecture_argument(parser)
    else:
        parser.set_defaults(architecture=None)
    parser.add_argument("--modes", default="none,upstream,ours", help=f"of {', '.join(MODES)}")
    parser.add_argument("--k", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--batch", type=numbers, default="1,4", help="batch sizes, separated by commas")
    add_prompt_arguments(parser)
    parser.add_argument("--runs", type=int, default=3, help="repetitions of every batch size in each process")
    parser.add_argument(
        "--by-turns", action="store_true", help="all modes' engines at once, and a run of each by turns"
    )
    parser.add_argument("--dtype", default="float32", help="float32 makes lossless mean equal to the bit")
    add_draft_vocabulary_argument(parser)
    add_engine_argument(parser)
    add_speculative_argument(parser)
    add_json_argument(parser)
    parser.add_argument("--plot", type=Path, help="PNG file for acceptance and step time, side by side")


def run(args: argparse.Namespace) -> int:
    result = compare(args)
    print(format_table(result))
    write_outputs(result, args)
    return 0 if result["lossless"] in (True, None) else 1


def write_outputs(result: dict[str, Any], args: argparse.Namespace) -> None:
    write_record(result, args.json)
    if args.plot:
        draw(result, args.plot)


def compare(args: argparse.Namespace, begins: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """Runs every mode and returns the record that `--json` writes.

    Args:
        begins: is told which part begins: "engines", "runs", where the modes run by turns, and "reference".

    Raises:
        ValueError: a mode that doesn't exist, or a plot that can't be drawn.
        RuntimeError: a mode's process failed; the message ends with the end of its log.
    """
    modes = parse_modes(args.modes, MODES)
    check_plot(args.plot)
    if args.architecture is None:
        if args.model is None:
            raise ValueError("give --model, a checkpoint, or --architecture, of which a tiny one is written.")
        return _compare(args, args.model, modes, begins)
    from bench.oracle import the_model

    with the_model(args) as folder:
        return _compare(args, str(folder), modes, begins)


def _compare(args: argparse.Namespace, model: str, modes: list[str], begins: Callable[[str], None]) -> dict[str, Any]:
    settings = {
        "model": args.architecture or without_folder(model),
        "k": args.k,
        "batches": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "runs": args.runs,
        "dtype": args.dtype,
        "engine": args.engine,
        "speculative_config": args.speculative_config,
        "num_prompts": args.prompts,
        "by_turns": args.by_turns,
    }
    prompts, tokenizer = _prompts(model, args)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "vocabulary.json")
        if any("draft_vocabulary" in CHEAP.get(mode, ()) for mode in modes):
            settings["draft_vocabulary"] = _write_vocabulary(file, tokenizer, model, args.draft_vocabulary)
        given = {**settings, "model": model, "prompts": prompts, "draft_vocabulary_file": str(file)}
        given["has_tokenizer"] = tokenizer is not None
        specs = [{**given, "mode": mode} for mode in modes]
        begins("engines")
        results = run_modes(specs, by_turns=args.by_turns, when_up=lambda: begins("runs"))
        raw = dict(zip(modes, results, strict=True))
    begins("reference")
    hashes = {mode: raw[mode]["output_sha256"] for mode in modes}
    entries = {mode: summarise(raw[mode], args.batch) for mode in modes}
    if has_reference(Path(model)):
        drafting = {mode: entry for mode, entry in entries.items() if mode != "none"}
        add_reference(drafting, raw, prompts, Path(model), args.k)
    return {
        "schema": SCHEMA,
        "environment": describe_environment(),
        "settings": settings,
        "modes": entries,
        # Without a run of `none` there is nothing to be equal to.
        "lossless": len(set(hashes.values())) == 1 if "none" in hashes else None,
        "text": raw[modes[-1]]["text"],
    }


def _prompts(model: str, args: argparse.Namespace) -> tuple[list[list[int]], Any]:
    """Held-out text, and the checkpoint's tokenizer, which some tiny ones have not."""
    if args.architecture is None or has_tokenizer(Path(model)):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        return held_out_prompts(tokenizer, args.prompts, args.prompt_tokens), tokenizer
    from bench.oracle.driver import read_texts

    texts, _ = read_texts(Path(model), num_tokens=args.prompts * 2 * args.prompt_tokens + 60_000)
    stream = [token for text in texts for token in text]
    starts = range(0, args.prompts * args.prompt_tokens, args.prompt_tokens)
    return [stream[start : start + args.prompt_tokens] for start in starts], None


def _write_vocabulary(file: Path, tokenizer: Any, model: str, wanted: int) -> dict[str, Any]:
    """Writes a list that is counted in the text which the prompts are not from; returns its size and coverage.

    Raises:
        ValueError: the checkpoint has no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("modes with a draft vocabulary need a checkpoint that has a tokenizer.")
    config = json.loads(Path(model, "config.json").read_text())
    pieces = (
        tokenizer.encode(text, add_special_tokens=False, verbose=False) for _, text in read_sources(held_out=False)
    )
    vocab_size = config.get("text_config", config)["vocab_size"]
    size = wanted if wanted < vocab_size else vocab_size * 3 // 4
    found = draft_vocabulary.make(pieces, size, tokenizer, config)
    file.write_text(json.dumps(found))
    return {"size": size, "coverage": round(found["coverage"], 4)}


def add_reference(entries: dict[str, Any], raw: dict[str, Any], prompts: list[list[int]], model: Path, k: int) -> None:
    """Adds, to every mode that drafts, what exact drafts would have reached on the tokens that it gave."""
    lengths = ExactLengths(model, k)
    for mode, entry in entries.items():
        exact = lengths.of(mode, list(zip(prompts, raw[mode]["token_ids"], strict=True)))
        entry["reference_acceptance_length"] = round(exact, 4)
        entry["acceptance_vs_reference"] = round(entry["acceptance_length"] / exact, 4)


def summarise(raw: dict[str, Any], batches: list[int]) -> dict[str, Any]:
    """One mode's entry of the record, from its worker's result: figures by batch size, acceptance over all runs."""
    by_batch = {batch: [run for run in raw["runs"] if run["batch"] == batch] for batch in batches}
    return {
        "runner": raw["runner"],
        "proposer": raw["proposer"],
        "output_tokens_per_s": {
            str(batch): quartiles([run["output_tokens"] / run["seconds"] for run in runs], 1)
            for batch, runs in by_batch.items()
        },
        **{
            name: {str(batch): quartiles([ms for run in runs for ms in run[name]]) for batch, runs in by_batch.items()}
            for name in ("step_ms", "ttft_ms")
        },
        "yardstick_ms": quartiles([ms for run in raw["runs"] for ms in run["yardstick_ms"]]),
        **summarise_acceptance(raw["num_drafts"], raw["num_accepted_per_position"]),
        "output_sha256": raw["output_sha256"],
        "runs": [
            run | {name: quartiles(run[name]) for name in ("step_ms", "ttft_ms", "yardstick_ms")} for run in raw["runs"]
        ],
    }


def summarise_acceptance(drafts: int, accepted: list[int]) -> dict[str, Any]:
    """Shares of accepted drafts, of so many draft passes that accepted so many drafts at each position."""
    if not drafts:
        return {"acceptance_length": 1.0, "acceptance_per_position": [], "acceptance_conditional": []}
    reached = [drafts, *accepted[:-1]]  # a position counts if all before it were accepted too
    return {
        "acceptance_length": round(1 + sum(accepted) / drafts, 4),
        "acceptance_per_position": [round(count / drafts, 4) for count in accepted],
        "acceptance_conditional": [
            round(count / before, 4) if before else None for count, before in zip(accepted, reached, strict=True)
        ],
    }


def format_table(result: dict[str, Any]) -> str:
    modes = result["modes"]
    rows = [["", *modes], ["proposer", *(entry["proposer"] or "-" for entry in modes.values())]]
    for batch in map(str, result["settings"]["batches"]):
        rows.append([f"tokens/s, batch {batch}", *format_speeds(modes, batch)])
        for name in ("step_ms", "ttft_ms"):
            cells = (show_quartiles(entry[name][batch]) for entry in modes.values())
            rows.append([f"{name.replace('_', ' ')}, batch {batch}", *cells])
    rows.append(["the host: yardstick ms", *(show_quartiles(entry["yardstick_ms"]) for entry in modes.values())])
    rows.append(["acceptance length", *(f"{entry['acceptance_length']:.3f}" for entry in modes.values())])
    by_position = (" ".join(f"{x:.3f}" for x in entry["acceptance_per_position"]) for entry in modes.values())
    rows.append(["accepted by position", *(shares or "-" for shares in by_position)])
    if any("acceptance_vs_reference" in entry for entry in modes.values()):
        ratios = (entry.get("acceptance_vs_reference") for entry in modes.values())
        rows.append(["of exact drafts'", *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios)])
    return "\n".join([table(rows), f"lossless: {json.dumps(result['lossless'])}"])


def format_speeds(modes: dict[str, Any], batch: str) -> list[str]:
    """A cell for each mode: tokens per second and, where `none` has run, the ratio to its own."""
    speeds = {mode: entry["output_tokens_per_s"][batch]["median"] for mode, entry in modes.items()}
    base = speeds.get("none")
    return [f"{speed:.0f}" + (f"  ({speed / base:.2f}x)" if base else "") for speed in speeds.values()]


COLOURS = ("#888888", "#d98c3f", "#2f6fb0")


def draw(result: dict[str, Any], path: Path) -> None:
    """Acceptance per position and step time of each mode."""
    figure, ((left, right),) = make_figure(1, 2, (10, 4))
    modes, batches = result["modes"], [str(batch) for batch in result["settings"]["batches"]]
    for i, (mode, entry) in enumerate(modes.items()):
        if accepted := entry["acceptance_per_position"]:
            label = f"{mode}, length {entry['acceptance_length']:.2f}"
            left.plot(range(1, len(accepted) + 1), accepted, marker="o", color=COLOURS[i], label=label)
        steps = [entry["step_ms"][batch] for batch in batches]
        Bars(right, i, len(modes)).draw_quartiles(steps, color=COLOURS[i], label=mode)
    left.set(xlabel="draft position", ylabel="share accepted", ylim=(0, 1), title="Acceptance")
    left.set_xticks(range(1, result["settings"]["k"] + 1))
    right.set(xlabel="batch", ylabel="ms", title="Step time, median and quartiles")
    right.set_xticks(range(len(batches)), batches)
    for axes in (left, right):
        axes.legend(frameon=False)
    save(figure, path)
