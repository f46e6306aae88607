"""The page about extraction does what it says: its program, its export, and the draft head in a short form."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.engine import ROOT, run_command

PAGE = (ROOT / "docs" / "extraction.md").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the example prints, and its records."""
    records = tmp_path_factory.mktemp("example") / "records"
    short = ["--count", "60", "--tokens", "64", "--steps", "60"]
    done = run_command([sys.executable, "docs/train_draft_head.py", "--records", str(records), *short])
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, records


def test_a_draft_head_learns_from_the_records(trained: tuple[str, Path]) -> None:
    before, after = map(float, re.findall(r"(\d\.\d+) before, (\d\.\d+) after", trained[0])[0])
    assert before < 0.02
    assert after > 0.1  # a guess of the commonest token is right at 0.07


def test_the_records_of_the_example_can_be_exported_as_the_page_says(trained: tuple[str, Path], tmp_path: Path) -> None:
    (command,) = re.findall(r"^python (-m proposers.hidden_states export .*)$", PAGE, re.MULTILINE)
    words = command.replace(" records ", f" {trained[1]} ").replace("for-speculators", str(tmp_path / "out")).split()
    done = run_command([sys.executable, *words])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "60 records for speculators" in done.stdout
    assert len(list((tmp_path / "out").glob("hs_*.safetensors"))) == 60


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "program.py").write_text(program.replace('"records"', repr(str(tmp_path / "records"))))
    done = run_command([sys.executable, str(tmp_path / "program.py")], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "torch.Size([" in done.stdout
    assert "layer_ids=(1, 3, 6)" in done.stdout
