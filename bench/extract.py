"""What it costs to extract hidden states, and whether every row is right, beside vLLM's extraction and none."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from bench.arguments import add_engine_argument, add_json_argument, add_prompt_arguments, parse_modes
from bench.corpus import held_out_prompts
from bench.environment import describe_environment, without_folder, write_record
from bench.processes import run_modes
from bench.spread import quartiles, ratios_in_pairs, show_quartiles
from bench.tables import table
from bench.workers.engine import random_prompts
from bench.workers.extract import MODES, drafts, has_records, is_fp8, is_ours, without_records

SCHEMA = "vllm-mtp-proposers/extract/1"
WRITERS, FILE_BYTES = 4, 1 << 24  # as many at a time as `writer_threads` has by default
EXTRAS = ("of_mtp_prefill", "of_mtp_decode", "of_mtp_steady", "tokens_per_pass", "skipped")
COUNTS = ("rows", "rows_wrong", "files_missing", "num_gpu_blocks", "copies", "peak_host_bytes")

# A row is wrong if it is further from the reference than rounding explains, relative to its largest value.
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2, "fp8": 1e-1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--layers", required=True, help="layer ids, separated by commas; N is the last layer's output")
    parser.add_argument("--modes", default="none,upstream,ours", help=f"of {', '.join(MODES)}")
    parser.add_argument(
        "--with-mtp",
        action="store_const",
        const="none,mtp,mtp+records",
        dest="modes",
        help="the modes none, mtp and mtp+records: drafting with the checkpoint's modules, and records beside it",
    )
    parser.add_argument("--drafts", type=int, default=3, help="drafts a step, of the modes that draft")
    parser.add_argument(
        "--steady",
        type=float,
        default=0,
        metavar="SECONDS",
        help="also keep so many requests running for so long, in each run",
    )
    parser.add_argument("--batch", type=int, default=8, help="requests at a time")
    add_prompt_arguments(parser)
    parser.add_argument("--runs", type=int, default=3, help="repetitions in each process")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each mode, by turns")
    parser.add_argument(
        "--by-turns", action="store_true", help="all modes' engines at once, and a run of each by turns; all must run"
    )
    parser.add_argument(
        "--dummy-weights",
        action="store_true",
        help="and random prompts: the folder needs a config.json alone, and of records only the token ids are checked",
    )
    parser.add_argument("--dtype", default="float32")
    add_engine_argument(parser)
    parser.add_argument(
        "--connector",
        type=json.loads,
        default={},
        help="further settings of HiddenStatesConnector, as a JSON object: a ring for all that ends in one step, say",
    )
    parser.add_argument("--storage", type=Path, help="where to write; a temporary folder if not given")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    result = measure(args)
    print(format_table(result))
    write_record(result, args.json)
    ours = [entry for mode, entry in result["modes"].items() if is_ours(mode)]
    return 1 if any(entry.get("rows_wrong") or entry.get("files_missing") for entry in ours) else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every mode and returns the record that `--json` writes. A mode that can't run has its error as its entry.

    Raises:
        ValueError: a mode or a layer that doesn't exist, or too few output tokens.
        RuntimeError: a process failed, other than that of `upstream` by itself.
    """
    if args.output_tokens < 4:
        raise ValueError(f"--output-tokens={args.output_tokens} leaves no decoding to time: give 4 or more.")
    modes = parse_modes(args.modes, MODES)
    config = json.loads(Path(args.model, "config.json").read_text())
    config = config.get("text_config", config)
    environment = describe_environment()
    spec = {
        "model": args.model,
        "layer_ids": parse_layers(args.layers, config["num_hidden_layers"]),
        "batch": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "runs": args.runs,
        "dtype": args.dtype,
        "dummy_weights": args.dummy_weights,
        "engine": args.engine,
        "connector": args.connector,
        "drafts": args.drafts,
        "steady_s": args.steady,
        "platform": environment["platform"],
    }
    spec["prompts"] = find_prompts(args, config)
    if args.storage is not None:
        args.storage.mkdir(parents=True, exist_ok=True)
    speeds = storage_speeds(args.storage)
    raw, errors = run_rounds(modes, spec, args)
    speeds += storage_speeds(args.storage)
    entries = {mode: summarise(runs, args) for mode, runs in raw.items() if runs}
    for entry in entries.values():
        add_overhead(entry, entries.get("none"))
    for mode, entry in entries.items():
        if drafts(mode) and has_records(mode):
            add_share(entry, entries.get(without_records(mode)))
    settings = {key: value for key, value in spec.items() if key != "prompts"}
    settings |= {"model": without_folder(args.model), "num_prompts": args.prompts}
    return {
        "schema": SCHEMA,
        "environment": environment,
        "settings": settings | {"rounds": args.rounds, "by_turns": args.by_turns},
        "config": config,
        "storage_bytes_per_s": quartiles(speeds, 0),
        "modes": {mode: entries.get(mode, {"error": errors.get(mode)}) for mode in modes},
    }


def run_rounds(
    modes: list[str], spec: dict[str, Any], args: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """The results of each mode's processes, and the error of `upstream` where it can't run by itself.

    Raises:
        RuntimeError: another process failed.
    """
    raw: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    errors: dict[str, str] = {}
    together = [modes] if args.by_turns else [[mode] for mode in modes]
    for group in together * args.rounds:
        if errors.keys() & set(group):
            continue
        try:
            for mode, done in zip(group, run_group(group, spec, args), strict=True):
                raw[mode].append(done)
        except RuntimeError as error:
            if group != ["upstream"]:
                raise
            errors["upstream"] = reason(str(error))
    return raw, errors


def storage_speeds(storage: Path | None) -> list[float]:
    """Bytes per second, three times, that the storage takes of files which are written and synced as records are.

    Args:
        storage: the folder; None: where temporary files are.
    """
    block = os.urandom(FILE_BYTES)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())

    speeds = []
    for _ in range(3):
        with tempfile.TemporaryDirectory(dir=storage) as folder, ThreadPoolExecutor(WRITERS) as pool:
            began = time.perf_counter()
            list(pool.map(write, (Path(folder, str(i)) for i in range(2 * WRITERS))))
            speeds.append(2 * WRITERS * FILE_BYTES / (time.perf_counter() - began))
    return speeds


def find_prompts(args: argparse.Namespace, config: dict[str, Any]) -> list[list[int]]:
    """Token ids of `args.prompts` prompts, from the held-out files, or random where the model has no tokenizer."""
    if args.dummy_weights:
        return random_prompts(config["vocab_size"], args.prompts, args.prompt_tokens)
    from transformers import AutoTokenizer

    return held_out_prompts(AutoTokenizer.from_pretrained(args.model), args.prompts, args.prompt_tokens)


def run_group(group: list[str], spec: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs these modes once, side by side if there are several, and checks their records before they are deleted."""
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        specs = []
        for mode in group:
            storage = Path(folder, mode)
            storage.mkdir()
            specs.append(spec | {"mode": mode, "storage": str(storage)})
        results = list(run_modes(specs, "bench.workers.extract", args.by_turns))
        for mode, done in zip(group, results, strict=True):
            if has_records(mode):
                done |= check_rows(done["answers"], spec, "fp8" if is_fp8(mode) else args.dtype)
    return results


def parse_layers(text: str, num_layers: int) -> list[int]:
    """Layer ids, separated by commas; N is the number of layers. Raises `ValueError` for anything else."""
    return [num_layers if part == "N" else int(part) for part in text.split(",")]


def reason(message: str) -> str:
    """The last line of a log that names an error, without the process id that vLLM puts before it."""
    lines = [line for line in message.splitlines() if "Error" in line]
    return lines[-1].split(") ", 1)[-1] if lines else message.splitlines()[-1]


def check_rows(answers: list[dict[str, Any]], spec: dict[str, Any], dtype: str) -> dict[str, int]:
    """Compares every row of every layer of the records with the dense reference.

    With dummy weights only the token ids are compared: the reference reads a checkpoint.

    Returns:
        `rows`, and of those `rows_wrong`.
    """
    from proposers.hidden_states import load

    rows = wrong = 0
    for answer in answers:
        if not answer["there"]:
            continue
        record = load_any(answer["path"], load)
        tokens = answer["tokens"][: len(record[0])]
        rows += len(tokens)
        if record[1] != tokens:
            wrong += len(tokens)
            continue
        if spec["dummy_weights"]:
            continue
        expected = reference(spec["model"])(tuple(tokens))[:, spec["layer_ids"]]
        scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-3)
        off = ((record[0].float() - expected).abs() / scale).amax((1, 2)) > TOLERANCE[dtype]
        wrong += int(off.sum())
    return {"rows": rows, "rows_wrong": wrong}


def load_any(path: str, load: Callable[[str], Any]) -> tuple[Any, list[int]]:
    """Hidden states and token ids of a record of ours, or of vLLM's file."""
    from safetensors.torch import load_file

    try:
        record = load(path)
    except ValueError:
        tensors = load_file(path)
        return tensors["hidden_states"], tensors["token_ids"].tolist()
    return record.hidden_states, record.token_ids.tolist()


@cache
def reference(model: str) -> Callable[[tuple[int, ...]], Any]:
    """`residual_stream_of` the model, as a function of a tuple, which computes equal sequences once."""
    from bench.reference.residual import residual_stream_of

    residual_stream = residual_stream_of(model)
    return cache(lambda tokens: residual_stream(list(tokens)))


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """One mode's entry, from its processes."""
    prompt_tokens = args.prompts * args.prompt_tokens
    timed = [run for process in runs for run in process["runs"]]
    entry = {
        "proposer": runs[0]["proposer"],
        "prefill_tokens_per_s": quartiles([prompt_tokens / run["prefill_s"] for run in timed], 1),
        "decode_tokens_per_s": quartiles([run["decode_tokens"] / run["decode_s"] for run in timed], 1),
        "last_answer_ms": quartiles([run["last_answer_ms"] for run in timed], 1),
        "num_gpu_blocks": runs[0]["num_gpu_blocks"],
        "peak_rss_bytes": max(process["peak_rss_bytes"] for process in runs),
        "copies": runs[0]["copies"],
        "tokens_per_pass": runs[0]["tokens_per_pass"],
        "runs": timed,
    }
    if steady := [run for process in runs for run in process["steady"]]:
        entry["steady_tokens_per_s"] = quartiles([one["tokens"] / one["seconds"] for one in steady], 1)
        entry["steady_bytes_per_s"] = quartiles([one["bytes"] / one["seconds"] for one in steady], 0)
        entry["steady"] = steady
    if "rows" in runs[0]:
        entry["skipped"] = sum(process["skipped"] for process in runs)
        entry["rows"] = sum(process["rows"] for process in runs)
        entry["rows_wrong"] = sum(process["rows_wrong"] for process in runs)
        entry["files_missing"] = sum(run["files_missing"] for run in timed)
        entry["peak_host_bytes"] = runs[0]["peak_host_bytes"]
    return entry


def add_overhead(entry: dict[str, Any], none: dict[str, Any] | None) -> None:
    """Adds how many times as long a token takes as in the mode `none`, in prefill and in decoding; None without it."""
    for part in ("prefill", "decode"):
        entry[f"overhead_{part}"] = None if none is None else in_pairs(none, entry, part)["median"]


def add_share(entry: dict[str, Any], mtp: dict[str, Any] | None) -> None:
    """Adds what part of its speed drafting alone has left with records beside it."""
    for part in ("prefill", "decode", "steady"):
        if mtp is not None and f"{part}_tokens_per_s" in entry and f"{part}_tokens_per_s" in mtp:
            entry[f"of_mtp_{part}"] = in_pairs(entry, mtp, part)["median"]


def in_pairs(entry: dict[str, Any], other: dict[str, Any], part: str) -> dict[str, float]:
    """A mode's tokens per second divided by another's, run by run, as `quartiles`.

    Args:
        entry, other: entries of one record.
        part: `prefill`, `decode` or `steady`.
    """
    # Who failed in a later round has fewer.
    return ratios_in_pairs(zip(_speeds(entry, part), _speeds(other, part), strict=False), 4)


def _speeds(entry: dict[str, Any], part: str) -> list[float]:
    if part == "steady":
        return [stretch["tokens"] / stretch["seconds"] for stretch in entry["steady"]]
    if part == "decode":
        return [run["decode_tokens"] / run["decode_s"] for run in entry["runs"]]
    return [1 / run["prefill_s"] for run in entry["runs"]]  # of the same prompts


def format_table(result: dict[str, Any]) -> str:
    modes = result["modes"]
    rows = [["", *modes]]
    for key in ("prefill_tokens_per_s", "decode_tokens_per_s", "steady_tokens_per_s", "last_answer_ms"):
        speeds = (entry.get(key) for entry in modes.values())
        rows.append([key, *("-" if s is None else show_quartiles(s, 0) for s in speeds)])
    for key in ("overhead_prefill", "overhead_decode", *EXTRAS, *COUNTS):
        rows.append([key, *("-" if entry.get(key) is None else str(entry[key]) for entry in modes.values())])
    failed = [f"{mode} did not run: {entry['error']}" for mode, entry in modes.items() if "error" in entry]
    storage = f"the storage takes {show_quartiles(result['storage_bytes_per_s'], 0)} bytes per second"
    return "\n".join([table(rows), storage, *failed])
