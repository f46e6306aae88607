"""Lists of the tokens that drafts are out of: read, chosen, and what heads make of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp.heads import DraftVocabulary
from proposers import draft_vocabulary
from proposers.draft_vocabulary import choose, count, coverage_of, read
from tests.support.children import TINY


def write(folder: Path, content: Any) -> str:
    file = folder / "list.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read"),
        ({"tokens": [1]}, "holds no token ids"),
        ([], "holds no token ids"),
        ([1, "2"], "holds no token ids"),
        ([True], "holds no token ids"),
        ([3, 100], "from 3 to 100, and this model's go from 0 to 99"),
        ([-1, 3], "from -1 to 3"),
        ({"token_ids": [1], "vocab_size": 128}, "is for a vocabulary of 128 tokens, and this model has 100"),
        (list(range(100)), "has 100 tokens, and this model 100"),
        (list(range(99)), "has 99 tokens, and this model 100"),  # with one more, for two ranks
    ],
)
def test_a_list_that_fits_no_model_or_another_one_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, content), 100, num_ranks=2)


def test_a_list_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draft_vocabulary='no\.json' can't be read"):
        read("no.json", 100)


def test_a_list_is_read_in_order_and_each_token_once(tmp_path: Path) -> None:
    assert read(write(tmp_path, [5, 3, 5]), 100).token_ids == [3, 5]
    found = read(write(tmp_path, {"token_ids": [2], "vocab_size": 100, "coverage": 0.25}), 100)
    assert (found.token_ids, found.coverage) == ([2], 0.25)


def test_what_is_needed_comes_before_what_is_frequent_and_the_lowest_ids_fill_up() -> None:
    counted = Counter({7: 5, 8: 9, 6: 5, 200: 99})
    assert choose(counted, {99}, 1, 100) == [99]
    assert choose(counted, {99}, 3, 100) == [6, 8, 99]
    assert choose(counted, {99}, 6, 100) == [0, 1, 6, 7, 8, 99]
    for size in (0, 100):
        with pytest.raises(ValueError, match="Give a size between the two"):
            choose(counted, {99}, size, 100)


def test_one_piece_of_ten_is_held_out_and_coverage_is_of_those() -> None:
    counted, held_out = count([[1, 1]] * 9 + [[1, 2, 2, 3]])
    assert (counted, held_out) == (Counter({1: 18}), Counter({1: 1, 2: 2, 3: 1}))
    assert coverage_of([1, 3], held_out) == 0.5
    assert coverage_of([1], Counter()) is None


def test_the_command_counts_text_and_says_what_the_list_covers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("import os\n\n\ndef f(x):\n    return [x]\n" * 2000)
    output = tmp_path / "list.json"
    assert draft_vocabulary.main([*arguments(text), "--size", "300", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert (
        f"300 of 1024 tokens, {found['counted']} counted; coverage of held-out text 100.00 %" in capsys.readouterr().out
    )
    assert found["coverage"] == 1.0
    assert len(read(str(output), 1024).token_ids) == 300
    for wrong, message in ((["--size", "1024"], "Give a size"), (["--from", str(tmp_path / "no")], "isn't there")):
        assert draft_vocabulary.main([*arguments(text), *wrong]) == 2
        assert message in capsys.readouterr().err


def arguments(source: Path) -> list[str]:
    return ["--from", str(source), "--model", TINY]


def test_logits_of_all_tokens_have_nothing_where_the_list_has_no_token() -> None:
    vocabulary = DraftVocabulary(torch.tensor([1, 4, 4]), 6)
    spread = vocabulary.spread(torch.tensor([[0.5, 2.0, 2.0]]))
    none = -float("inf")
    assert spread.tolist() == [[none, 0.5, none, none, 2.0, none]]
    assert spread.softmax(-1)[0, 0] == 0.0
