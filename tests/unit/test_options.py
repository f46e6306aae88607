"""What users can choose, and what they are told of what they can't."""

from types import SimpleNamespace
from typing import Any

import pytest

from proposers.options import Options


def options(additional_config: Any) -> Options:
    return Options.of(SimpleNamespace(additional_config=additional_config))


@pytest.mark.parametrize("nothing", [None, {}, {"other": 1}, {"mtp_proposers": {}}])
def test_nothing_has_to_be_chosen(nothing: Any) -> None:
    assert options(nothing) == Options()


def test_what_is_chosen_holds() -> None:
    assert options({"mtp_proposers": {"captured_rows": 0}}).captured_rows == 0
    assert options({"mtp_proposers": {"adapt_drafts": True}}) == Options(adapt_drafts=True)
    cheap = {"draft_weights": "fp8", "draft_vocabulary": "list.json"}
    assert options({"mtp_proposers": cheap}) == Options(**cheap)


def test_variables_stand_for_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_PROPOSERS_DRAFT_WEIGHTS", "fp8")
    monkeypatch.setenv("MTP_PROPOSERS_DRAFT_VOCABULARY", "list.json")
    assert options(None) == Options(draft_weights="fp8", draft_vocabulary="list.json")
    given = {"draft_weights": None, "draft_vocabulary": "other.json"}
    assert options({"mtp_proposers": given}) == Options(draft_vocabulary="other.json")
    monkeypatch.setenv("MTP_PROPOSERS_DRAFT_WEIGHTS", "")
    assert options(None).draft_weights is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fast", "give a dictionary of options out of captured_rows"),
        ({"captured_row": 3}, r"\{'captured_row': 3\}: give a dictionary of options out of captured_rows"),
        ({"captured_rows": -1}, "captured_rows=-1: give a number of rows, or 0"),
        ({"captured_rows": True}, "captured_rows=True"),
        ({"captured_rows": "2048"}, "captured_rows='2048'"),
        ({"adapt_drafts": 1}, "adapt_drafts=1: give true or false"),
        ({"adapt_drafts": "yes"}, "adapt_drafts='yes'"),
        ({"prefix_keys": None}, "prefix_keys=None: give true or false"),
        ({"draft_weights": "int8"}, "draft_weights='int8': give fp8, or leave it out"),
        ({"draft_weights": True}, "draft_weights=True"),
        ({"draft_vocabulary": 32768}, "draft_vocabulary=32768: give the path of a file"),
    ],
)
def test_what_does_not_exist_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options({"mtp_proposers": given})
