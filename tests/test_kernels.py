"""The kernels without a GPU: Triton's interpreter runs them line by line."""

import sys

from tests.engine import run_command


def test_the_kernels_are_their_pytorch_versions_under_the_interpreter() -> None:
    child = run_command([sys.executable, "-m", "pytest", "tests/gpu"], TRITON_INTERPRET="1")
    assert child.returncode == 0, child.stdout[-6000:]
    assert "passed" in child.stdout or "100%" in child.stdout
