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
    ],
)
def test_what_does_not_exist_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options({"mtp_proposers": given})
