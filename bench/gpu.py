"""Step time, throughput and GPU time of every drafter on a model's shape with dummy weights, on CUDA."""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from bench.arguments import (
    add_draft_vocabulary_argument,
    add_engine_argument,
    add_json_argument,
    add_speculative_argument,
    numbers,
    parse_modes,
)
from bench.environment import describe_environment, write_record
from bench.large_shapes import NUM_EXPERTS, SHAPES, TOP_K, Shape, add_shape_arguments
from bench.plots import Bars, check_plot, make_figure, save
from bench.processes import run_modes
from bench.spread import show_quartiles
from bench.tables import markdown
from bench.workers.arrivals import KINDS
from bench.workers.gpu import MODES

SCHEMA = "vllm-mtp-proposers/gpu/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    add_shape_arguments(parser)
    add_draft_vocabulary_argument(parser)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS", help="GPUs of each engine")
    parser.add_argument("--k", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--batch", type=numbers, default="1,8,32,64", help="batch sizes, separated by commas")
    parser.add_argument("--prompt-tokens", type=numbers, default="256,4096", help="prompt lengths, separated by commas")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=10, help="repetitions after the warm-up, the batch sizes by turns")
    parser.add_argument(
        "--by-turns",
        action="store_true",
        help="all modes' engines at once, as far as the device has room, and a run of each by turns",
    )
    parser.add_argument(
        "--acceptance-rates", default="0.8,0.6,0.45", help="synthetic, by position, so that step times compare"
    )
    parser.add_argument(
        "--arrivals",
        type=int,
        default=0,
        metavar="ROUNDS",
        help="in place of whole batches keep as many requests running, ROUNDS times as many in all, of half to one and "
        "a half times the output tokens, and tell steps with a prompt from those without (0: whole batches)",
    )
    add_engine_argument(parser)
    add_speculative_argument(parser)
    add_json_argument(parser, "; modes that it has already are not run again")
    parser.add_argument("--plot", type=Path, help="file for step time and GPU time by batch")


def run(args: argparse.Namespace) -> int:
    result = measure(args)
    print(format_table(result))
    if args.plot:
        draw(result, args.plot)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the modes that the record has not yet, writes it after each of them, and returns it.

    Raises:
        ValueError: there is no CUDA device, a mode doesn't exist, or the record is one of other settings.
        RuntimeError: a mode's process failed; the message ends with the end of its log.
    """
    modes = parse_modes(args.modes, MODES)
    check_plot(args.plot)
    if describe_environment()["platform"] != "cuda":
        raise ValueError("there is no CUDA device here, and this measures one. `bench compare` measures on a CPU.")
    if args.arrivals and args.tensor_parallel > 1:
        raise ValueError("--arrivals times what one process does: leave it out, or --tensor-parallel.")
    shape = SHAPES[args.shape]
    config = shape.make_config(args.layers, args.vocab_size or shape.vocab_size)
    longest = max(args.prompt_tokens) + args.output_tokens * (2 if args.arrivals else 1)
    share = shares_of_the_device(max(args.batch), longest, shape, config) if args.by_turns else {}
    settings = {
        "shape": args.shape,
        "layers": args.layers,
        "k": args.k,
        "batches": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "runs": args.runs,
        "acceptance_rates": [float(x) for x in args.acceptance_rates.split(",")],
        "by_turns": args.by_turns,
        "arrivals": args.arrivals,
        "engine": share | args.engine,
        "speculative_config": args.speculative_config,
        "vocab_size": config["vocab_size"],
        "draft_vocabulary": args.draft_vocabulary,
        "tensor_parallel": args.tensor_parallel,
    }
    measured = read_measured(args.json, settings)
    result = {"schema": SCHEMA, "settings": settings, "config": config, "modes": measured}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        missing = [mode for mode in modes if mode not in measured]
        specs = [{**settings, "model": folder, "mode": mode} for mode in missing]
        for mode, raw in zip(missing, run_modes(specs, "bench.workers.gpu", args.by_turns), strict=True):
            found = raw if args.arrivals else with_floor(raw, settings, shape, config)
            measured[mode] = found | {"environment": describe_environment()}
            write_record(result, args.json)
    return result


def read_measured(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The modes of a record that is there already. Raises `ValueError` for one of other settings."""
    if path is None or not path.exists():
        return {}
    known = json.loads(path.read_text())
    # What a record from before an option was there doesn't say.
    if {"draft_vocabulary": settings["draft_vocabulary"], "tensor_parallel": 1} | known["settings"] != settings:
        raise ValueError(f"{path} holds results of other settings: name another file, or remove it.")
    return known["modes"]


def shares_of_the_device(num_requests: int, longest: int, shape: Shape, config: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments by which engines share a device: each takes the memory that it needs, and not all there is.

    Args:
        longest: tokens of each of so many requests, at the most.
    """
    # Four times the window, for chunks of prompts, and a quarter more of all, for drafts and blocks begun.
    num_bytes = num_requests * shape.kv_bytes(config, longest, chunks=4) * 5 // 4
    return {"kv_cache_memory_bytes": num_bytes, "gpu_memory_utilization": 0.1}


def with_floor(raw: dict[str, Any], settings: dict[str, Any], shape: Shape, config: dict[str, Any]) -> dict[str, Any]:
    """Adds `floor_ms`, the time that reading a step's bytes once takes: weights that it touches, and KV cache."""
    speculates = raw["proposer"] is not None
    rows = 1 + settings["k"] if speculates else 1
    for length, figures in raw["prompts"].items():
        tokens = int(length) + settings["output_tokens"] // 2
        kv_bytes = shape.kv_bytes(config, tokens, with_modules=speculates)
        figures["floor_ms"] = {}
        figures["step_over_floor"] = {}
        for batch in map(str, settings["batches"]):
            touched = 1 - (1 - TOP_K / NUM_EXPERTS) ** (rows * int(batch))
            weights = raw["weight_bytes"]["dense"] + touched * raw["weight_bytes"]["experts"]
            floor = (weights + int(batch) * kv_bytes / settings["tensor_parallel"]) / raw["copy_bytes_per_s"] * 1e3
            figures["floor_ms"][batch] = round(floor, 4)
            figures["step_over_floor"][batch] = round(figures["step_ms"][batch]["median"] / floor, 3)
    return raw


ARRIVALS = {  # name, and whether it is a median with quartiles, by kind of step
    "step_ms": True,
    "propose_host_ms": True,
    "gpu_busy_ms": False,
    "num_steps": False,
}
FIGURES = {  # name, and whether it is a median with quartiles
    "step_ms": True,
    "decode_tokens_per_s": True,
    "output_tokens_per_s": True,
    "propose_host_ms": True,
    "gpu_busy_ms": False,
    "gpu_waiting_ms": False,
    "gpu_working_ms": True,
    "kernels_per_step": False,
    "ttft_ms": True,
    "acceptance_length": False,
    "step_over_floor": False,
    "share_of_time_with_prompt": False,
    "yardstick_ms": True,
}


def format_table(result: dict[str, Any]) -> str:
    modes, lines = result["modes"], []
    for length in map(str, result["settings"]["prompt_tokens"]):
        lines += ["", f"prompt {length}", markdown([["", "batch", *modes], *_rows_of(result, length)])]
    taken = {mode: entry["graph_memory_bytes"] for mode, entry in modes.items()}
    memory = ", ".join(f"{mode} {'-' if n is None else f'{n / 2**20:.0f} MiB'}" for mode, n in taken.items())
    proposers = ", ".join(f"{mode} {entry['proposer']} on {entry['runner']}" for mode, entry in modes.items())
    return "\n".join([*lines, "", f"graph memory: {memory}", f"drafters: {proposers}"])


def _rows_of(result: dict[str, Any], length: str) -> list[list[str]]:
    """The table's rows for prompts of one length: one for each figure and batch size that some mode has a value of."""
    batches, rows = [str(batch) for batch in result["settings"]["batches"]], []
    by_kind = ARRIVALS if result["settings"]["arrivals"] else {}
    for name, spread in by_kind.items():
        for kind, batch in product(KINDS.values(), batches):
            cells = (entry["prompts"][length][name][batch][kind] for entry in result["modes"].values())
            rows.append([f"{name}, {kind.replace('_', ' a ')}", batch, *(_show(cell, spread) for cell in cells)])
    for name, spread in FIGURES.items():
        for batch in batches if name not in by_kind else ():
            cells = (entry["prompts"][length].get(name, {}).get(batch) for entry in result["modes"].values())
            shown = [_show(cell, spread) for cell in cells]
            if any(cell != "-" for cell in shown):
                rows.append([name, batch, *shown])
    return rows


def _show(cell: Any, spread: bool) -> str:
    if cell is None or (spread and cell["median"] != cell["median"]):
        return "-"
    return show_quartiles(cell) if spread else f"{cell:.2f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Step time by batch, and the part of it in which the GPU is busy, for prompts of the first length."""
    batches = [str(batch) for batch in result["settings"]["batches"]]
    length = str(result["settings"]["prompt_tokens"][0])
    figure, ((axes,),) = make_figure(1, 1, (8, 4))
    for i, (mode, entry) in enumerate(result["modes"].items()):
        figures, bars = entry["prompts"][length], Bars(axes, i, len(result["modes"]))
        bars.draw_quartiles([figures["step_ms"][batch] for batch in batches], color=f"C{i}", alpha=0.45)
        bars.draw([figures["gpu_busy_ms"][batch] for batch in batches], color=f"C{i}", label=mode)
    axes.set(xlabel="batch", ylabel="ms", title=f"Step time (pale) and GPU time of it, prompts of {length} tokens")
    axes.set_xticks(range(len(batches)), batches)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)
