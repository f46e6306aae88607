"""What was measured as served, by `bench serve` and `bench gpu --arrivals`."""

from collections.abc import Callable
from typing import Any

from bench.spread import show_quartiles
from tools.tables.records import record, sentences, show, show_ratio, span, table

SERVED, LONGER, LONGER_LATER = "serving-h200", "serving-h200-long", "serving-h200-long-cut"
SHARED, ON_V1, MIMO_V2 = "serving-h200-shared", "serving-h200-v1", "serving-h200-mimo-v2"
ARRIVALS, PARTS = "arrivals-h200", "arrivals-h200-parts"
MODES = {"none": "no speculation", "upstream-v2": "vLLM's on V2", "ours-v2": "this package on V2"}
MODES_ON_V1 = {"upstream-v1": "vLLM's on V1", "ours": "this package on V1"}
CHEAP = "ours-v2-cheap"
CONTROLLER = {"ours-v2-adaptive": "with the controller"}
TOKENS = "output_tokens_per_s"
# Goals of the ratios, over vLLM's speculator and over no speculation.
GOALS = {"upstream-v2": 1.25, "none": 1.3}
PROPOSE_GOAL = 0.6  # ms of the host in a step with a prompt
CHEAP_GOAL = {"1": 1.35, "8": 1.35}


def by_concurrency(name: str, mode: str, length: str, figure: str) -> dict[str, Any]:
    """Quartiles of a record, of as many cells as were measured before a run was cut off."""
    return dict(record(name)["modes"][mode]["prompts"].get(length, {}).get(figure, {}))


def served(figure: str, mode: str) -> dict[str, Any]:
    """By concurrency, of prompts of 256 tokens."""
    return by_concurrency(SERVED, mode, "256", figure)


def speeds() -> dict[str, list[float]]:
    """Tokens/s of each of `MODES`, by concurrency."""
    return {x: [served(TOKENS, mode)[x]["median"] for mode in MODES] for x in served(TOKENS, "none")}


def ratios(base: str, mode: str = "ours-v2") -> dict[str, float]:
    """Of this package's tokens/s, by concurrency."""
    ours, theirs = served(TOKENS, mode), served(TOKENS, base)
    return {concurrency: ours[concurrency]["median"] / theirs[concurrency]["median"] for concurrency in ours}


def shown_modes(name: str) -> dict[str, str]:
    """Those of a record that its tables show, the controller's where it was measured."""
    return {mode: words for mode, words in (MODES | MODES_ON_V1 | CONTROLLER).items() if mode in record(name)["modes"]}


def tokens() -> str:
    modes = shown_modes(SERVED)
    over = {"over vLLM's": ratios("upstream-v2"), "over no speculation": ratios("none")}
    for mode in modes.keys() & CONTROLLER.keys():
        over[f"{modes[mode]} over no speculation"] = ratios("none", mode)
    rows = []
    for concurrency in served(TOKENS, "none"):
        cells = (show_quartiles(served(TOKENS, mode)[concurrency], 0) for mode in modes)
        rows.append([concurrency, *cells, *(show_ratio(by[concurrency]) for by in over.values())])
    return table(["requests at a time", *modes.values(), *over], rows)


def cheap() -> str:
    over = [ratios("upstream-v2", mode) for mode in ("ours-v2", CHEAP)]
    rows = []
    for concurrency in served(TOKENS, CHEAP):
        cells = [show_quartiles(served(TOKENS, mode)[concurrency], 0) for mode in ("upstream-v2", "ours-v2", CHEAP)]
        goal = show(CHEAP_GOAL.get(concurrency), 2)
        rows.append([concurrency, *cells, *(show_ratio(by[concurrency]) for by in over), goal])
    head = ["requests at a time", MODES["upstream-v2"], MODES["ours-v2"], "with both options"]
    return table([*head, "full over vLLM's", "cheap over vLLM's", "goal"], rows)


def cells(name: str) -> str:
    """Every cell of a record that has one turn: medians of requests, so there is no spread of turns to show."""
    settings, words, rows = record(name)["settings"], shown_modes(name), []
    bases = {mode: "vLLM's" for mode in words if mode.startswith("upstream")} | {"none": MODES["none"]}
    over = [(mode, base) for mode in words if mode not in bases for base in bases]
    for length in map(str, settings["prompt_tokens"]):
        for concurrency in map(str, settings["concurrency"]):
            speeds, firsts = (
                {mode: cell(name, mode, length, figure, concurrency) for mode in words}
                for figure in (TOKENS, "ttft_ms")
            )
            shown = (show(x, 0) for x in (*speeds.values(), *firsts.values()))
            rows.append([length, concurrency, *shown, *(quotient(speeds[mode], speeds[base]) for mode, base in over)])
    head = [f"{figure}, {name}" for figure in ("tokens/s", "first token, ms") for name in words.values()]
    head += [f"{words[mode] + ' ' if mode in CONTROLLER else ''}over {bases[base]}" for mode, base in over]
    return table(["prompt", "requests at a time", *head], rows)


def cell(name: str, mode: str, length: str, figure: str, concurrency: str) -> float | None:
    """A median; None where the run was cut off before."""
    found = by_concurrency(name, mode, length, figure).get(concurrency)
    return found and float(found["median"])


def quotient(value: float | None, base: float | None) -> str:
    return "-" if value is None or base is None else show_ratio(value / base)


def latency() -> str:
    rows = []
    for figure, digits in (("ttft_ms", 0), ("ttft_p99_ms", 0), ("tpot_ms", 2), ("tpot_p99_ms", 2), ("itl_p99_ms", 1)):
        for concurrency in served(TOKENS, "none"):
            cells = (show_quartiles(served(figure, mode)[concurrency], digits) for mode in MODES)
            rows.append([f"`{figure}`", concurrency, *cells])
    return table(["", "requests at a time", *MODES.values()], rows)


def says() -> str:
    theirs, none = ratios("upstream-v2"), ratios("none")
    ours, upstream = served("ttft_ms", "ours-v2"), served("ttft_ms", "upstream-v2")
    first = [ours[concurrency]["median"] / upstream[concurrency]["median"] for concurrency in ours]
    missed = [
        f"{found[concurrency]:.2f} of {MODES[base]} with {concurrency} at a time"
        for base, found in (("upstream-v2", theirs), ("none", none))
        for concurrency in found
        if found[concurrency] < GOALS[base]
    ]
    return sentences(f"""
        This package serves {span(theirs.values())} times the tokens/s of vLLM's speculator and {span(none.values())}
        times those of no speculation. The first token of a request comes after {span(first)} of the time that it takes
        with vLLM's. The goals were {GOALS["upstream-v2"]} and {GOALS["none"]} everywhere; missed:
        {", ".join(missed) or "none"}.
    """)


def arrivals() -> str:
    modes, rows = record(ARRIVALS)["modes"], []
    figures = (("step_ms", 1), ("propose_host_ms", 2), ("gpu_busy_ms", 2), ("num_steps", 0))
    for figure, digits in figures:
        for kind in ("with_prompt", "without_prompt"):
            for batch in map(str, record(ARRIVALS)["settings"]["batches"]):
                found = [mode["prompts"]["256"][figure][batch][kind] for mode in modes.values()]
                cells = [
                    show_quartiles(cell, digits) if isinstance(cell, dict) else show(cell, digits) for cell in found
                ]
                rows.append([f"`{figure}`", kind.replace("_", " a "), batch, *cells])
    for batch in map(str, record(ARRIVALS)["settings"]["batches"]):
        shares = (show(mode["prompts"]["256"]["share_of_time_with_prompt"][batch], 2) for mode in modes.values())
        rows.append(["share of all time", "with a prompt", batch, *shares])
    return table(["", "steps", "requests at a time", *MODES.values()], rows)


def arrivals_say() -> str:
    ours, theirs = (record(PARTS)["modes"][mode]["prompts"]["256"] for mode in ("ours-v2", "upstream-v2"))
    batches = [str(batch) for batch in record(PARTS)["settings"]["batches"]]
    propose = [ours["propose_host_ms"][batch]["with_prompt"] for batch in batches]
    before = [theirs["propose_host_ms"][batch]["with_prompt"]["median"] for batch in batches]
    idle = [
        1 - ours["gpu_busy_ms"][batch]["with_prompt"] / ours["step_ms"][batch]["with_prompt"]["median"]
        for batch in batches
    ]
    medians, slow = [found["median"] for found in propose], [found["q3"] for found in propose]
    reached = "reached" if max(medians) <= PROPOSE_GOAL else "missed"
    return sentences(f"""
        In a step with a prompt this package's draft pass takes the host {span(medians)} ms (a quarter of them more than
        {span(slow)}), and vLLM's {span(before)} ms: it is one captured graph, too. The goal, {PROPOSE_GOAL} ms, is
        {reached}. The GPU still idles for {span(idle)} of such a step: the target runs eagerly where it computes a
        prompt, which is the host's time, with and without speculation.
    """)


def longer_says() -> str:
    """Of a later run of more concurrencies, whose last cell is missing."""
    modes = record(LONGER_LATER)["modes"]
    found = []
    for length, figures in modes["ours-v2"]["prompts"].items():
        ours = figures[TOKENS]
        over = {
            x: [ours[x]["median"] / modes[base]["prompts"][length][TOKENS][x]["median"] for base in GOALS] for x in ours
        }
        cells = "; ".join(f"{theirs:.2f} and {none:.2f} at {x}" for x, (theirs, none) in over.items())
        found.append(f"with prompts of {length} {cells}")
    return sentences(f"""
        A later run, of more requests at a time and only as far as the device's time went, gave these multiples of
        vLLM's tokens/s and of no speculation's: {", and ".join(found)}. Below one is slower.
    """)


def shared_says() -> str:
    settings = record(SHARED)["settings"]
    (length,) = settings["prompt_tokens"]
    return sentences(f"""
        The same with {settings["shared_prefix"]:.2f} of every prompt of {length} tokens the same in all, which the
        prefix cache has:
    """)


def parts() -> str:
    """Where the host's time goes in a step, in ms."""
    modes, settings = record(PARTS)["modes"], record(PARTS)["settings"]
    names = {"upstream-v2": MODES["upstream-v2"], "ours-v2": MODES["ours-v2"]}
    rows = []
    for batch in map(str, settings["batches"]):
        for kind in ("with_prompt", "without_prompt"):
            by_mode = [modes[mode]["prompts"]["256"] for mode in names]
            spent = [found["host_ms"][batch][kind] for found in by_mode]
            for part in spent[0]:
                rows.append([kind.replace("_", " a "), part, *(show(parts[part], 2) for parts in spent)])
            steps = (show_quartiles(found["step_ms"][batch][kind], 1) for found in by_mode)
            rows.append([kind.replace("_", " a "), "the whole step", *steps])
    return table(["steps", "part", *names.values()], rows)


TABLES: dict[str, Callable[[], str]] = {
    "served-tokens": tokens,
    "served-latency": latency,
    "served-says": says,
    "served-cheap": cheap,
    "served-longer": lambda: cells(LONGER),
    "served-longer-says": longer_says,
    "served-shared": lambda: cells(SHARED),
    "served-shared-says": shared_says,
    "served-mimo-v2": lambda: cells(MIMO_V2),
    "served-v1": lambda: cells(ON_V1),
    "host-parts": parts,
    "arrivals": arrivals,
    "arrivals-say": arrivals_say,
}
