"""What the collector makes of data, and of what is in its folder already, without an engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from proposers.hidden_states.backends import Outcome, Request
from proposers.hidden_states.collect import Collector, Report, Task
from proposers.hidden_states.conversations import Lines, Renderer
from tests.support.chat_templates import THAT_REWRITES, WITH_BLOCKS, WITHOUT_BLOCKS
from tests.support.children import TINY

TALK = [
    {"role": "user", "content": "import os"},
    {"role": "assistant", "content": "os.path.join(a, b)"},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "return None"},
]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in TALK]


def render(entry: Any, template: str = WITHOUT_BLOCKS) -> Any:
    return Renderer(TINY, template).render(json.dumps(entry).encode())


def learnt(entry: Any, template: str = WITHOUT_BLOCKS) -> str:
    """The text of the tokens that the mask has."""
    rendered, renderer = render(entry, template), Renderer(TINY, template)
    assert len(rendered.mask) == len(rendered.token_ids)
    kept = [t for t, bit in zip(rendered.token_ids, rendered.mask, strict=True) if bit]
    return str(renderer._tokenizer.decode(kept))


@pytest.mark.parametrize("template", [WITHOUT_BLOCKS, WITH_BLOCKS], ids=["by prefixes", "by blocks"])
def test_the_mask_is_on_what_the_assistant_says(template: str) -> None:
    assert learnt({"messages": TALK}, template) == "os.path.join(a, b)</>return None</>"
    assert learnt({"conversations": SHAREGPT}, template) == "os.path.join(a, b)</>return None</>"
    assert not render({"messages": TALK}, template).wants_answer


def test_where_the_user_has_the_last_word_an_answer_is_wanted() -> None:
    rendered = render({"messages": TALK[:3]})
    assert rendered.wants_answer
    assert Renderer(TINY)._tokenizer.decode(rendered.token_ids).endswith("<user>and then?</><assistant>")
    assert learnt({"messages": TALK[:3]}) == "os.path.join(a, b)</>"
    prompt, text = render({"prompt": "import os"}), render({"text": "import os"})
    assert (prompt.wants_answer, set(prompt.mask)) == (True, {0})
    assert (text.wants_answer, set(text.mask)) == (False, {1})


@pytest.mark.parametrize("template", [WITHOUT_BLOCKS, WITH_BLOCKS], ids=["by prefixes", "by blocks"])
def test_a_conversations_tools_are_in_its_prompt(template: str) -> None:
    entry = {"messages": TALK, "tools": [{"name": "open"}]}
    text = Renderer(TINY)._tokenizer.decode(render(entry, template).token_ids)
    assert text.startswith("<tool>open</><user>")
    assert learnt(entry, template) == "os.path.join(a, b)</>return None</>"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"talk", "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"id": 1}', "no messages, conversations, prompt or text"),
        (b'{"messages": []}', "no messages, conversations, prompt or text"),
        (b'{"messages": ["hello"]}', "a turn is no JSON object"),
        (b'{"messages": [{"content": "hello"}]}', "a turn has no role"),
        (b'{"text": ""}', "no tokens"),
    ],
)
def test_lines_that_nothing_can_be_made_of_are_told_apart(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Renderer(TINY, WITHOUT_BLOCKS).render(line)


def test_a_template_that_hides_where_turns_are_is_refused() -> None:
    with pytest.raises(ValueError, match="the first 2 turns when they stand alone"):
        render({"messages": TALK}, THAT_REWRITES)
    with pytest.raises(ValueError, match="has no chat template"):
        Renderer(TINY).render(json.dumps({"messages": TALK}).encode())


class Files:
    """A backend that leaves a file for each request, but for those that it is to fail."""

    max_length = 20

    def __init__(self, out: Path, failing: tuple[int, ...] = (), row_bytes: int | None = 8) -> None:
        self._out, self._failing, self._row_bytes = out, failing, row_bytes
        self.ran: list[Request] = []

    def row_bytes(self) -> int | None:
        return 8 if self.ran else self._row_bytes

    def run(self, requests: Iterator[Request]) -> Iterator[Outcome]:
        for request in requests:
            self.ran.append(request)
            if request.number in self._failing:
                yield Outcome(request, error="the disk is full")
                continue
            path = self._out / f"{request.name}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_file({"x": torch.ones(1)}, path)
            yield Outcome(request, num_output_tokens=2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [{"text": "import os"}, {"prompt": "def f"}, {"text": "x" * 400}, {"text": "class A"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n" + '{"text": "return"}')
    (tmp_path / "out").mkdir()
    return path


def collect(data: Path, backend: Files, check_space: bool = True) -> Report:
    out = data.parent / "out"
    return Collector(Lines(data), Renderer(TINY), backend, out, max_tokens=3).collect(check_space)


def test_it_reports_records_tokens_and_failures_with_their_reasons(data: Path, capsys: Any) -> None:
    backend = Files(data.parent / "out", failing=(3,))
    report = collect(data, backend)
    lengths = [len(request.token_ids) for request in backend.ran]
    assert [request.number for request in backend.ran] == [0, 1, 3, 4]
    # The answer's last token was not run.
    assert (report.records, report.tokens) == (3, lengths[0] + lengths[1] + 1 + lengths[3])
    assert str(report).startswith(f"3 records, {report.tokens} tokens, 2 failures")
    assert sorted(report.failures) == ["the disk is full", "the line and its answer may have more tokens than 20"]
    failed = [json.loads(line) for line in (data.parent / "out" / "failures.jsonl").read_text().splitlines()]
    assert sorted(failure["line"] for failure in failed) == [2, 3]
    masks = [json.loads(line) for line in (data.parent / "out" / "masks.jsonl").read_text().splitlines()]
    assert [mask["loss_mask"] for mask in masks] == [[1] * lengths[0], [0] * lengths[1] + [1, 1], [1] * lengths[3]]
    assert "5 records of at most" in capsys.readouterr().err


def test_it_goes_on_where_it_stopped(data: Path) -> None:
    out = data.parent / "out"
    first = collect(data, Files(out))
    (out / "000000" / "000000003.safetensors").unlink()
    with open(out / "masks.jsonl", "r+b") as masks:  # killed while it wrote the last line
        masks.truncate((out / "masks.jsonl").stat().st_size - 5)
    again = Files(out)
    report = collect(data, again)
    assert [request.number for request in again.ran] == [3, 4]
    assert (report.records, report.tokens) == (first.records, first.tokens)
    nothing = Files(out)
    report = collect(data, nothing)
    assert (report.records, report.tokens, nothing.ran) == (first.records, first.tokens, [])
    names = [json.loads(line)["name"] for line in (out / "masks.jsonl").read_text().splitlines()]
    assert sorted(set(names)) == [f"000000/00000000{i}" for i in (0, 1, 3, 4)]


def test_it_does_not_start_what_will_not_fit(data: Path) -> None:
    backend = Files(data.parent / "out", row_bytes=1 << 50)
    with pytest.raises(ValueError, match="name a folder on another disk"):
        collect(data, backend)
    assert backend.ran == []
    assert collect(data, backend, check_space=False).records == 4


def test_a_servers_first_record_says_how_large_the_others_will_be(data: Path) -> None:
    backend = Files(data.parent / "out", row_bytes=None)
    assert collect(data, backend).records == 4
    with pytest.raises(ValueError, match="Nothing is collected: the disk is full"):
        collect(data.with_name("data.jsonl"), other := Files(_fresh(data), failing=(0,), row_bytes=None))
    assert len(other.ran) == 1


def _fresh(data: Path) -> Path:
    out = data.parent / "out"
    out.rename(data.parent / "before")
    out.mkdir()
    return out


def test_a_folder_has_the_records_of_one_task(tmp_path: Path) -> None:
    Task("m", "d", [1, 2], "t", 5).check(tmp_path)
    Task("m", "d", [1, 2], "t", 5).check(tmp_path)
    with pytest.raises(ValueError, match=r"records of another task \(data='d'\)"):
        Task("m", "other", [1, 2], "t", 5).check(tmp_path)
    (tmp_path / "collect.json").rename(tmp_path / "something")
    with pytest.raises(ValueError, match="something in it that no collector has written"):
        Task("m", "d", [1, 2], "t", 5).check(tmp_path)
