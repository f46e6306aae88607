"""What prefix hits are with and without drafts, by `bench prefix`: one record for each model and runner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.spread import show_quartiles
from tools.tables.records import RESULTS, record, sentences, show, span, table
from tools.tables.serving import SHARED, by_concurrency

LABELS = {"shared_prompt": "shared prompt", "sessions": "sessions", "growing": "growing prompt"}
MODES = {
    "none": "no speculation",
    "upstream": "vLLM's",
    "upstream-no-drop": "vLLM's, its drop turned off",
    "ours": "this package",
}


def prefix_hits() -> str:
    """Hits and acceptance, which don't depend on the machine, before times, which do."""
    rows = []
    for path in sorted(RESULTS.glob("prefix-*.json")):
        found = record(path.stem)
        settings = found["settings"]
        for name, scenario in found["scenarios"].items():
            modes = scenario["modes"]
            for mode, entry in modes.items():
                share = entry["hit_tokens"] / entry["prompt_tokens"]
                times = (entry["ttft_ms"], entry.get("ttft_less_drafting_ms"), entry["output_tokens_per_s"])
                rows.append(
                    [
                        label(found),
                        LABELS[name],
                        MODES[mode],
                        f"{entry['hit_tokens']} ({share:.2f})",
                        show(entry["acceptance_length"], 2),
                        show(entry["acceptance_vs_reference"], 3),
                        *("-" if settings["interpreted"] else show(time, 1) for time in times),
                    ]
                )
    if not rows:
        return "There is no record yet (`bench/results/prefix-*.json`)."
    head = ["model, runner, on", "scenario", "drafts by", "hit tokens (of all)", "acceptance length"]
    return table([*head, "of exact drafts'", "TTFT, ms", "less drafting", "tokens/s"], rows)


GOAL = 1.10
"""Of the first token, less the time that drafting takes until then: times what it takes without speculation."""


def prefix_says() -> str:
    hits, exact, first, theirs, rest, misses = [], [], [], [], [], []
    for path in sorted(RESULTS.glob("prefix-*.json")):
        found = record(path.stem)
        for name, scenario in found["scenarios"].items():
            none, upstream, ours = (scenario["modes"][mode] for mode in ("none", "upstream", "ours"))
            hits.append(ours["hit_tokens"] / none["hit_tokens"])
            exact.append(ours["acceptance_vs_reference"])
            if found["settings"]["interpreted"]:
                continue
            first.append(ours["ttft_ms"] / none["ttft_ms"])
            theirs.append(upstream["ttft_ms"] / none["ttft_ms"])
            pairs = ours.get("ttft_less_drafting_of_none")
            if pairs is None:
                continue
            rest.append(pairs["median"])
            if rest[-1] > GOAL:
                misses.append(f"{label(found)} ({LABELS[name]}, {show_quartiles(pairs, 2)})")
    return sentences(f"""
        This package's hits are {span(hits)} of those without speculation, and its acceptance {span(exact, 3)} of exact
        drafts'. The first token comes after {span(first)} times what it takes without speculation, and
        {span(theirs)} times with vLLM's drafter: the modules compute every row of a prompt that no hit saves.
        {_against_the_goal(rest, misses)} {_as_served()}
    """)


def _as_served() -> str:
    """Of a large shape, whose first token is not mostly the host's time as that of a tiny model on a GPU is."""
    settings = record(SHARED)["settings"]
    (length,), shared = settings["prompt_tokens"], settings["shared_prefix"]
    none, ours, theirs = (
        by_concurrency(SHARED, mode, str(length), "ttft_ms") for mode in ("none", "ours-v2", "upstream-v2")
    )
    over = [" and ".join(f"{times[x]['median'] / none[x]['median']:.2f}" for x in none) for times in (ours, theirs)]
    at_once = " and ".join(none)
    return (
        "A tiny model's first token on a GPU is mostly the host's time. As served, by Step-3.5's shape on an H200 with "
        f"{shared:.2f} of every prompt of {length} tokens in the cache, it comes after {over[0]} times what it takes "
        f"without speculation, drafting included, and {over[1]} times with vLLM's, with {at_once} requests at a time."
    )


def _against_the_goal(rest: list[float], misses: list[str]) -> str:
    if not rest:
        return "How much of that is drafting no record says yet."
    verdict = f"missed by {', '.join(misses)}" if misses else "met everywhere"
    return f"Without the time that drafting takes it is {span(rest)} times; the goal of {GOAL:.2f} is {verdict}."


def label(found: dict[str, Any]) -> str:
    settings, environment = found["settings"], found["environment"]
    machine = environment["device"] if environment["platform"] == "cuda" else "CPU"
    return f"{Path(settings['model']).name}, {settings['runner'].upper()}, {machine.removeprefix('NVIDIA ')}"


TABLES: dict[str, Callable[[], str]] = {"prefix-hits": prefix_hits, "prefix-says": prefix_says}
