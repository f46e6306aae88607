"""`docs/adding_an_architecture.md`, followed literally: an entry, a checkpoint and a reference, on both runners."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture
from proposers.models import glm4_moe
from tests.support.children import ROOT, run_command

PAGE = (ROOT / "docs" / "adding_an_architecture.md").read_text()
FILES = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line for text in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in text.splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, and what its commands before the oracle's make."""
    made = tmp_path_factory.mktemp("page")
    for name, text in FILES:
        (made / name).write_text(text)
    for command in COMMANDS:
        if "oracle" not in command:
            run(command, made)
    return made


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "python"
    done = run_command([sys.executable, *words[1:]], cwd=folder, PYTHONPATH=f"{folder}:{ROOT}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def test_the_pages_entry_is_the_one_that_is_shipped() -> None:
    assert {name for name, _ in FILES} == {"glm_entry.py", "glm_checkpoint.py", "glm_reference.py"}
    entry = 'Architecture(DraftDescriptor("Glm4MoeMTPModel"), module_weights="model.layers.{layer}.")'
    assert f"register({entry})" in dict(FILES)["glm_entry.py"]
    assert (
        Architecture(DraftDescriptor("Glm4MoeMTPModel"), module_weights="model.layers.{layer}.")
        == glm4_moe.ARCHITECTURE
    )
    assert [("--runner v2" in command) for command in COMMANDS if "oracle" in command] == [False, True]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "oracle" in command])
def test_every_row_and_every_draft_of_the_new_architecture_is_right(command: str, folder: Path) -> None:
    printed = run(command, folder)
    report: dict[str, Any] = json.loads(printed[printed.index("{\n") :])
    assert report["rows_mismatched"] == report["drafts_mismatched"] == report["slots_mismatched"] == 0
    assert report["rows_checked"] > 5_000
    assert report["drafts_checked"] > 100
    assert report["slots_checked"] > 500
    # The target of the engine is that of the page's reference, or its rows would say nothing.
    assert report["max_target_error"] < 1e-4
    accepted = [k for k in report["events"]["rejections"] if int(k) < 3]
    assert accepted, "no draft was ever accepted"
