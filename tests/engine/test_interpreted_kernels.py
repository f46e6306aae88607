"""The kernels without a GPU: Triton's interpreter runs them line by line."""

import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.support.children import run_command


def test_the_kernels_are_their_pytorch_versions_under_the_interpreter(tmp_path: Path) -> None:
    # Only some of the random windows, which take the interpreter a second each.
    some = ["-k", "not test_a_window_holds or 5-", "--junit-xml", str(tmp_path / "report.xml")]
    child = run_command([sys.executable, "-m", "pytest", "tests/gpu", *some], TRITON_INTERPRET="1")
    assert child.returncode == 0, child.stdout[-6000:]
    report = ElementTree.parse(tmp_path / "report.xml").getroot()[0].attrib
    assert int(report["tests"]) > 50
    assert report["skipped"] == report["failures"] == report["errors"] == "0"
