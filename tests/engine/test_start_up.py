"""Configurations that no engine starts with: each is refused in one line that says what to write instead."""

import re
import sys
from typing import Any

import pytest

from proposers.host.start_up import check_given
from tests.support import scenarios
from tests.support.children import TINY, ChildFailedError, run_command
from tests.support.forked_engine import run

EXTRACTION = {"method": "extract_hidden_states", "num_speculative_tokens": 1}

WRONG = {
    "the name of a method": ("mtp", "speculative_config is 'mtp', ", "num_speculative_tokens"),
    "a list": (["mtp"], "speculative_config is ['mtp'], ", "num_speculative_tokens"),
    "nothing in it": ("", "speculative_config is '', ", "num_speculative_tokens"),
    "a number for the draft's": (
        EXTRACTION | {"draft_model_config": {"hf_config": 3}},
        "speculative_config.draft_model_config.hf_config is 3, ",
        "eagle_aux_hidden_state_layer_ids",
    ),
}


@pytest.mark.parametrize("mode", ["on", "upstream"])
@pytest.mark.parametrize("name", WRONG)
def test_an_engine_says_which_dictionary_it_wants(name: str, mode: str) -> None:
    given, named, example = WRONG[name]
    with pytest.raises(ChildFailedError) as failed:
        run(scenarios.few, {"speculative_config": given}, mode=mode)
    assert_said(str(failed.value), named, example)


def test_a_server_says_which_dictionary_it_wants() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", TINY]
    child = run_command([*command, "--speculative-config", '"mtp"'], MTP_PROPOSERS="on")
    assert child.returncode == 1
    assert_said(child.stdout + child.stderr, *WRONG["the name of a method"][1:])


def assert_said(printed: str, named: str, example: str) -> None:
    (line,) = [line for line in printed.splitlines() if re.search(r"^(\S+ \S+ )?ValueError: ", line)]
    assert named in line
    assert example in line
    assert not re.search("AttributeError|TypeError|During handling of", printed)


def test_keys_are_strings_too() -> None:
    with pytest.raises(ValueError, match=r"speculative_config is \{1: 2\}"):
        check_given({1: 2})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "mtp", "num_speculative_tokens": 3},
        {"method": "mtp", "draft_model_config": "not looked at"},
        EXTRACTION | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}},
    ],
)
def test_what_vllm_itself_can_judge_is_left_to_it(given: dict[str, Any]) -> None:
    check_given(given)
