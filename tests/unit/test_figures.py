"""No page says a figure that its record doesn't: tables are what `python -m tools.tables` makes of the records."""

import re
from pathlib import Path

import pytest

from tools.tables import cpu, gpu, page, picture, prefix, records, serving

ROOT = page.ROOT
PAGES = [ROOT / name for name in page.PAGES]
PROSE = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
PRINTED = re.compile(r"^<!-- printed: .*?^<!-- end -->$", re.MULTILINE | re.DOTALL)  # tests/engine/test_docs.py
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)

# What a stranger would take for a measurement.
FIGURE = re.compile(r"\d+\.\d+|\b\d[\d,]*\s?(?:tokens/s|tokens per second|ms\b|µs|%|times\b|x\b)")
# Releases of vLLM, of models and of this package.
RELEASES = re.compile(
    r"\b0\.3[23]\b|\b0\.1\.0\b|Step-3\.5|GLM-4\.5|ERNIE 4\.5|Qwen3\.5|Llama-3\.1|Apache-2\.0|Python 3\.11|"
    r"speculators 0\.9|ModelOpt 0\.4[57](?: to 0\.47)?|SpecForge 0\.2"
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_pages_tables_are_what_the_records_say(path: Path) -> None:
    assert path.read_text() == page.fill(path.read_text()), "python -m tools.tables writes them anew"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_another_figure_in_a_page_would_be_seen(path: Path) -> None:
    text = path.read_text()
    for found in page.BLOCK.finditer(text):
        figure = re.search(r"\d+\.\d+|\d+", found[3])
        assert figure is not None, found[2]
        start = found.start(3) + figure.start()
        changed = text[:start] + "98765" + text[found.start(3) + figure.end() :]
        assert page.fill(changed) == text


def test_another_figure_in_a_record_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = records.record("cpu-k3-p256")["modes"]["ours"]["output_tokens_per_s"]["4"]
    monkeypatch.setitem(speeds, "median", speeds["median"] + 1)
    text = (ROOT / "docs" / "performance.md").read_text()
    assert page.fill(text) != text
    assert not picture_shows_the_records()


def test_the_picture_shows_the_records() -> None:
    assert picture_shows_the_records()


def picture_shows_the_records() -> bool:
    """Whether its bars have the labels that would be drawn now, in that order."""
    drawn = re.findall(r"<text [^>]*rotate\(-90[^>]*>([\d,]+)</text>", (ROOT / picture.PICTURE).read_text())
    speeds = (batch[i] for panel in picture.panels() for i in range(len(picture.COLOURS)) for batch in panel.speeds)
    return drawn == [picture.label(speed) for speed in speeds]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_figure_stands_outside_of_what_is_written_from_records(path: Path) -> None:
    rest = path.read_text()
    for part in (page.BLOCK, PRINTED, CODE, RELEASES):
        rest = part.sub("", rest)
    assert FIGURE.findall(rest) == []


def test_every_table_stands_in_a_page() -> None:
    standing = {found[2] for path in PAGES for found in page.BLOCK.finditer(path.read_text())}
    assert standing == page.TABLES.keys()


def test_every_record_is_quoted() -> None:
    records.record.cache_clear()
    quoted: set[str] = set()
    read = records.record.__wrapped__
    with pytest.MonkeyPatch.context() as patched:
        for module in (gpu, cpu, serving, prefix, page.cheap, page.extraction, page.oracle):
            patched.setattr(module, "record", lambda name: quoted.add(name) or read(name))
        for make in page.TABLES.values():
            make()
    kept = {path.stem for path in records.RESULTS.glob("*.json") if not path.stem.startswith("oracle-")}
    assert kept == quoted


def test_every_other_file_beside_the_records_is_linked() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    others = {path.name for path in records.RESULTS.iterdir() if path.suffix != ".json"}
    assert {name for name in others if f"results/{name}" not in text} == set()


def test_what_the_sentences_conclude_is_so() -> None:
    """The words around the figures of `cpu-says` and `gpu-says`."""
    for prompt in cpu.CPU_PROMPTS:
        for batch in map(str, cpu.cpu(prompt)["settings"]["batches"]):
            none, theirs, ours = cpu.cpu_speeds(prompt, batch)
            assert ours > theirs
            assert ours > none or batch == "16"
    assert min(ours / none for none, _, ours in (cpu.cpu_speeds(prompt, "16") for prompt in cpu.CPU_PROMPTS)) < 1
    assert min(gpu.SHORT.ratios(gpu.TOKENS, "ours-v2", "none")) > 1
    assert min(gpu.SHORT.ratios(gpu.TOKENS, "ours-v2", "upstream-v2")) > 1
    assert max(gpu.SHORT.ratios("ttft_ms", "ours", "upstream-v1")) > 1
    for mode in ("ours-v2", "upstream-v2"):
        assert min(gpu.LONG.ratios(gpu.TOKENS, mode, "none")) < 1
