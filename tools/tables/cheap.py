"""What cheap drafts cost on a GPU, by `bench gpu` in one run by turns."""

from collections.abc import Callable

from tools.tables.gpu import MODES, Run
from tools.tables.records import sentences, show, table

RUN = Run("8 layers, prompts of 256", "gpu-real-vocabulary", "256")
CHEAP, FULL, THEIRS = "ours-v2-cheap", "ours-v2", "upstream-v2"
GOALS = {"1": 0.65, "8": 0.65, "32": 0.68, "64": 0.68}


def cheap_on_gpu() -> str:
    rows = []
    for batch in RUN.batches:
        busy = [show(RUN.get(mode, "gpu_busy_ms", batch), 2) for mode in (THEIRS, FULL, CHEAP)]
        ratios = [show(RUN.ratio("gpu_busy_ms", mode, THEIRS, batch), 2) for mode in (FULL, CHEAP)]
        rows.append([batch, *busy, *ratios, show(GOALS[batch], 2)])
    head = ["batch", MODES[THEIRS], MODES[FULL], "with both options", "full over vLLM's", "cheap over vLLM's", "goal"]
    return table(head, rows)


def cheap_says() -> str:
    found = {batch: RUN.ratio("gpu_busy_ms", CHEAP, THEIRS, batch) or 1.0 for batch in RUN.batches}
    missed = [
        f"{ratio:.2f} with {batch} requests, where it was {GOALS[batch]}"
        for batch, ratio in found.items()
        if round(ratio, 2) > GOALS[batch]
    ]
    return sentences(f"The goal is {'missed: ' + '; '.join(missed) if missed else 'met'}.")


TABLES: dict[str, Callable[[], str]] = {"cheap-on-gpu": cheap_on_gpu, "cheap-says": cheap_says}
