"""Child processes of the tests, which import this checkout and see nothing of the developer's own settings."""

import os
import subprocess
import sys
from pathlib import Path

from bench import processes

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "assets" / "tiny-step3p5")
MIMO_V2 = str(ROOT / "assets" / "tiny-mimo-v2")
TIME_LIMIT_S = 400


class ChildFailedError(AssertionError):
    """The process failed; the message ends with what it printed."""


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a child whose engine runs a small model, and which imports this checkout wherever it runs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return processes.child_environment(PYTHONPATH=path) | variables


def run_command(
    command: list[str], timeout: float = TIME_LIMIT_S, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command and takes down what it prints; its exit status is the caller's."""
    return subprocess.run(
        command,
        env=child_environment(**variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(code: str, **variables: str) -> str:
    """What `python -c code` prints, standard error before standard output.

    Raises:
        ChildFailedError: it failed.
    """
    child = run_command([sys.executable, "-c", code], TIME_LIMIT_S, **variables)
    printed = child.stderr + child.stdout
    if child.returncode != 0:
        raise ChildFailedError(f"python -c exited with {child.returncode}:\n{printed}")
    return printed
