"""Throughput and latency of vLLM's OpenAI server with every drafter, for so many requests at a time."""

import argparse
import gc
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
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
from bench.client import longest_output, make_requests, run_cell
from bench.environment import describe_environment, without_folder, write_record
from bench.gpu import shares_of_the_device
from bench.large_shapes import SHAPES, add_shape_arguments
from bench.servers import Server, server_command, server_environment, serving
from bench.spread import quartiles, show_quartiles
from bench.tables import markdown
from bench.workers.engine import merge_engine_arguments
from bench.workers.gpu import MODES, options_of

SCHEMA = "vllm-mtp-proposers/serve/1"
FIGURES = (  # of a turn, and shown as quartiles of all turns
    "output_tokens_per_s",
    "ttft_ms",
    "ttft_p99_ms",
    "tpot_ms",
    "tpot_p99_ms",
    "itl_ms",
    "itl_p99_ms",
    "yardstick_ms",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default="none,upstream-v2,ours-v2", help=f"of {', '.join(MODES)}")
    parser.add_argument("--model", help="folder of a checkpoint, instead of a shape with dummy weights")
    add_shape_arguments(parser)
    add_draft_vocabulary_argument(parser)
    parser.add_argument("--k", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument(
        "--acceptance-rates",
        default="0.8,0.6,0.45",
        help="of the shape: synthetic, by position; a checkpoint has its own",
    )
    parser.add_argument(
        "--concurrency", type=numbers, default="1,8,32,64", help="requests at a time, separated by commas"
    )
    parser.add_argument("--prompt-tokens", type=numbers, default="256,1024", help="prompt lengths, separated by commas")
    parser.add_argument(
        "--output-tokens", type=int, default=256, help="the mean; each request has half of it to 1.5 of it"
    )
    parser.add_argument(
        "--requests", type=int, default=4, help="in a turn, times the concurrency, but at least 8 in all"
    )
    parser.add_argument("--shared-prefix", type=float, default=0.0, help="share of each prompt that is the same in all")
    parser.add_argument("--turns", type=int, default=3, help="repetitions after the warm-up, the modes by turns")
    add_engine_argument(parser)
    add_speculative_argument(parser)
    add_json_argument(parser, ", written after each cell")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the servers, to be kept")


def run(args: argparse.Namespace) -> int:
    print(format_table(measure(args)))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all modes by turns and returns the record that `--json` writes.

    Raises:
        ValueError: arguments that can't be measured, or not on this machine.
        RuntimeError: a server failed; the message ends with the end of its log.
    """
    modes = parse_modes(args.modes, MODES)
    environment = describe_environment()
    check(args, environment["platform"])
    config = read_config(args)
    settings = {
        "model": args.model and without_folder(args.model),
        "shape": None if args.model else args.shape,
        "layers": None if args.model else args.layers,
        "vocab_size": vocab_size_of(config),
        "k": args.k,
        "concurrency": args.concurrency,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "requests": args.requests,
        "shared_prefix": args.shared_prefix,
        "turns": args.turns,
        "engine": engine_arguments(args, config, environment["platform"]),
        "speculative_config": speculative_config(args),
        "draft_vocabulary": args.draft_vocabulary,
    }
    result = {
        "schema": SCHEMA,
        "environment": environment,
        "settings": settings,
        "config": config,
        "turns_done": 0,
        "modes": {mode: {"proposer": None, "prompts": {}, "runs": []} for mode in modes},
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        _say("starting the servers")
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        with serving(commands(modes, args.model or folder, settings, Path(folder)), logs) as servers:
            for _ in turns(servers, settings, result):
                write_record(result, args.json)  # what was measured is kept if the rest is cut off
    return result


def check(args: argparse.Namespace, platform: str) -> None:
    """Raises `ValueError` for arguments that can't be measured, or not on this platform."""
    counts = {"--turns": [args.turns], "--requests": [args.requests], "--k": [args.k], "--layers": [args.layers]}
    counts |= {"--concurrency": args.concurrency, "--prompt-tokens": args.prompt_tokens}
    for option, values in counts.items():
        if min(values) < 1:
            raise ValueError(f"{option} has {min(values)}, and must be at least 1.")
    if args.output_tokens < 4:
        raise ValueError(f"--output-tokens is {args.output_tokens}; there is no time between tokens below 4.")
    if not 0 <= args.shared_prefix < 1:
        raise ValueError(f"--shared-prefix is {args.shared_prefix}, and must be at least 0 and below 1.")
    if args.model is None and platform != "cuda":
        raise ValueError("there is no CUDA device here for a shape with dummy weights: give --model a folder.")
    if args.model is not None and not Path(args.model, "config.json").is_file():
        raise ValueError(f"--model {args.model} has no config.json.")
    if args.model is not None and platform == "cuda" and "kv_cache_memory_bytes" not in args.engine:
        raise ValueError("servers that share a device need an --engine with kv_cache_memory_bytes, for each of them.")


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    if args.model is None:
        shape = SHAPES[args.shape]
        return shape.make_config(args.layers, args.vocab_size or shape.vocab_size)
    return json.loads(Path(args.model, "config.json").read_text())


def vocab_size_of(config: dict[str, Any]) -> int:
    return config.get("text_config", config)["vocab_size"]


def engine_arguments(args: argparse.Namespace, config: dict[str, Any], platform: str) -> dict[str, Any]:
    """Engine arguments of all modes. What `--engine` says goes first."""
    longest, most = max(args.prompt_tokens) + longest_output(args.output_tokens), max(args.concurrency)
    engine: dict[str, Any] = {"max_model_len": longest + args.k + 1, "max_num_seqs": most}
    if platform == "cuda":
        engine["gpu_memory_utilization"] = 0.1  # of which no more is asked than that so much is free
    if args.model is None:
        share = shares_of_the_device(most, longest, SHAPES[args.shape], config)
        engine |= {"load_format": "dummy", "skip_tokenizer_init": True, **share}
    return engine | args.engine


def speculative_config(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM's `speculative_config` of the modes that draft. Raises `ValueError` for a wrong number of rates."""
    speculative = {"method": "mtp", "num_speculative_tokens": args.k}
    if args.model is None:
        rates = [float(rate) for rate in args.acceptance_rates.split(",")]
        if len(rates) != args.k:
            raise ValueError(f"--acceptance-rates has {len(rates)} entries, and --k is {args.k}.")
        speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return speculative | args.speculative_config


def commands(
    modes: list[str], model: str, settings: dict[str, Any], folder: Path
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """For `serving`: the command and the environment of each mode.

    Args:
        folder: for a file that servers read.
    """
    drafts = {"speculative_config": settings["speculative_config"]}

    def engine(mode: str) -> dict[str, Any]:
        of_mode = options_of(mode, settings["vocab_size"], settings["draft_vocabulary"], folder)
        return merge_engine_arguments({}, of_mode | ({} if mode == "none" else drafts), settings["engine"])

    return {mode: (server_command(model, engine(mode)), server_environment(*MODES[mode])) for mode in modes}


def turns(servers: dict[str, Server], settings: dict[str, Any], result: dict[str, Any]) -> Iterator[None]:
    """Measures, and yields when the result has one cell more."""
    gc.freeze()  # nobody waits for a collection of all that has been imported
    # Thrown away: servers compile and tune what they had no reason to before.
    for _ in cells(servers, settings, 0):
        pass
    for mode, server in servers.items():
        result["modes"][mode]["proposer"] = proposer_of(server)
    for turn in range(1, settings["turns"] + 1):
        for mode, cell in cells(servers, settings, turn):
            entry = result["modes"][mode]
            entry["runs"].append({"turn": turn, **cell})
            entry["prompts"] = summarise(entry["runs"])
            yield
        result["turns_done"] = turn
        yield


def cells(servers: dict[str, Server], settings: dict[str, Any], turn: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A turn: every prompt length and concurrency, and each of these of every mode before the next.

    All modes get the same requests, and other turns other ones. In turn 0, the warm-up, those of one round.
    """
    for length in settings["prompt_tokens"]:
        for concurrency in settings["concurrency"]:
            requests = make_requests(
                max(8, settings["requests"] * concurrency) if turn else concurrency,
                length,
                settings["output_tokens"],
                settings["vocab_size"],
                settings["shared_prefix"],
                f"turn {turn}, {concurrency} at a time",
            )
            when = f"turn {turn} of {settings['turns']}" if turn else "warm-up"
            for mode, server in servers.items():
                figures = run_cell(server, requests, concurrency)
                speed = f"{figures['output_tokens_per_s']:.0f} tokens/s"
                _say(f"{mode}: prompt {length}, concurrency {concurrency}, {when}: {speed}")
                yield mode, {"prompt_tokens": length, "concurrency": concurrency, **figures}


def proposer_of(server: Server) -> str | None:
    """The class of this package that has drafted; None: vLLM's own, or nothing.

    Raises:
        RuntimeError: this package should have, and has not.
    """
    found = re.search(r"First draft by (proposers\.\w+\.\w+)", server.log)
    if found is None and MODES[server.mode][0] == "on":
        raise server.failure("doesn't draft with this package")
    return found and found[1]


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By prompt length, figure and concurrency: quartiles over the turns, and the acceptance length of all of them."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run_ in runs:
        cells[str(run_["prompt_tokens"]), str(run_["concurrency"])].append(run_)
    prompts: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for (length, concurrency), done in cells.items():
        for name in FIGURES:
            prompts[length][name][concurrency] = quartiles([run_[name] for run_ in done])
        if drafts := sum(run_["drafts"] for run_ in done):
            accepted = sum(run_["accepted"] for run_ in done)
            prompts[length]["acceptance_length"][concurrency] = round(1 + accepted / drafts, 4)
    return {length: dict(figures) for length, figures in prompts.items()}


def format_table(result: dict[str, Any]) -> str:
    """Output tokens/s with ratios over `none` and `upstream-v2`, and below it everything else."""
    modes, settings = result["modes"], result["settings"]
    pairs = [(mode, base) for base in ("none", "upstream-v2") if base in modes for mode in modes if mode != base]
    pairs = [(mode, base) for mode, base in pairs if mode != "none"]
    speeds = [["prompt", "concurrency", *(f"{mode}, tokens/s" for mode in modes), *map(" / ".join, pairs)]]
    others = [["prompt", "concurrency", "", *modes]]
    for length in map(str, settings["prompt_tokens"]):
        figures = {mode: entry["prompts"][length] for mode, entry in modes.items()}
        for concurrency in map(str, settings["concurrency"]):
            speed = {mode: of["output_tokens_per_s"][concurrency] for mode, of in figures.items()}
            ratios = [f"{speed[mode]['median'] / speed[base]['median']:.2f}" for mode, base in pairs]
            speeds.append([length, concurrency, *(show_quartiles(speed[mode], 0) for mode in modes), *ratios])
            for name in (*FIGURES[1:], "acceptance_length"):
                cells = [of.get(name, {}).get(concurrency) for of in figures.values()]
                others.append([length, concurrency, name, *map(_show, cells)])
    return "\n\n".join([markdown(speeds), markdown(others)])


def _show(cell: Any) -> str:
    if cell is None:
        return "-"
    return show_quartiles(cell) if isinstance(cell, dict) else f"{cell:.2f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
