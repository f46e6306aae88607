"""What was measured on two CPU cores, by `bench compare` and `bench cost`."""

from collections.abc import Callable
from typing import Any

from bench.cost import format_tables
from bench.spread import show_quartiles
from tools.tables.records import record, sentences, show_ratio, span, table

CPU_PROMPTS = (32, 256, 1024)
BEFORE_AND_AFTER = "compare-before-after-by-turns"


def cpu(prompt: int) -> Any:
    return record(f"cpu-k3-p{prompt}")


def cpu_speeds(prompt: int, batch: str) -> list[float]:
    """Of no speculation, vLLM's proposer and this package."""
    modes = cpu(prompt)["modes"]
    return [modes[mode]["output_tokens_per_s"][batch]["median"] for mode in ("none", "upstream", "ours")]


def cpu_tokens() -> str:
    rows = []
    for prompt in CPU_PROMPTS:
        for batch in map(str, cpu(prompt)["settings"]["batches"]):
            none, theirs, ours = cpu_speeds(prompt, batch)
            ratios = map(show_ratio, (ours / theirs, ours / none))
            rows.append([str(prompt), batch, *(f"{speed:.0f}" for speed in (none, theirs, ours)), *ratios])
    head = ["prompt", "batch", "no speculation", "vLLM's V1 proposer", "this package", "over vLLM's"]
    return table([*head, "over no speculation"], rows)


def cpu_acceptance() -> str:
    rows = []
    for prompt in CPU_PROMPTS:
        for mode, label in (("upstream", "vLLM's V1 proposer"), ("ours", "this package")):
            entry = cpu(prompt)["modes"][mode]
            by_position = " ".join(f"{share:.2f}" for share in entry["acceptance_per_position"])
            length, share = f"{entry['acceptance_length']:.2f}", f"{entry['acceptance_vs_reference']:.3f}"
            rows.append([str(prompt), label, length, share, by_position])
    head = ["prompt", "drafts by", "acceptance length", "of what exact drafts reach", "accepted by position"]
    return table(head, rows)


def mimo_v2_acceptance() -> str:
    rows = []
    for mode, label in (("upstream", "vLLM's V1 proposer, the first module for every draft"), ("ours", "this package")):
        entry = record("mimo-v2-k3")["modes"][mode]
        by_position = " ".join(f"{share:.2f}" for share in entry["acceptance_per_position"])
        length, share = f"{entry['acceptance_length']:.2f}", show_ratio(entry["acceptance_vs_reference"])
        rows.append([label, length, share, by_position])
    return table(["drafts by", "acceptance length", "of what exact drafts reach", "accepted by position"], rows)


GOALS = {"1": 1.3, "4": 1.1, "16": 1.0}
"""Of this package's tokens/s over those of no speculation, by batch."""
GOAL_OVER_THEIRS = 1.3


def cpu_says() -> str:
    over_theirs: list[float] = []
    over_none: dict[str, list[float]] = {batch: [] for batch in GOALS}
    slower, missed = [], []
    for prompt in CPU_PROMPTS:
        modes = cpu(prompt)["modes"]
        for batch, goal in GOALS.items():
            none, theirs, ours = cpu_speeds(prompt, batch)
            over_theirs.append(ours / theirs)
            over_none[batch].append(ours / none)
            missed += [
                f"{ratio:.2f} of {whose} at batch {batch} with prompts of {prompt}"
                for ratio, whose, wanted in (
                    (ours / none, "no speculation", goal),
                    (ours / theirs, "vLLM's", GOAL_OVER_THEIRS),
                )
                if round(ratio, 2) < wanted
            ]
            steps = [modes[mode]["step_ms"][batch]["median"] for mode in ("none", "ours")]
            slower.append(steps[1] / steps[0])
    by_batch = ", ".join(f"{span(ratios)} at batch {batch}" for batch, ratios in over_none.items())
    return sentences(f"""
        This package gives {span(over_theirs)} times the tokens/s of vLLM's proposer, and of no speculation {by_batch}:
        **for many requests speculation doesn't pay on this CPU**, since a step with drafts takes {span(slower, 1)}
        times as long as one without. The goals were {", ".join(map(str, GOALS.values()))} of no speculation and
        {GOAL_OVER_THEIRS} of vLLM's; missed: {"; ".join(missed) or "none"}.
    """)


def before_and_after() -> str:
    """Two trees of this package by turns in one run: what a change of structure cost."""
    modes = record(BEFORE_AND_AFTER)["modes"]
    rows = []
    for figure, digits in (("step_ms", 2), ("output_tokens_per_s", 0)):
        for batch in map(str, record(BEFORE_AND_AFTER)["settings"]["batches"]):
            rows.append(
                [f"`{figure}`", batch, *(show_quartiles(mode[figure][batch], digits) for mode in modes.values())]
            )
    return table(["", "batch", *modes], rows)


def cost() -> str:
    return format_tables(record("cost-cpu")).strip()


TABLES: dict[str, Callable[[], str]] = {
    "cpu-tokens": cpu_tokens,
    "cpu-acceptance": cpu_acceptance,
    "cpu-says": cpu_says,
    "mimo-v2-acceptance": mimo_v2_acceptance,
    "cost": cost,
    "cpu-before-after": before_and_after,
}
