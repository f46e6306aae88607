"""Former place of these names, for `test_docs.py` and `test_readme.py`, which still import some of them from here."""

from tests.support.children import ROOT, TINY, ChildFailedError, child_environment, run_command, run_python
from tests.support.engine_arguments import ENGINE, mtp
from tests.support.forked_engine import Run, run

__all__ = [
    "ENGINE",
    "ROOT",
    "TINY",
    "ChildFailedError",
    "Run",
    "child_environment",
    "mtp",
    "run",
    "run_command",
    "run_python",
]
