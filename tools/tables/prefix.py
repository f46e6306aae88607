"""What prefix hits are with and without drafts, by `bench prefix`: one record for each model and runner."""

from collections.abc import Callable
from typing import Any

from tools.tables.records import RESULTS, record, sentences, show, span, table

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
                times = (entry["ttft_ms"], entry["output_tokens_per_s"])
                rows.append(
                    [
                        f"{settings['model']}, {settings['runner'].upper()}",
                        LABELS[name],
                        MODES[mode],
                        f"{entry['hit_tokens']} ({share:.2f})",
                        show(entry["acceptance_length"], 2),
                        show(entry["acceptance_vs_reference"], 3),
                        *("-" if is_interpreted(settings) else show(time, 1) for time in times),
                    ]
                )
    if not rows:
        return "There is no record yet (`bench/results/prefix-*.json`)."
    head = ["model, runner", "scenario", "drafts by", "hit tokens (of all)", "acceptance length", "of exact drafts'"]
    return table([*head, "TTFT, ms", "tokens/s"], rows)


def is_interpreted(settings: dict[str, Any]) -> bool:
    """Whether Triton's interpreter ran kernels of the engines (`bench.prefix.defaults`): then times say nothing."""
    return bool(settings["engine"].get("enforce_eager"))


def prefix_says() -> str:
    hits, exact, first, theirs = [], [], [], []
    for path in sorted(RESULTS.glob("prefix-*.json")):
        for scenario in record(path.stem)["scenarios"].values():
            none, upstream, ours = (scenario["modes"][mode] for mode in ("none", "upstream", "ours"))
            hits.append(ours["hit_tokens"] / none["hit_tokens"])
            exact.append(ours["acceptance_vs_reference"])
            if is_interpreted(record(path.stem)["settings"]):
                continue
            first.append(ours["ttft_ms"] / none["ttft_ms"])
            theirs.append(upstream["ttft_ms"] / none["ttft_ms"])
    return sentences(f"""
        This package's hits are {span(hits)} of those without speculation, and its acceptance {span(exact, 3)} of exact
        drafts'. The first token comes after {span(first)} times what it takes without speculation, and
        {span(theirs)} times with vLLM's drafter: the modules compute every row of a prompt that no hit saves, which on
        models of six layers is half the work besides, and eagerly on a CPU. So the goal of 1.10 and the modules' own
        time is not shown to be met.
    """)


TABLES: dict[str, Callable[[], str]] = {"prefix-hits": prefix_hits, "prefix-says": prefix_says}
