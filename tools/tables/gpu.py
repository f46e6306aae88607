"""What was measured on GPUs, by `bench gpu`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any

from bench.spread import show_quartiles
from tools.tables.records import below_one, record, sentences, show, show_ratio, span, table

TOKENS = "output_tokens_per_s"
MODES = {
    "none": "no speculation",
    "upstream-v2": "vLLM's on V2",
    "ours-v2": "this package on V2",
    "upstream-v1": "vLLM's on V1",
    "ours": "this package on V1",
}


@dataclass(frozen=True)
class Run:
    """One run of `bench gpu`, as a row of tables.

    Attributes:
        without: the record that has the run without speculation, where it is another one.
    """

    label: str
    name: str
    prompt: str
    without: str | None = None

    def get(self, mode: str, figure: str, batch: str) -> float | None:
        """A median, or None where that was not measured."""
        value = self.cell(mode, figure, batch)
        value = value["median"] if isinstance(value, dict) else value
        return None if value is None or isnan(value) else float(value)

    def cell(self, mode: str, figure: str, batch: str) -> Any:
        """A number, or a median with quartiles, as the record has it; None where that was not measured."""
        for name in (self.name, self.without):
            if name is not None and mode in record(name)["modes"]:
                return record(name)["modes"][mode]["prompts"][self.prompt].get(figure, {}).get(batch)
        return None

    def ratio(self, figure: str, mode: str, to: str, batch: str) -> float | None:
        upper, lower = (self.get(each, figure, batch) for each in (mode, to))
        return None if upper is None or lower is None else upper / lower

    def ratios(self, figure: str, mode: str, to: str) -> list[float]:
        """By batch, for a record that has both."""
        found = [self.ratio(figure, mode, to, batch) for batch in self.batches]
        return [ratio for ratio in found if ratio is not None]

    @property
    def batches(self) -> list[str]:
        return [str(batch) for batch in record(self.name)["settings"]["batches"]]


SINGLE = (  # of one module, and the modes to compare
    (Run("MiMo", "gpu-h200-mimo", "256"), "upstream-v1", "ours"),
    (Run("MiMo", "gpu-h200-mimo", "256"), "upstream-v2", "ours-v2"),
    (Run("DeepSeek-V3", "gpu-h200-deepseek-v3", "256"), "upstream-v2", "ours-v2"),
)
MIMO_V2 = Run("MiMo-V2's shape, prompts of 256", "gpu-h200-mimo-v2", "256")
SHORT = Run("8 layers, prompts of 256, A, mostly quiet", "gpu-h200-8-layers-by-turns", "256")
BUSY = Run("8 layers, prompts of 256, B, mostly busy", "gpu-h200-8-layers-by-turns-busy", "256")
LONG = Run("8 layers, prompts of 4096, A, mostly busy", "gpu-h200-8-layers-by-turns-4096", "4096")
DEEP = Run("24 layers, prompts of 256, B", "gpu-h200-24-layers-by-turns", "256", without="gpu-h200-24-layers")
APART = Run("8 layers, prompts of 256, C, one after the other", "gpu-h200-8-layers", "256")
APART_LONG = Run("8 layers, prompts of 4096, C, one after the other", "gpu-h200-8-layers", "4096")
H100 = Run("H100, 8 layers, prompts of 256, one after the other", "gpu-h100-8-layers", "256")
H100_LONG = Run("H100, 8 layers, prompts of 4096, one after the other", "gpu-h100-8-layers", "4096")
DEEP_WITHOUT = Run("24 layers, prompts of 256, C, one after the other", "gpu-h200-24-layers", "256")
BEFORE_AND_AFTER = "gpu-h200-before-after-by-turns"
RUNS = (SHORT, BUSY, LONG, DEEP, APART, APART_LONG, H100, H100_LONG)


def gpu_tokens_v2() -> str:
    return tokens_table("upstream-v2", "ours-v2")


def gpu_tokens_v1() -> str:
    return tokens_table("upstream-v1", "ours")


def tokens_table(theirs: str, ours: str) -> str:
    head = ["run", "batch", MODES["none"], MODES[theirs], MODES[ours], "over vLLM's", "over no speculation"]
    rows = []
    for run in RUNS:
        for batch in run.batches:
            speeds = [run.get(mode, TOKENS, batch) for mode in ("none", theirs, ours)]
            over = [run.ratio(TOKENS, ours, to, batch) for to in (theirs, "none")]
            if over != [None, None]:
                rows.append([run.label, batch, *(show(speed, 0) for speed in speeds), *map(show_ratio, over)])
    return table(head, rows)


def gpu_steps_v2() -> str:
    return steps_table("upstream-v2", "ours-v2")


def gpu_steps_v1() -> str:
    return steps_table("upstream-v1", "ours")


def steps_table(theirs: str, ours: str) -> str:
    """What a decode step takes, as a multiple of what it takes with vLLM's; more than 1 is slower."""
    figures = {
        "step": "step_ms",
        "GPU busy in it": "gpu_busy_ms",
        "host in `propose`": "propose_host_ms",
        "time to first token": "ttft_ms",
    }
    rows = []
    for run in RUNS:
        for batch in run.batches:
            cells = [run.ratio(figure, ours, theirs, batch) for figure in figures.values()]
            if any(cell is not None for cell in cells):
                rows.append([run.label, batch, *(show_ratio(cell, more_is_better=False) for cell in cells)])
    return table(["run", "batch", *figures], rows)


def gpu_setup() -> str:
    chances = ", ".join(map(str, record(SHORT.name)["settings"]["acceptance_rates"]))
    lengths = [SHORT.get(mode, "acceptance_length", batch) for mode in MODES for batch in SHORT.batches]
    return sentences(f"""
        Acceptance is synthetic: a draft is accepted with a chance of {chances} by its position, which gives
        {span([length for length in lengths if length is not None], 1)} tokens a step, so that all drafters verify
        equally many drafts. What exact drafts are worth is measured on the CPU below, with a trained model.
    """)


def gpu_says() -> str:
    over_theirs, over_none, step, busy = (
        {run: span(run.ratios(figure, "ours-v2", to)) for run in (SHORT, BUSY, DEEP)}
        for figure, to in (
            (TOKENS, "upstream-v2"),
            (TOKENS, "none"),
            ("step_ms", "upstream-v2"),
            ("gpu_busy_ms", "upstream-v2"),
        )
    )
    long = {mode: by_batch(LONG, mode) for mode in MODES}
    wait = {run: f"{max(run.ratios('ttft_ms', 'ours', 'upstream-v1')):.2f}" for run in (SHORT, LONG)}
    slower, slower_apart = (below_one(run.ratios(TOKENS, "ours", "none")) for run in (LONG, APART))
    found = [
        f"""On V2, with prompts of 256 and 8 layers, this package gives {over_theirs[SHORT]} times the tokens/s of
        vLLM's speculator and {over_none[SHORT]} times those of no speculation. On a busy machine the ratios are
        {over_theirs[BUSY]} and {over_none[BUSY]}.""",
        f"""With 24 layers the target takes most of a step, which is the same for both: this package gives
        {over_theirs[DEEP]} times vLLM's tokens/s.""",
        f"""The GPU is busy for {busy[SHORT]} of the time that it is with vLLM's speculator (8 layers, prompts of
        256). A step as a whole takes {step[SHORT]} of vLLM's on the quiet machine and {step[BUSY]} on the busy one,
        because a step that doesn't fill the GPU is as long as the host takes.""",
        f"""**Batches of long prompts hardly pay, whoever drafts.** With prompts of 4096 and batches of
        {", ".join(LONG.batches)}, tokens/s over those of no speculation are {long["ours-v2"]} on V2 (vLLM's:
        {long["upstream-v2"]}), and {long["ours"]} on V1 (vLLM's: {long["upstream-v1"]}). In {slower} of these
        {len(LONG.batches)} batches on V1 this package is slower than no speculation.""",
        f"""**On V1 many prompts at once wait longer for their first token than with vLLM's proposer**, which leaves
        modules out there: up to {wait[SHORT]} times as long with prompts of 256, and {wait[LONG]} times with
        prompts of 4096.""",
        f"""**On V1 a host with slow cores takes the gain away.** On machine C, where the modes ran one after the
        other and the cores were slow for V1's runs, this package's tokens/s on V1 were {by_batch(APART, "ours")} of
        those of no speculation, and so fewer in {slower_apart} of {len(APART.batches)} batches.""",
    ]
    return "\n".join(sentences(text, bullet="- ") for text in found)


def by_batch(run: Run, mode: str) -> str:
    """Tokens/s over those of no speculation."""
    return ", ".join(f"{ratio:.2f}" for ratio in run.ratios(TOKENS, mode, "none"))


def gpu_where() -> str:
    """Where the time of a step at batch 8 goes."""
    batch = "8"
    families = {
        "GEMMs": "matrix product",
        "experts": "experts",
        "attention": "attention",
        "norms": "norm",
        "argmax and other reductions (vLLM's norms are among them)": "argmax",
        "slots and window": "slots and window",
        "everything else": "other",
    }
    spent = {mode: SHORT.cell(mode, "gpu_ms_by_family", batch) for mode in MODES}
    rows = [[label, *(f"{spent[mode].get(key, 0):.2f}" for mode in MODES)] for label, key in families.items()]
    for label, key in {"GPU busy": "gpu_busy_ms", "host in `propose`": "propose_host_ms", "step": "step_ms"}.items():
        rows.append([label, *(show(SHORT.get(mode, key, batch), 2) for mode in MODES)])
    return table(["ms", *MODES.values()], rows)


def gpu_memory() -> str:
    taken = {mode: record(APART.name)["modes"][mode]["graph_memory_bytes"] for mode in MODES}
    return table(["", *MODES.values()], [["MiB", *(f"{taken[mode] / 2**20:.0f}" for mode in MODES)]])


# A figure's digits, and whether it is a median with quartiles.
IN_FULL = {
    "step_ms": (2, True),
    "decode_tokens_per_s": (0, True),
    "output_tokens_per_s": (0, True),
    "propose_host_ms": (2, True),
    "gpu_busy_ms": (2, False),
    "kernels_per_step": (0, False),
    "ttft_ms": (1, True),
    "acceptance_length": (2, False),
    "step_over_floor": (2, False),
    "yardstick_ms": (1, True),
}


def in_full(run: Run) -> str:
    modes = {mode: label for mode, label in MODES.items() if mode in record(run.name)["modes"]}
    rows = []
    for figure, (digits, has_quartiles) in IN_FULL.items():
        for batch in run.batches:
            cells = [run.cell(mode, figure, batch) for mode in modes]
            shown = [show_quartiles(cell, digits) if has_quartiles and cell else show(cell, digits) for cell in cells]
            shown = ["-" if "nan" in cell else cell for cell in shown]
            if any(cell != "-" for cell in shown):
                rows.append([f"`{figure}`", batch, *shown])
    return table(["", "batch", *modes.values()], rows)


def before_and_after() -> str:
    """Two trees of this package and vLLM's speculator, by turns in one run: what a change of structure cost."""
    modes = record(BEFORE_AND_AFTER)["modes"]
    rows = []
    for figure, digits in (("gpu_busy_ms", 2), ("step_ms", 2), ("propose_host_ms", 2), (TOKENS, 0)):
        for batch in map(str, record(BEFORE_AND_AFTER)["settings"]["batches"]):
            cells = [mode["prompts"]["256"][figure][batch] for mode in modes.values()]
            shown = (show_quartiles(cell, digits) if isinstance(cell, dict) else show(cell, digits) for cell in cells)
            rows.append([f"`{figure}`", batch, *shown])
    return table(["", "batch", "before", "after", "vLLM's on V2"], rows)


def slots() -> str:
    found = record("gpu-h200-slots")["by_num_groups"]
    rows = []
    for groups in found["issued"]:
        row = [groups]
        for how in ("issued", "in_a_graph"):
            times = found[how][groups]
            row += [f"{times['at_once_us']:.1f}", f"{times['by_group_us']:.0f}", f"{times['ratio']:.0f}"]
        rows.append(row)
    parts = ["in one launch", "group by group", "ratio"]
    return table(["groups", *(f"{part}{how}" for how in ("", ", in a captured graph") for part in parts)], rows)


def mimo_v2() -> str:
    return table(["batch", *STEP_HEAD], steps_beside(MIMO_V2, "upstream-v2", "ours-v2"))


def single_modules() -> str:
    rows = []
    for run, theirs, ours in SINGLE:
        runner = "V2" if ours.endswith("v2") else "V1"
        rows += [[run.label, runner, *row] for row in steps_beside(run, theirs, ours)]
    return table(["shape", "runner", "batch", *STEP_HEAD], rows)


STEP_HEAD = ("step, ms, vLLM's", "this package", "ratio", "GPU busy, ms, vLLM's", "this package", "ratio")


def steps_beside(run: Run, theirs: str, ours: str) -> list[list[str]]:
    rows = []
    for batch in run.batches:
        row = [batch]
        for figure in ("step_ms", "gpu_busy_ms"):
            row += [show(run.get(mode, figure, batch), 2) for mode in (theirs, ours)]
            row.append(show_ratio(run.ratio(figure, ours, theirs, batch), more_is_better=False))
        rows.append(row)
    return rows


TABLES: dict[str, Callable[[], str]] = {
    "mimo-v2-on-gpu": mimo_v2,
    "single-modules-on-gpu": single_modules,
    "gpu-tokens-v2": gpu_tokens_v2,
    "gpu-tokens-v1": gpu_tokens_v1,
    "gpu-steps-v2": gpu_steps_v2,
    "gpu-steps-v1": gpu_steps_v1,
    "gpu-setup": gpu_setup,
    "gpu-says": gpu_says,
    "gpu-where": gpu_where,
    "gpu-memory": gpu_memory,
    "slots": slots,
    "gpu-before-after": before_and_after,
    "gpu-full-short": partial(in_full, SHORT),
    "gpu-full-long": partial(in_full, LONG),
    "gpu-full-deep": partial(in_full, DEEP),
    "gpu-full-deep-without": partial(in_full, DEEP_WITHOUT),
    "gpu-full-h100": partial(in_full, H100_LONG),
}
