"""The README's blocks do what it says: every one is run here, but for `make test`, which this is part of."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from vllm.utils.network_utils import get_open_port

from tests.support.children import ROOT, run_command
from tests.support.server import serving

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text()
BLOCKS = [(language, text) for language, text in BLOCK.findall(README)]
COMMANDS = [text.replace("\\\n", " ").strip() for language, text in BLOCKS if language == "bash"]
SERVE = [command for command in COMMANDS if "--speculative-config" in command]
REST = [line for command in COMMANDS if command not in SERVE for line in command.splitlines() if line != "make test"]
PARTS = ("mtp", "proposers", "bench", "tools")
MODULE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]


def test_the_readme_has_the_blocks_that_these_tests_run() -> None:
    assert "make demo" in REST
    assert len(SERVE) == 3
    assert {language for language, _ in BLOCKS} == {"bash", "python"}


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.split()) <= 700


def test_the_structure_has_a_line_for_every_module() -> None:
    structure = (ROOT / "docs" / "structure.md").read_text()
    modules = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    missing = {str(path.relative_to(ROOT)) for path in modules if path.name != "__init__.py"}
    missing = {path for path in missing if f"`{path}`" not in structure}
    assert missing == set()


@pytest.mark.parametrize("command", SERVE)
def test_a_serving_block_serves(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    if words[:2] == ["vllm", "serve"]:  # the CPU build's command does not start, as the README says
        words = [*MODULE, "--model", *words[2:]]
    else:
        assert words[:4] == ["VLLM_CPU_KVCACHE_SPACE=1", "python", *MODULE[1:]]  # as it is in every child
        words = [sys.executable, *words[2:]]
    with serving(tmp_path / "server.log", [*words, "--enforce-eager"], get_open_port()) as server:
        assert server.get("/health") == ""
    extracting = "extract_hidden_states" in command
    line = "ExtractHiddenStatesProposer keeps" if extracting else "v1.MultiGroupProposer drafts"
    assert line in server.log.read_text()


@pytest.mark.parametrize("command", REST)
def test_a_command_of_the_readme_succeeds(command: str) -> None:
    words = shlex.split(command)
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    done = run_command(words, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    if command == "make demo":
        assert "lossless: true" in done.stdout
        assert "proposers.v1.MultiGroupProposer" in done.stdout


@pytest.mark.parametrize("program", [text for language, text in BLOCKS if language == "python"])
def test_a_python_block_runs(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    done = run_command([sys.executable, str(tmp_path / "program.py")], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip()
