"""The oracle finds nothing wrong with our passes, agrees with the engine where both can tell, and sees known faults."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.oracle.report import TOLERANCE
from bench.oracle.schedules import SETUPS, draw_setups, plan_schedule
from bench.reference.dense import DenseModel, Reference
from tests.support.children import TINY
from tests.support.oracle_children import assert_clean, run_child

MODEL = Path(TINY)


@pytest.fixture(scope="module")
def model() -> DenseModel:
    return DenseModel(MODEL)


# Passes of ours, in which the oracle has to find nothing wrong.

EVERYTHING = ["chunks", "preemption and prefixes", "K by batch, to 6", "to the end", "two block sizes", "unpadded"]


def everything() -> dict[str, Any]:
    return run_child("schedules", count=10, seed=3, setups=EVERYTHING)


def test_after_every_pass_of_random_schedules_every_row_and_every_draft_is_right() -> None:
    report = everything()
    assert report["rows_mismatched"] == 0, report["mismatches"]
    assert report["drafts_mismatched"] == 0, report["mismatches"]
    assert report["rows_checked"] > 70_000
    assert report["drafts_checked"] > 1_000
    assert report["rows_excused"] == report["rows_unwritten"] == 0
    assert report["slots_mismatched"] == 0
    assert report["slots_checked"] > 10_000


def test_where_the_draft_is_shorter_than_the_target_no_pass_is_left_out() -> None:
    report = run_child("schedules", count=1, seed=3, setups=["past the draft's end"])
    assert_clean(report)
    assert report["events"]["skipped_passes"] == report["rows_unwritten"] == 0
    assert report["rows_open"] > 1_000  # those past the draft's end
    assert report["drafts_checked"] > 0


def test_whatever_number_of_drafts_a_controller_chooses_rows_and_drafts_are_right() -> None:
    report = run_child("schedules", count=2, seed=1, setups=["adaptive", "adaptive, overlapped"])
    assert_clean(report)
    assert report["events"]["k_changes"] > 5
    assert report["events"]["k_zero"] > 0
    assert report["drafts_checked"] > 500


@pytest.mark.parametrize(
    ("runner", "setups"),
    [
        ("v1", ["extraction", "extraction, overlapped", "extraction, two block sizes"]),
        ("v2", ["extraction, two block sizes"]),
    ],
)
def test_the_slots_of_an_extractions_rows_are_the_hosts_and_a_reader_finds_the_rows(
    runner: str, setups: list[str]
) -> None:
    report = run_child("schedules", runner=runner, count=len(setups), seed=5, setups=setups)
    assert report["slots_mismatched"] == report["rows_mismatched"] == 0, report["mismatches"]
    assert report["slots_checked"] == report["rows_checked"] > 400 * len(setups)
    assert report["passes"] > 10 * len(setups)


def test_an_extractor_beside_a_drafter_leaves_every_draft_row_right_and_a_reader_finds_its_own() -> None:
    setups = ["records beside drafts", "records beside drafts, overlapped"]
    report = run_child("schedules", count=2, seed=5, setups=setups)
    assert_clean(report)
    assert report["drafts_checked"] > 200
    assert report["rows_checked"] > 2_000


def test_it_sees_slots_that_are_not_the_hosts_in_drafting_and_in_extraction() -> None:
    drafting, extracting = run_child("faults", seed=1, cases=[("half_block_size", x) for x in ("chunks", "extraction")])
    for report in (drafting, extracting):
        assert report["slots_mismatched"] > 0
        assert report["rows_mismatched"] > 0
        assert any("slots of the target's rows in a step are not the host's" in x for x in report["mismatches"])


def test_everything_that_the_schedules_are_for_happened_in_them() -> None:
    events = everything()["events"]
    assert {"0", "1", "2", "3", "4", "5", "6"} <= events.pop("rejections").keys()
    assert events.pop("skipped_passes") == events.pop("grammar_cuts") == events.pop("resets") == 0
    assert events.pop("replays") == events.pop("replays_uneven") == 0  # of graphs, which the CPU has none of
    assert [name for name, count in events.items() if count == 0] == []


def test_every_rank_holds_its_own_heads_of_every_row() -> None:
    for reports in two_ranks():
        assert_clean(reports[0])
        assert reports[0]["events"] == two_ranks()[0][0]["events"]


def test_ranks_agree_on_the_token_of_each_steps_own_head_without_its_logits() -> None:
    reports: Any = run_child(
        "ranked_faults", runner="v2", seed=9, setup="two ranks, local argmax", faults=[["none"]] * 2
    )
    for (report,) in reports:
        assert_clean(report)


def two_ranks() -> list[list[dict[str, Any]]]:
    """Of each of two ranks, the report of a schedule without a fault, and of one with a fault on the second rank."""
    faults = [["none", "none"], ["none", "no_slots_for_module_1"]]
    reports: Any = run_child("ranked_faults", seed=1, setup="two ranks", faults=faults)
    return reports


def test_a_reused_block_was_finished_with_the_tokens_that_follow_it_here() -> None:
    report = run_child("shared_block")
    assert report["events"]["prefix_hits"] == 2
    assert report["rows_mismatched"] == report["drafts_mismatched"] == 0, report["mismatches"]


def test_the_target_of_the_engine_is_the_reference_target() -> None:
    assert everything()["max_target_error"] < TOLERANCE


# The reference.


def greedy() -> dict[str, Any]:
    return run_child("greedy", num_prompts=6, num_tokens=100, max_tokens=64)


def test_the_reference_continues_prompts_with_the_tokens_of_the_engine(model: DenseModel) -> None:
    result = greedy()
    for prompt, output in zip(result["prompts"], result["outputs"], strict=True):
        reference = Reference(model)
        reference.update(prompt + output, len(prompt + output) - 1)
        best = model.logits(reference.target_hidden()[len(prompt) - 1 : -1]).argmax(-1)
        assert best.tolist() == output


def test_the_reference_has_as_many_single_drafts_accepted_as_the_engine(model: DenseModel) -> None:
    result = greedy()
    accepted = rejected = 0
    for prompt, output in zip(result["prompts"], result["outputs"], strict=True):
        tokens, known = prompt + output, len(prompt) + 1
        reference = Reference(model)
        while known < len(tokens):
            reference.update(tokens[:known], known - 2)
            right = int(reference.draft_logits(0, known - 2).argmax()) == tokens[known]
            accepted, rejected = accepted + right, rejected + (not right)
            known += 1 + right
    assert (accepted, rejected) == (result["accepted"], result["rejected"])


def test_a_reference_that_followed_changing_tokens_holds_what_a_fresh_one_computes(model: DenseModel) -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(model.config["vocab_size"]) for _ in range(200)]
    followed = Reference(model)
    for _ in range(30):
        last = rng.randint(80, 150)
        tokens[rng.randint(last - 3, last + 4) :] = [rng.randrange(1000) for _ in range(100)]
        followed.update(tokens[: last + rng.randint(2, 5)], last)
    fresh = Reference(model)
    fresh.update(followed._tokens, last)
    torch.testing.assert_close(followed.target_hidden(), fresh.target_hidden(), atol=1e-4, rtol=0)
    for module in range(model.num_modules):
        torch.testing.assert_close(followed.keys(module), fresh.keys(module), atol=1e-4, rtol=0)
        torch.testing.assert_close(followed.values(module), fresh.values(module), atol=1e-4, rtol=0)
        assert len(fresh.keys(module)) == min(last + 1, len(fresh._tokens) - 1 - module)


def test_a_prompt_of_one_token_without_drafts_leaves_the_later_modules_without_a_row(model: DenseModel) -> None:
    reference = Reference(model)
    reference.update([5, 6], 0)
    assert [len(reference.keys(module)) for module in range(model.num_modules)] == [1, 0, 0]
    assert [len(reference.values(module)) for module in range(model.num_modules)] == [1, 0, 0]


def test_a_row_of_a_later_module_depends_on_as_many_tokens_past_it(model: DenseModel) -> None:
    tokens = list(range(10, 60))
    for module in range(model.num_modules):
        reached = tokens.copy()
        reached[30 + 1 + module] += 1
        before, after = Reference(model), Reference(model)
        before.update(tokens, 40)
        after.update(reached, 40)
        differs = (before.values(module) - after.values(module)).abs().flatten(1).amax(1) > TOLERANCE
        assert differs.nonzero()[0] == 30


# The schedules.


def test_a_seed_stands_for_the_same_schedules_every_time() -> None:
    texts = [list(range(1, 700))]
    plans = [plan_schedule(random.Random(7), SETUPS[0], texts, range(1, 41)) for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_every_planned_request_fits_its_engine(setup: Any) -> None:
    texts = [list(range(1, 1000)) for _ in range(3)]
    for seed in range(50):
        num_steps, plans = plan_schedule(random.Random(seed), setup, texts, range(1, 41))
        for plan in plans:
            assert 0 <= plan.step < num_steps
            assert 1 <= len(plan.prompt) < setup.max_model_len
            assert 1 <= plan.max_tokens <= setup.max_model_len - len(plan.prompt)


def test_schedules_are_drawn_for_every_engine_before_any_gets_two() -> None:
    drawn = list(draw_setups(random.Random(0), len(SETUPS)))
    assert [number for _, number in drawn] == [1] * len(SETUPS)
    assert sum(number for _, number in draw_setups(random.Random(0), 200)) == 200


# Known faults, which the oracle has to see.


FAULTS = (
    ("module_0_only", "preemption"),
    ("no_history", "preemption"),
    ("wrong_chunk_end", "preemption"),
    ("primary_block_size", "two block sizes"),
    ("repairs_rejections_only", "grammars"),
    ("wrong_chunk_end", "one module"),
    ("stale_hidden_states", "one module"),
    ("hidden_states_flow", "the target's hidden states, K=6"),
    ("padding_drafts_ahead", "replayed, K=6"),
    ("short_reach", "sliding modules"),
)
# The others' are among `EVERYTHING`.
ENGINES = sorted({engine for _, engine in FAULTS} - {"two block sizes", "preemption"})


def with_fault(fault: str, engine: str) -> dict[str, Any]:
    cases = [*FAULTS, *(("none", engine) for engine in ENGINES)]
    reports: Any = run_child("faults", seed=1, cases=cases)
    report: dict[str, Any] = reports[cases.index((fault, engine))]
    return report


@pytest.mark.parametrize("engine", ENGINES)
def test_the_schedules_that_show_the_faults_are_clean_without_them(engine: str) -> None:
    report = with_fault("none", engine)
    assert_clean(report)
    assert report["events"]["chunk_boundaries"] > 0
    assert len(report["events"]["rejections"]) > 2
    assert (report["events"]["grammar_cuts"] > 0) == (engine == "grammars")


def test_it_sees_that_later_modules_never_saw_the_prompt() -> None:
    report = with_fault("module_0_only", "preemption")
    assert report["mismatched_by_module"].keys() == {"1", "2"}
    assert report["drafts_mismatched"] > 0
    assert "it was never written" in report["first_mismatch"]
    assert "this pass was given its hidden state" in report["first_mismatch"]


def test_it_sees_what_rejected_drafts_left_behind() -> None:
    report = with_fault("no_history", "preemption")
    assert report["mismatched_by_module"].keys() == {"1", "2"}
    assert "a draft that has since been replaced" in report["first_mismatch"]


def test_it_sees_slots_counted_in_another_groups_blocks() -> None:
    report = with_fault("primary_block_size", "two block sizes")
    # The first group's rows suffer too: blocks of all groups come from one pool, and theirs are written into.
    assert {"1", "2"} <= report["mismatched_by_module"].keys()
    assert report["drafts_mismatched"] > 0


def test_it_sees_a_chunk_whose_end_was_fed_the_wrong_token() -> None:
    report = with_fault("wrong_chunk_end", "preemption")
    assert "0" in report["mismatched_by_module"]
    assert "module 0" in report["first_mismatch"]
    assert "which is known" in report["first_mismatch"]


def test_it_sees_rows_that_a_grammar_left_unverified_and_nobody_ran_again() -> None:
    report = with_fault("repairs_rejections_only", "grammars")
    assert report["mismatched_by_module"].keys() == {"1", "2"}
    assert "a draft that has since been replaced" in report["first_mismatch"]


def test_it_sees_a_chunk_of_a_single_module_whose_end_was_fed_the_wrong_token() -> None:
    report = with_fault("wrong_chunk_end", "one module")
    assert report["mismatched_by_module"].keys() == {"0"}
    assert "which is known" in report["first_mismatch"]


def test_it_sees_a_rollout_on_the_wrong_hidden_states() -> None:
    report = with_fault("stale_hidden_states", "one module")
    assert report["rows_mismatched"] == 0  # rows past L are written again by the next pass
    assert report["drafts_mismatched"] > 0
    assert "draft 2 of 3" in report["first_mismatch"]


def test_it_sees_hidden_states_that_flow_where_they_should_not() -> None:
    report = with_fault("hidden_states_flow", "the target's hidden states, K=6")
    assert report["mismatched_by_module"].keys() == {"1", "2"}
    assert "this pass was given its hidden state" in report["first_mismatch"]


def test_it_sees_what_the_second_rank_alone_did_not_write() -> None:
    first, second = (reports[1] for reports in two_ranks())
    assert "1" in second["mismatched_by_module"]
    assert "it was never written" in second["first_mismatch"]
    # The first rank's own rows suffer from the module after, whose hidden states both ranks made.
    assert first["mismatched_by_module"].keys() == {"2"}


def test_it_sees_that_padding_writes_into_blocks_of_others() -> None:
    report = with_fault("padding_drafts_ahead", "replayed, K=6")
    assert report["events"]["replays"] > 0
    assert report["rows_mismatched"] > 0
    assert "should be right because" in report["first_mismatch"]


def test_it_sees_that_a_row_too_many_of_a_prompt_was_left_out() -> None:
    assert with_fault("none", "sliding modules")["rows_unread"] > 1_000
    report = with_fault("short_reach", "sliding modules")
    assert "this pass was given its hidden state" in report["first_mismatch"]


def test_in_bfloat16_it_sees_a_fault_and_nothing_without_it() -> None:
    clean, faulty = run_child(
        "faults", seed=1, cases=[(f, "preemption") for f in ("none", "no_history")], dtype="bfloat16"
    )
    assert_clean(clean)
    assert faulty["mismatched_by_module"].keys() == {"1", "2"}


def test_it_sees_the_faults_of_vllms_own_proposer() -> None:
    report = run_child("schedules", "upstream", count=1, seed=1, setups=["preemption"])
    assert report["mismatched_by_module"].keys() == {"0", "1", "2"}
    assert report["drafts_mismatched"] > 0
