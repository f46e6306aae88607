"""Prefix hits and what they cost, with and without drafts: a shared prompt, sessions, and a prompt that grows."""

import argparse
from pathlib import Path
from typing import Any

from bench.arguments import add_architecture_argument, add_engine_argument, add_json_argument, parse_modes
from bench.environment import describe_environment, without_folder, write_record
from bench.processes import run_modes
from bench.reference import TINY_CHECKPOINTS, has_reference
from bench.reference.acceptance import ExactLengths
from bench.spread import quartiles, ratios_in_pairs
from bench.tables import table
from bench.workers.host_parts import PARTS, mean_parts
from bench.workers.prefix import MODES, SCENARIOS

SCHEMA = "vllm-mtp-proposers/prefix/1"
WORKER = "bench.workers.prefix"
SIZES = ("prompt_tokens", "turn_tokens", "turns", "users")

Runs = dict[str, list[dict[str, Any]]]  # of a mode, by scenario


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from bench.oracle import TINY_MODEL

    parser.add_argument(
        "--model", type=Path, default=TINY_MODEL if TINY_MODEL.is_dir() else None, help="folder of the checkpoint"
    )
    add_architecture_argument(parser)
    parser.add_argument(
        "--runner", choices=("v1", "v2"), default="v1", help="vLLM's; v2 on the CPU by Triton's interpreter"
    )
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--k", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="of the shared prompt and the agent's first")
    parser.add_argument("--turn-tokens", type=int, default=60, help="what a user says in a turn, or a tool's result")
    parser.add_argument("--turns", type=int, default=5, help="of a session, and steps of the agent")
    parser.add_argument("--users", type=int, default=13)
    parser.add_argument("--at-once", type=int, default=4, help="users at the same time, and sessions")
    parser.add_argument("--output-tokens", type=int, default=24, help="of each request")
    parser.add_argument("--runs", type=int, default=3, help="of every scenario in each process")
    parser.add_argument("--rounds", type=int, default=1, help="fresh processes of each mode, which differ in speed")
    parser.add_argument(
        "--host-parts",
        action="store_true",
        help="clock the parts of the engine, too: where its thread is until a first token, and how long it proposes",
    )
    parser.add_argument("--dtype", help="default: float32, or what a tiny checkpoint of the architecture has")
    add_engine_argument(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from bench.oracle import the_model

    modes = parse_modes(args.modes, MODES)
    with the_model(args) as model:
        result, runs = measure_modes(args, model, modes)
        if has_reference(model):
            write_record(result, args.json)  # what exact drafts would reach may take longer than the runs did
            add_reference(result, runs, model, args.k)
    print(format_table(result))
    if args.host_parts:
        print(format_host_parts(result))
    write_record(result, args.json)
    return 0


def measure_modes(args: argparse.Namespace, model: Path, modes: list[str]) -> tuple[dict[str, Any], dict[str, Runs]]:
    """Runs every mode by turns.

    Returns:
        the record that `--json` writes, which doesn't know yet what exact drafts would reach; of every mode its runs.

    Raises:
        RuntimeError: a mode's process failed; the message ends with the end of its log.
    """
    tiny = TINY_CHECKPOINTS.get(args.architecture)
    interpreted = is_interpreted(args)
    # What is interpreted is not compiled besides, and the kernels of a warm-up are some that the interpreter can't run.
    defaults = {"enforce_eager": True} if interpreted else {}
    if tiny and tiny.cached:
        defaults["block_size"] = tiny.setup["block_size"]  # else that of a state, which has more to it with drafts
    settings = {
        "model": args.architecture or without_folder(str(model)),
        "runner": args.runner,
        "k": args.k,
        "dtype": args.dtype or (tiny.dtype if tiny else "float32"),
        "at_once": args.at_once,
        "output_tokens": args.output_tokens,
        "runs": args.runs,
        "rounds": args.rounds,
        "engine": defaults | args.engine,
        "interpreted": interpreted,
        "host_parts": args.host_parts,
    }
    text = scenario_texts(args, model)
    spec = {
        **settings,
        **text,
        "model": str(model),
        "recurrent": bool(tiny and tiny.recurrent),
        "max_model_len": longest_sequence(args) + args.k + 1,
    }
    raw = run_rounds([spec | {"mode": mode} for mode in modes], args.rounds)
    runs = {mode: done["runs"] for mode, done in raw.items()}
    record = {
        "schema": SCHEMA,
        "environment": describe_environment(),
        "settings": settings
        | {name: getattr(args, name) for name in ("prompt_tokens", "turn_tokens", "turns", "users")},
        "proposers": {mode: raw[mode]["proposer"] for mode in modes},
        "scenarios": {
            name: {"modes": summarise_modes({mode: runs[mode][name] for mode in modes})} for name in SCENARIOS
        },
    }
    return record, runs


def run_rounds(specs: list[dict[str, Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """By mode, what its processes returned, with the runs of all of them in one list by scenario.

    In a round each mode has one process, and the next round begins with the other end of the modes.
    """
    found: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        group = specs[:: -1 if number % 2 else 1]
        for spec, done in zip(group, run_modes(group, WORKER, by_turns=True), strict=True):
            runs = found.setdefault(spec["mode"], {**done, "runs": {name: [] for name in SCENARIOS}})["runs"]
            for name in SCENARIOS:
                runs[name] += done["runs"][name]
    return found


def is_interpreted(args: argparse.Namespace) -> bool:
    """Whether Triton's interpreter runs kernels of the engines, so that times say nothing."""
    import torch

    tiny = TINY_CHECKPOINTS.get(args.architecture)
    return (args.runner == "v2" or (tiny is not None and tiny.recurrent)) and not torch.cuda.is_available()


def longest_sequence(args: argparse.Namespace) -> int:
    grown = args.turns * (args.turn_tokens + args.output_tokens)
    return max(args.prompt_tokens + args.output_tokens + grown, args.prompt_tokens + args.turn_tokens)


def scenario_texts(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """What the scenarios are made of, cut from held-out text: none of it stands there twice."""
    from bench.oracle.driver import read_texts

    stream = iter([token for text in read_texts(model, num_tokens=60_000)[0] for token in text])

    def cut(length: int) -> list[int]:
        return [next(stream) for _ in range(length)]

    return {
        "system": cut(args.prompt_tokens),
        "users": [cut(args.turn_tokens) for _ in range(args.users)],
        "sessions": [[cut(args.turn_tokens) for _ in range(args.turns)] for _ in range(args.at_once)],
        "task": cut(args.prompt_tokens),
        "results": [cut(args.turn_tokens) for _ in range(args.turns - 1)],
    }


def summarise_modes(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of a scenario the entry of each mode.

    With `ttft_less_drafting_of_none`, where `none` was run: a first token's time, less what drafting takes of it, over
    that of the same request without speculation in the same turn. Requests of a scenario differ by as much as their
    lengths do, and turns by what else the machine does, so medians of all of them tell less.
    """
    entries = {mode: summarise(of_mode) for mode, of_mode in runs.items()}
    if "none" in runs:
        base = [ms for run in runs["none"] for ms in run["ttft_ms"]]
        for mode, entry in entries.items():
            pairs = zip(less_drafting(runs[mode]), base, strict=True)
            entry["ttft_less_drafting_of_none"] = ratios_in_pairs(pairs)
    return entries


def less_drafting(runs: list[dict[str, Any]]) -> list[float]:
    """Of each request, the ms until its first token less those that drafting takes of them."""
    return [ms - drafting for run in runs for ms, drafting in zip(run["ttft_ms"], run["ttft_drafting_ms"], strict=True)]


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A mode's entry of a scenario: hits of its first run, acceptance of all, medians of times.

    Where the engine's parts were clocked, `ttft_host_ms` has the mean of each over the first tokens, so that they add
    up to the mean TTFT. On CUDA `ttft_drafting_ms` is the device's, and `propose` among these is the host's.
    """
    drafts = sum(run["num_drafts"] for run in runs)
    length = 1 + sum(run["num_accepted"] for run in runs) / drafts if drafts else 1.0
    ttft = [ms for run in runs for ms in run["ttft_ms"]]
    drafting = [ms for run in runs for ms in run["ttft_drafting_ms"]]
    host = [parts for run in runs for parts in run["ttft_host_ms"]]
    spread = {
        "ttft_ms": quartiles(ttft),
        "ttft_drafting_ms": quartiles(drafting),
        "ttft_less_drafting_ms": quartiles(less_drafting(runs)),
        "output_tokens_per_s": quartiles([run["output_tokens"] / run["seconds"] for run in runs], 1),
    }
    return {
        "prompt_tokens": runs[0]["prompt_tokens"],
        "hit_tokens": runs[0]["hit_tokens"],
        **{name: figure["median"] for name, figure in spread.items()},
        "acceptance_length": round(length, 4),
        "acceptance_vs_reference": None,
        **({"ttft_host_ms": mean_parts(host)} if host else {}),
        "spread": spread,
    }


def add_reference(record: dict[str, Any], runs: dict[str, Runs], model: Path, k: int) -> None:
    """Says of every mode that drafts what part of the acceptance of exact drafts it has, on the tokens that it gave."""
    lengths = ExactLengths(model, k)
    for name, scenario in record["scenarios"].items():
        for mode, entry in scenario["modes"].items():
            of_mode = runs[mode][name]
            if any(run["num_drafts"] for run in of_mode):
                exact = lengths.of(f"{mode}, {name}", of_mode[0]["streams"])
                entry["acceptance_vs_reference"] = round(entry["acceptance_length"] / exact, 4)


def format_table(result: dict[str, Any]) -> str:
    rows = [["scenario", "mode", "prompt tokens", "hits", "acceptance", "of exact drafts'", "TTFT ms", "tokens/s"]]
    for name, scenario in result["scenarios"].items():
        for mode, entry in scenario["modes"].items():
            share = entry["acceptance_vs_reference"]
            rows.append(
                [
                    name,
                    mode,
                    str(entry["prompt_tokens"]),
                    str(entry["hit_tokens"]),
                    f"{entry['acceptance_length']:.3f}",
                    "-" if share is None else f"{share:.3f}",
                    f"{entry['ttft_ms']:.1f}",
                    f"{entry['output_tokens_per_s']:.0f}",
                ]
            )
    return table(rows)


def format_host_parts(result: dict[str, Any]) -> str:
    """The mean ms of each part of the host's time up to a first token."""
    rows = [["scenario", "mode", *PARTS]]
    for name, scenario in result["scenarios"].items():
        for mode, entry in scenario["modes"].items():
            rows.append([name, mode, *(f"{ms:.2f}" for ms in entry["ttft_host_ms"].values())])
    return table(rows)
