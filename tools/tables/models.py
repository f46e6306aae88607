"""The README's table of models: what runs of their modules, whose drafts are accepted, and what the oracle compared."""

import json
from collections.abc import Callable

from tools.tables.records import RESULTS, record, show, table

# The model, what runs here and in vLLM, a record of acceptance where there is a trained tiny model, and the oracle's.
MODELS = (
    ("Step-3.5", "all; V1 the first over prompts, V2 all", "cpu-k3-p256", None),
    ("MiMo-V2 (Flash, Pro, Omni)", "all; the first, again and again", "mimo-v2-k3", ("mimo-v2",)),
    ("EXAONE-MoE", "all; the first, V2 all", None, ("exaone-moe", "exaone-moe-two-modules")),
    ("Qwen3.5", "all; the first", None, ("qwen3.5", "qwen3.5-two-modules")),
    ("MiMo, GLM-4.5, ERNIE 4.5, DeepSeek-V3", "the one", None, ("mimo", "glm4-moe", "ernie4.5-moe", "deepseek-v3")),
)


def models() -> str:
    rows = []
    for name, modules, accepted, names in MODELS:
        lengths = "-"
        if accepted is not None:
            ours, theirs = (record(accepted)["modes"][mode]["acceptance_length"] for mode in ("ours", "upstream"))
            lengths = f"{show(ours, 2)}; {show(theirs, 2)}"
        checked, wrong = compared(names)
        rows.append([name, modules, lengths, f"{checked / 1e6:.1f}M" + (f", {wrong} wrong" if wrong else "")])
    link = "[an entry is added](docs/adding_an_architecture.md)"
    rows.append(["others", f"vLLM's drafter, until {link}", "", ""])
    return table(["", "modules here; in vLLM", "accepted here; in vLLM", "rows exact"], rows)


def compared(names: tuple[str, ...] | None) -> tuple[int, int]:
    """Rows that the oracle has compared, and those that were wrong.

    Args:
        names: of tiny checkpoints; None: those of Step-3.5, which are the runs that name none.
    """
    found = (json.loads(path.read_text()) for path in RESULTS.glob("oracle-*.json"))
    runs = [run for file in found for run in (file if isinstance(file, list) else [file])]
    chosen = [run for run in runs if (names is None) == ("architecture" not in run)]
    chosen = [run for run in chosen if names is None or run["architecture"] in names]
    return sum(run["rows_checked"] for run in chosen), sum(run["rows_mismatched"] for run in chosen)


TABLES: dict[str, Callable[[], str]] = {"models": models}
