"""What cheap drafts cost: on a GPU, by `bench gpu` in one run by turns, and in acceptance, by `bench compare`."""

from collections.abc import Callable, Iterator
from typing import Any

from bench.spread import show_quartiles
from tools.tables.gpu import MODES, Run
from tools.tables.records import RESULTS, record, sentences, show, table

CHEAP, FULL, THEIRS = "ours-v2-cheap", "ours-v2", "upstream-v2"
RUN = Run("1", "gpu-real-vocabulary", "256")
ON_TWO = Run("2", "gpu-real-vocabulary-tp2", "256")
PROMPTS = Run("prompts", "gpu-h200-prompts", "4096")
GOALS = {RUN: {"1": 0.65, "8": 0.65, "32": 0.68, "64": 0.68}, ON_TWO: dict.fromkeys(("1", "8", "32", "64"), 0.75)}

MODELS = {"step3p5": "Step-3.5", "mimo-v2": "MiMo-V2"}
LISTS = (("step3p5", 832), ("step3p5", 640), ("step3p5", 256), ("mimo-v2", 832), ("mimo-v2", 640))
ACCEPTANCE_GOAL = 0.98


def runs() -> list[Run]:
    """Those that were measured."""
    return [run for run in GOALS if (RESULTS / f"{run.name}.json").exists()]


def busy(run: Run, mode: str, batch: str) -> float | None:
    """In ms a step, without waits for another GPU."""
    found = run.get(mode, "gpu_busy_ms", batch)
    return None if found is None else found - (run.get(mode, "gpu_waiting_ms", batch) or 0.0)


def ratio(run: Run, mode: str, batch: str) -> float | None:
    """Over vLLM's."""
    found, theirs = busy(run, mode, batch), busy(run, THEIRS, batch)
    return None if found is None or theirs is None else found / theirs


def cheap_on_gpu() -> str:
    rows = []
    for run in runs():
        for batch in run.batches:
            spent = [show_busy(run, mode, batch) for mode in (THEIRS, FULL, CHEAP)]
            over = [show(ratio(run, mode, batch), 2) for mode in (FULL, CHEAP)]
            rows.append([run.label, batch, *spent, *over, show(GOALS[run][batch], 2)])
    head = ["GPUs", "batch", MODES[THEIRS], MODES[FULL], "with both options", "full over vLLM's", "cheap over vLLM's"]
    return table([*head, "goal"], rows)


def show_busy(run: Run, mode: str, batch: str) -> str:
    """With its spread, where a step was profiled more than once."""
    spread = run.cell(mode, "gpu_working_ms", batch)
    return show_quartiles(spread) if spread else show(busy(run, mode, batch), 2)


def cheap_where() -> str:
    """Where the device's time goes in a step, in ms."""
    rows = []
    for batch in (RUN.batches[0], RUN.batches[-1]):
        spent = [RUN.cell(mode, "gpu_ms_by_family", batch) for mode in (THEIRS, FULL, CHEAP)]
        for family in spent[0]:
            rows.append([batch, family, *(show(of_mode.get(family, 0.0), 2) for of_mode in spent)])
    return table(["batch", "ms of", MODES[THEIRS], MODES[FULL], "with both options"], rows)


def cheap_says() -> str:
    missed = []
    for run in runs():
        for batch in run.batches:
            reached, goal = ratio(run, CHEAP, batch) or 1.0, GOALS[run][batch]
            if round(reached, 2) > goal:
                gpus = "" if run is RUN else f" on {run.label} GPUs"
                missed.append(f"{reached:.2f} with {batch} requests{gpus}, where it was {goal}")
    waits = [ON_TWO.get(mode, "gpu_waiting_ms", batch) or 0.0 for mode in (THEIRS, CHEAP) for batch in ON_TWO.batches]
    steps = [f"{ON_TWO.ratio('step_ms', CHEAP, THEIRS, batch) or 1.0:.2f} with {batch}" for batch in ON_TWO.batches]
    return sentences(f"""
        The goal is {"missed: " + "; ".join(missed) if missed else "met"}. On two GPUs the first waited up to
        {max(waits):.1f} ms a step for the other, which is left out; the host is the slower one there, and a whole step
        takes {", ".join(steps)} requests of the time of vLLM's.
    """)


def prompts() -> str:
    """What the rows of prompts that no draft depends on take."""
    found = record("prompts-cpu")
    modes, (batch,) = found["modes"], map(str, found["settings"]["batches"])
    none, all_rows, last = (modes[mode]["ttft_ms"][batch] for mode in ("none", "ours-all-rows", "ours"))
    drafting = [ttft["median"] - none["median"] for ttft in (all_rows, last)]
    return sentences(f"""
        On one CPU core the tiny MiMo-V2, whose windows have 64 tokens, has the first tokens of {batch} prompts of
        {found["settings"]["prompt_tokens"]} tokens after {show_quartiles(all_rows, 0)} ms where the modules run over
        all rows, {show_quartiles(last, 0)} where they run over the last ones, and {show_quartiles(none, 0)} without
        speculation: of what drafting adds, {1 - drafting[1] / drafting[0]:.2f} is gone. Acceptance is that of exact
        drafts in both. {_prompts_on_gpu()}
    """)


def _prompts_on_gpu() -> str:
    settings, modes = record(PROMPTS.name)["settings"], ("none", "ours-v2-all-rows", "ours-v2")
    alone, many = PROMPTS.batches
    ttft = [PROMPTS.cell(mode, "ttft_ms", alone) for mode in modes]
    none, all_rows, last = (times["median"] for times in ttft)
    shown = [show_quartiles(times, 1) for times in ttft]
    speeds = [show_quartiles(PROMPTS.cell(mode, "output_tokens_per_s", many), 0) for mode in modes]
    return sentences(f"""
        On an H200, with {settings["layers"]} layers of Step-3.5's shape, prompts of {PROMPTS.prompt} tokens and a
        vocabulary of {settings["vocab_size"]}, it is {shown[1]} ms, {shown[2]} and {shown[0]} for a prompt alone, so
        {1 - (last - none) / (all_rows - none):.2f} is gone; {many} requests of {settings["output_tokens"]} new tokens
        have {speeds[1]} tokens/s, {speeds[2]} and {speeds[0]}.
    """)


def acceptance() -> Iterator[tuple[str, dict[str, Any], dict[str, float]]]:
    """Of each model and list, the model's name, the record's settings and the acceptance length of each mode."""
    for model, size in LISTS:
        found = record(f"cheap-acceptance-{model}-{size}")
        lengths = {mode: entry["acceptance_length"] for mode, entry in found["modes"].items()}
        yield MODELS[model], found["settings"], lengths


def cheap_acceptance() -> str:
    rows = []
    for name, settings, lengths in acceptance():
        listed = settings["draft_vocabulary"]
        ratios = [show(lengths[f"ours-{kind}"] / lengths["ours"], 3) for kind in ("fp8", "vocabulary", "cheap")]
        coverage = f"{100 * listed['coverage']:.1f} %"
        rows.append([name, str(listed["size"]), coverage, show(lengths["ours"], 3), *ratios, show(ACCEPTANCE_GOAL, 2)])
    head = ["tiny model", "tokens of 1024", "coverage", "full drafts", "8 bits", "the list", "both", "goal"]
    return table(head, rows)


def cheap_acceptance_says() -> str:
    met = [s["draft_vocabulary"] for _, s, lengths in acceptance() if _ratio(lengths) >= ACCEPTANCE_GOAL]
    missed = [s["draft_vocabulary"] for _, s, lengths in acceptance() if _ratio(lengths) < ACCEPTANCE_GOAL]
    least, most = min(x["coverage"] for x in met), max(x["coverage"] for x in missed)
    return sentences(f"""
        The goal is met where the list covers {100 * least:.1f} % of text, and missed where it covers {100 * most:.1f} %
        or less. Weights of 8 bits hardly cost anything.
    """)


def _ratio(lengths: dict[str, float]) -> float:
    return round(lengths["ours-cheap"] / lengths["ours"], 3)


TABLES: dict[str, Callable[[], str]] = {
    "cheap-on-gpu": cheap_on_gpu,
    "cheap-where": cheap_where,
    "cheap-prompts": prompts,
    "cheap-says": cheap_says,
    "cheap-acceptance": cheap_acceptance,
    "cheap-acceptance-says": cheap_acceptance_says,
}
