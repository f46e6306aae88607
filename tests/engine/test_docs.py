"""The pages do what they say: all links, and of extraction the program, the export and a short form of the draft head.

`tests/unit/test_figures.py` has the figures, `tests/engine/test_readme.py` the README.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.support.children import ROOT, run_command

PAGE = (ROOT / "docs" / "extraction.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_has_its_line_in_the_list_of_pages() -> None:
    listing = ROOT / "docs" / "README.md"
    listed = [(listing.parent / link).resolve() for link in LINK.findall(listing.read_text())]
    assert sorted(listed) == sorted(page for page in PAGES if page != listing)


def test_what_the_store_leaves_of_the_cache_is_what_the_page_says() -> None:
    done = run_command([sys.executable, "-m", "tests.support.layouts"])
    assert done.returncode == 0, done.stderr[-4000:]
    (table,) = re.findall(r"<!-- printed: tests.support.layouts -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert [line for line in done.stdout.splitlines() if line.startswith("|")] == table.splitlines()


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
    assert len(list((tmp_path / "out" / "hidden_states").glob("hs_*.safetensors"))) == 60


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "program.py").write_text(program.replace('"records"', repr(str(tmp_path / "records"))))
    done = run_command([sys.executable, str(tmp_path / "program.py")], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "torch.Size([" in done.stdout
    assert "layer_ids=(1, 3, 6)" in done.stdout
