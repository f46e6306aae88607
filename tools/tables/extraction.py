"""What was measured of extraction, by `bench extract`, and of the draft head that the records trained."""

from collections.abc import Callable, Sequence
from typing import Any

from bench.extract import in_pairs
from bench.spread import show_quartiles
from bench.workers.extract import without_records
from tools.tables.records import RESULTS, record, sentences, show, span, table

MODES = {"none": "no extraction", "upstream": "vLLM's", "ours": "this package", "ours-v2": "this package on V2"}
EIGHT_BITS = "ours-fp8"

# A mode among those of its record.
Mode = tuple[dict[str, Any], str]


def rows_of(measured: Sequence[Mode]) -> list[list[str]]:
    entries = [modes[mode] for modes, mode in measured]
    rows = []
    for part in ("prefill", "decode"):
        rows.append([f"{part}, tokens/s", *(show_quartiles(entry[f"{part}_tokens_per_s"], 0) for entry in entries)])
        rows.append([f"{part}, times the time", *(times_of_none(mode, part) for mode in measured)])
    if any("steady" in entry for entry in entries):
        rows += steady_rows_of(entries)
    rows.append(["last answer, ms", *(show_quartiles(entry["last_answer_ms"], 0) for entry in entries)])
    for label, key in (
        ("rows checked", "rows"),
        ("rows wrong", "rows_wrong"),
        ("files not there when answered", "files_missing"),
        ("blocks", "num_gpu_blocks"),
        ("copies of a row", "copies"),
    ):
        # A run without extraction has no rows and no files.
        known = ("rows" in entry or key == "num_gpu_blocks" for entry in entries)
        rows.append(
            [label, *(str(entry[key]) if is_known else "-" for entry, is_known in zip(entries, known, strict=True))]
        )
    waited = [entry.get("peak_host_bytes") for entry in entries]
    rows.append(["MB of host memory that waited for the disk", *(show(n and n / 1e6, 0) for n in waited)])
    return rows


def times_of_none(measured: Mode, part: str) -> str:
    modes, mode = measured
    return "1" if mode == "none" else show_quartiles(in_pairs(modes["none"], modes[mode], part))


def steady_rows_of(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Of a stretch without a pause."""
    rows = []
    for label, key, digits in (("tokens/s", "tokens", 0), ("MB/s of records", "bytes", 1)):
        speeds = [entry.get(f"steady_{key}_per_s") for entry in entries]
        if key == "bytes":
            speeds = [s and {name: value / 1e6 for name, value in s.items()} for s in speeds]
        rows.append([f"without a pause, {label}", *("-" if s is None else show_quartiles(s, digits) for s in speeds)])
    return rows


def on_cpu() -> str:
    measured = [(modes, mode) for modes in on_cpu_modes() for mode in ("none", "ours")]
    head = [f"{MODES[mode]}, {how}" for how in ("eager, batch 16", "compiled, batch 8") for mode in ("none", "ours")]
    return table(["", *head], rows_of(measured))


def on_cpu_modes() -> list[dict[str, Any]]:
    """Of the record of an eager engine, and of that of a compiled one."""
    return [record(name)["modes"] for name in ("extract-cpu-eager", "extract-cpu")]


def on_gpu() -> str:
    modes = record("extract-h200")["modes"]
    on_disk = record("extract-h200-disk")["modes"]
    kept = {"ours": "this package, on the disk", EIGHT_BITS: "in eight bits, on the disk"}
    kept = {mode: label for mode, label in kept.items() if mode in on_disk}
    measured = [*((modes, mode) for mode in MODES), *((on_disk, mode) for mode in kept)]
    return table(["", *MODES.values(), *kept.values()], rows_of(measured))


def on_gpu_says() -> str:
    """What the goals are about: a run without a pause, on a disk and beside drafts."""
    found = record("extract-h200-disk")
    disk, modes = found["storage_bytes_per_s"], found["modes"]
    kept = []
    for mode, label in (("ours", "records"), (EIGHT_BITS, "records in eight bits")):
        share = show_quartiles(in_pairs(modes[mode], modes["none"], "steady"))
        written = modes[mode]["steady_bytes_per_s"]["median"] / disk["median"]
        kept.append(f"with {label} {share} of the tokens/s without, and {written:.2f} of what the disk takes")
    speed = show_quartiles({name: value / 1e9 for name, value in disk.items()}, 2)
    beside = record("extract-h200-mtp")["modes"], "mtp+records-v2"
    steady, prefill, decode = (of_mtp(beside, part) for part in ("steady", "prefill", "decode"))
    return sentences(f"""
        Without a pause there are {"; ".join(kept)}, which is {speed} GB/s. The goal was 0.95 of the one or 0.9 of the
        other, whichever is less. Beside drafts on V2, in memory, {steady} of the tokens/s of drafts alone (the goal
        was 0.97), {prefill} in a prefill and {decode} in decoding.
    """)


BESIDE_MTP = {"extract-cpu-mtp": "CPU", "extract-h200-mtp": "H200"}
BESIDE_MTP_MODES = {
    "mtp": "MTP",
    "mtp+records": "with records",
    "mtp-v2": "MTP on V2",
    "mtp+records-v2": "with records on V2",
}


def beside_mtp() -> str:
    """Records beside drafts and drafts alone, of those devices that were measured."""
    known = [name for name in BESIDE_MTP if (RESULTS / f"{name}.json").exists()]
    if not known:
        return sentences("Not measured yet. The goal is 0.95 of the speed of MTP alone on a CPU, and 0.97 on a GPU.")
    head, measured = [""], []
    for name in known:
        modes = record(name)["modes"]
        drafting = [mode for mode in BESIDE_MTP_MODES if mode in modes]
        head += [f"{BESIDE_MTP[name]}, {BESIDE_MTP_MODES[mode]}" for mode in drafting]
        measured += [(modes, mode) for mode in drafting]
    entries = [modes[mode] for modes, mode in measured]
    rows = []
    for part in ("prefill", "decode", "steady"):
        speeds = [entry.get(f"{part}_tokens_per_s") for entry in entries]
        rows.append([f"{part}, tokens/s", *("-" if s is None else show_quartiles(s, 0) for s in speeds)])
        rows.append([f"{part}, of MTP alone", *(of_mtp(mode, part) for mode in measured)])
    rows.append(["tokens per pass", *(show(entry["tokens_per_pass"], 2) for entry in entries)])
    for label, key in (("rows checked", "rows"), ("rows wrong", "rows_wrong"), ("records skipped", "skipped")):
        rows.append([label, *(show(entry.get(key), 0) for entry in entries)])
    return table(head, rows)


def of_mtp(measured: Mode, part: str) -> str:
    modes, mode = measured
    alone = without_records(mode)
    if mode == alone or f"{part}_tokens_per_s" not in modes[mode]:
        return "-"
    return show_quartiles(in_pairs(modes[mode], modes[alone], part))


def draft_head() -> str:
    found = record("draft-head-cpu")
    return sentences(f"""
        extracts {found["records"]} records of {found["tokens"]} tokens from the tiny model and trains one attention
        layer on them, which sees three layers' hidden states and the next token, and is to say the one after it.
        After {found["steps"]} steps it is right at {found["accuracy_after"]:.2f} of the positions of
        {found["held_out"]} held-out records, and at {found["accuracy_before"]:.2f} before.
    """)


def on_cpu_says() -> str:
    prefill, decode = (
        span(in_pairs(modes["none"], modes["ours"], part)["median"] for modes in on_cpu_modes())
        for part in ("prefill", "decode")
    )
    return sentences(f"""
        Decoding takes {decode} times as long as without extraction, and a prefill with the wait for its files
        {prefill} times. Medians and quartiles of nine runs in three processes, the tiny model in float32, 64 prompts
        of 200 tokens, 96 new tokens, two cores of a shared machine (`python -m bench extract --model
        assets/tiny-step3p5 --layers 1,3,N`).
    """)


TABLES: dict[str, Callable[[], str]] = {
    "extraction-cpu": on_cpu,
    "extraction-gpu": on_gpu,
    "extraction-gpu-says": on_gpu_says,
    "extraction-cpu-says": on_cpu_says,
    "extraction-mtp": beside_mtp,
    "draft-head": draft_head,
}
