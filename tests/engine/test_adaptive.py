"""The number of drafts, chosen step by step on a real engine: the tokens are those of no speculation."""

from typing import Any

import pytest

from tests.support import scenarios
from tests.support.children import ChildFailedError
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import Run, run

FEW = {"max_num_seqs": 2}
ADAPTIVE = {"additional_config": {"mtp_proposers": {"adapt_drafts": True}}}


def adaptive(scenario: Any = scenarios.adaptive, k: int = 3, **more: Any) -> Run:
    return run(scenario, {**FEW, **mtp(k), **ADAPTIVE, **more})


def assert_chosen(drafted: Run) -> None:
    """It has tried others than the configured number, has their times, and all tokens are right."""
    value = drafted.value
    assert value["tokens"] == run(scenarios.adaptive, FEW, mode="off").value["tokens"]
    # A probe comes so many steps after the last, and the engine is given enough.
    assert len(value["chosen"]) > 1
    assert sum(took is not None for took in value["times"]) > 1


def test_the_number_of_drafts_changes_and_outputs_equal_no_speculation() -> None:
    drafted = adaptive()
    assert_chosen(drafted)
    assert "Adaptive drafts: " in drafted.log
    chosen, counted = drafted.value["chosen"], drafted.value["counted"]
    # A step's drafts are verified in the next one, and neither a prompt's step nor a request's last draft is counted.
    assert {k for k, steps in counted.items() if steps} == set(chosen)
    assert all(abs(counted[k] - steps) < 20 for k, steps in chosen.items())


def test_so_they_do_where_steps_are_scheduled_ahead() -> None:
    assert_chosen(adaptive(scenarios.adaptive_asynchronous, async_scheduling=True))


def test_it_chooses_with_statistics_switched_off() -> None:
    silent = adaptive(disable_log_stats=True)
    assert_chosen(silent)
    assert silent.value["counted"] == {}


def test_a_table_beside_it_is_refused_with_a_remedy() -> None:
    table = {"num_speculative_tokens_per_batch_size": [[1, 4, 2]]}
    with pytest.raises(ChildFailedError, match="leave one of them out"):
        run(scenarios.adaptive, {**FEW, **mtp(3, **table), **ADAPTIVE})


def test_without_drafts_of_ours_a_line_says_that_nothing_is_chosen() -> None:
    done = run(scenarios.adaptive, FEW | ADAPTIVE)
    assert done.value["chosen"] == {}
    assert done.log.count("adapt_drafts has no effect: nothing is drafted by vllm-mtp-proposers.") == 1
