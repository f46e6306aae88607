"""What was measured on GPUs, by `bench gpu`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isnan

from bench.spread import show_quartiles
from tools.tables.records import below_one, record, show, show_ratio, span, table

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
        for name in (self.name, self.without):
            if name is not None and mode in record(name)["modes"]:
                value = record(name)["modes"][mode]["prompts"][self.prompt].get(figure, {}).get(batch)
                value = value["median"] if isinstance(value, dict) else value
                return None if value is None or isnan(value) else float(value)
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


SHORT = Run("8 layers, prompts of 256, A, mostly quiet", "gpu-h200-8-layers-by-turns", "256")
BUSY = Run("8 layers, prompts of 256, B, mostly busy", "gpu-h200-8-layers-by-turns-busy", "256")
LONG = Run("8 layers, prompts of 4096, A, mostly busy", "gpu-h200-8-layers-by-turns-4096", "4096")
DEEP = Run("24 layers, prompts of 256, B", "gpu-h200-24-layers-by-turns", "256", without="gpu-h200-24-layers")
APART = Run("8 layers, prompts of 256, C, one after the other", "gpu-h200-8-layers", "256")
APART_LONG = Run("8 layers, prompts of 4096, C, one after the other", "gpu-h200-8-layers", "4096")
H100 = Run("H100, 8 layers, prompts of 256, one after the other", "gpu-h100-8-layers", "256")
H100_LONG = Run("H100, 8 layers, prompts of 4096, one after the other", "gpu-h100-8-layers", "4096")
DEEP_WITHOUT = Run("24 layers, prompts of 256, C, one after the other", "gpu-h200-24-layers", "256")
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
            speeds = [run.get(mode, "output_tokens_per_s", batch) for mode in ("none", theirs, ours)]
            over = [run.ratio("output_tokens_per_s", ours, to, batch) for to in (theirs, "none")]
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


def gpu_says() -> str:
    tokens = "output_tokens_per_s"
    v1_long = LONG.ratios(tokens, "ours", "none")
    apart = APART.ratios(tokens, "ours", "none")
    return "\n".join(
        [
            f"- On V2, with prompts of 256 and 8 layers, it gives {span(SHORT.ratios(tokens, 'ours-v2', 'upstream-v2'))} "
            f"times the tokens/s of vLLM's speculator and {span(SHORT.ratios(tokens, 'ours-v2', 'none'))} times those of "
            f"no speculation. On the busy machine it is {span(BUSY.ratios(tokens, 'ours-v2', 'upstream-v2'))} and "
            f"{span(BUSY.ratios(tokens, 'ours-v2', 'none'))}.",
            f"- With 24 layers the target takes most of a step, which is the same for both: "
            f"{span(DEEP.ratios(tokens, 'ours-v2', 'upstream-v2'))} times vLLM's tokens/s.",
            f"- The GPU is busy for {span(SHORT.ratios('gpu_busy_ms', 'ours-v2', 'upstream-v2'))} of the time that it is "
            "with vLLM's speculator (8 layers, prompts of 256). A step as a whole takes "
            f"{span(SHORT.ratios('step_ms', 'ours-v2', 'upstream-v2'))} of vLLM's on the quiet machine and "
            f"{span(BUSY.ratios('step_ms', 'ours-v2', 'upstream-v2'))} on the busy one, because a step that doesn't fill "
            "the GPU is as long as the host takes.",
            "- **Batches of long prompts hardly pay, whoever drafts.** With prompts of 4096, tokens/s over those of no "
            f"speculation are {by_batch(LONG, tokens, 'ours-v2')} at batch {', '.join(LONG.batches)} on V2 (vLLM's: "
            f"{by_batch(LONG, tokens, 'upstream-v2')}), and {by_batch(LONG, tokens, 'ours')} on V1 (vLLM's: "
            f"{by_batch(LONG, tokens, 'upstream-v1')}). On V1 this package is below 1 in {below_one(v1_long)} of these "
            f"{len(v1_long)}.",
            "- **On V1 many prompts at once wait longer for their first token than with vLLM's proposer**, which leaves "
            f"modules out there: up to {max(SHORT.ratios('ttft_ms', 'ours', 'upstream-v1')):.2f} times as long with "
            f"prompts of 256 and {max(LONG.ratios('ttft_ms', 'ours', 'upstream-v1')):.2f} times with prompts of 4096.",
            "- **On V1 a host with slow cores takes the gain away.** On machine C, where the modes ran one after the other "
            f"and the cores were slow for V1's runs, V1's tokens/s were {by_batch(APART, tokens, 'ours')} of those of no "
            f"speculation, below 1 in {below_one(apart)} of {len(apart)}.",
        ]
    )


def by_batch(run: Run, figure: str, mode: str, to: str = "none") -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in run.ratios(figure, mode, to))


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
    spent = {mode: record(SHORT.name)["modes"][mode]["prompts"]["256"]["gpu_ms_by_family"][batch] for mode in MODES}
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
            cells = [
                record(run.name)["modes"][mode]["prompts"][run.prompt].get(figure, {}).get(batch) for mode in modes
            ]
            if any(cell == cell and cell is not None and cell != {} for cell in cells):
                shown = [show_quartiles(cell, digits) if has_quartiles and cell else show(cell, digits) for cell in cells]
                rows.append([f"`{figure}`", batch, *("-" if "nan" in cell else cell for cell in shown)])
    return table(["", "batch", *modes.values()], rows)


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


TABLES: dict[str, Callable[[], str]] = {
    "gpu-tokens-v2": gpu_tokens_v2,
    "gpu-tokens-v1": gpu_tokens_v1,
    "gpu-steps-v2": gpu_steps_v2,
    "gpu-steps-v1": gpu_steps_v1,
    "gpu-says": gpu_says,
    "gpu-where": gpu_where,
    "gpu-memory": gpu_memory,
    "slots": slots,
    "gpu-full-short": partial(in_full, SHORT),
    "gpu-full-long": partial(in_full, LONG),
    "gpu-full-deep": partial(in_full, DEEP),
    "gpu-full-deep-without": partial(in_full, DEEP_WITHOUT),
    "gpu-full-h100": partial(in_full, H100_LONG),
}
