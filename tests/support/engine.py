"""Names that `test_docs.py` and `test_readme.py` still import from here; they belong to `tests.support.children`."""

from tests.support.children import ROOT, run_command

__all__ = ["ROOT", "run_command"]
