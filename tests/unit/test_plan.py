"""Descriptors, and which module makes which draft."""

from types import SimpleNamespace

import pytest

from mtp.plan import DraftDescriptor, DraftPlan
from proposers.models import mimo, step3p5

CHAINED = DraftDescriptor("Chained", modules_key="num_modules", own_heads=True)
SINGLE = DraftDescriptor("Single")


@pytest.mark.parametrize(
    ("num_modules", "modules"),
    [(1, [0, 0, 0, 0, 0, 0]), (2, [0, 1, 1, 1, 1, 1]), (3, [0, 1, 2, 2, 2, 2]), (6, [0, 1, 2, 3, 4, 5])],
)
def test_the_modules_draft_in_turn_and_the_last_one_makes_all_further_drafts(
    num_modules: int, modules: list[int]
) -> None:
    plan = DraftPlan.make(CHAINED, SimpleNamespace(num_modules=num_modules), 6, 100)
    assert [plan.module_of_step(step) for step in range(6)] == modules


@pytest.mark.parametrize(("num_modules", "drafts", "length"), [(3, 1, 1), (3, 3, 3), (3, 6, 3), (1, 4, 1)])
def test_the_chain_has_no_more_modules_than_there_are_drafts(num_modules: int, drafts: int, length: int) -> None:
    assert DraftPlan.make(CHAINED, SimpleNamespace(num_modules=num_modules), drafts, 100).chain_length == length


def test_a_model_without_a_count_has_one_module_whatever_its_config_says() -> None:
    assert SINGLE.count_modules(SimpleNamespace(num_modules=4)) == 1
    assert [DraftPlan.make(SINGLE, None, 3, 100).module_of_step(step) for step in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(
    "config", [SimpleNamespace(), SimpleNamespace(num_modules=0), SimpleNamespace(num_modules=None)]
)
def test_a_config_that_counts_no_modules_is_refused_with_a_remedy(config: SimpleNamespace) -> None:
    with pytest.raises(
        ValueError, match=r"Chained checkpoint has num_modules=(None|0): .*Use a checkpoint with its MTP"
    ):
        CHAINED.count_modules(config)


@pytest.mark.parametrize("num_speculative_tokens", [100, 101])
def test_more_drafts_than_the_context_are_refused_with_both_values(num_speculative_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"num_speculative_tokens={num_speculative_tokens} .*max_model_len=100"):
        DraftPlan.make(SINGLE, None, num_speculative_tokens, 100)


def test_the_longest_draft_that_leaves_room_for_a_prompt_is_taken() -> None:
    assert DraftPlan.make(SINGLE, None, 99, 100).num_speculative_tokens == 99


def test_descriptors_say_whose_heads_a_model_uses() -> None:
    # Step-3.5 carries a head in every module, MiMo shares the target's: mixing them up ruins every draft.
    assert step3p5.ARCHITECTURE.descriptor.own_heads
    assert not mimo.ARCHITECTURE.descriptor.own_heads
