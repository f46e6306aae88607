"""A page's tables, each between `<!-- table: NAME -->` and `<!-- end -->`.

What stands between them is written by the function of that name and by nobody else, so that no figure of a page can
differ from the record that it quotes; `tests/unit/test_figures.py` holds the pages against the records.
"""

import re
from collections.abc import Callable

from tools.tables import cheap, cpu, extraction, gpu, models, oracle, prefix, records, serving

ROOT = records.RESULTS.parent.parent
PAGES = (
    "README.md",
    "docs/performance.md",
    "docs/cheap_drafts.md",
    "docs/prefix.md",
    "docs/extraction.md",
    "docs/architectures.md",
    "bench/results/serving.md",
)
BLOCK = re.compile(r"^(<!-- table: ([\w-]+) -->\n)(.*?)^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {
    "records": records.table_of_records,
    **gpu.TABLES,
    **serving.TABLES,
    **cpu.TABLES,
    **oracle.TABLES,
    **extraction.TABLES,
    **prefix.TABLES,
    **cheap.TABLES,
    **models.TABLES,
}


def fill(text: str) -> str:
    """The page with each of its tables written anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", text)
