"""A draft that may be shorter than its target: only requests past its limit go without drafts."""

from typing import Any

import pytest
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from proposers.v1 import MultiGroupProposer
from tests.engine.test_host_faults import count_meetings
from tests.support import limit_scenarios as limits
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import run
from tests.support.rig import Batch, full, make_config, make_rig, sliding

LIMIT = 128


def limited_rig(drafts: int = 6, **more: Any) -> Any:
    config = make_config(drafts, draft_max_model_len=LIMIT)
    return make_rig(MultiGroupProposer, config, [full(16), sliding(32), sliding(32)], **more)


@pytest.mark.parametrize("ahead", [-4, -1, 0, 1, 40])
def test_rows_past_the_limit_have_no_slots_and_all_others_have_theirs(ahead: int) -> None:
    rig = limited_rig()
    rig.propose(Batch(seq_lens=[LIMIT + ahead, 40], query_lens=[4, 4], rejected=[1, 2]), 6)
    assert rig.wrong_slots() == []


def test_a_chunk_across_the_limit_is_written_up_to_it() -> None:
    rig = limited_rig()
    rig.propose(Batch(seq_lens=[LIMIT + 20], query_lens=[60]))
    for forward in rig.forwards:
        assert [slot != PADDING_SLOT_ID for slot in forward.slots] == [True] * 40 + [False] * 20
        # A rotary table may end at the draft's limit.
        assert forward.positions.max() == LIMIT - 1
    assert rig.wrong_slots() == []


def test_what_is_drafted_past_the_limit_depends_on_no_row_there() -> None:
    rig = limited_rig()
    heads: list[Any] = []
    compute_logits = rig.model.compute_logits
    rig.model.compute_logits = lambda hidden, **rest: heads.append(hidden) or compute_logits(hidden, **rest)
    forward = rig.model.forward
    rig.model.forward = lambda **inputs: forward(**inputs).fill_(float("nan"))
    drafts = rig.propose(Batch(seq_lens=[LIMIT + 9, LIMIT - 2], query_lens=[4, 4]), 6)
    assert drafts.shape == (2, 6)
    assert [not hidden[0].any() for hidden in heads] == [True] * 6
    # The second has rows up to the limit: those of the chain, and two more.
    assert [bool(hidden[1].isnan().all()) for hidden in heads] == [True] * 5 + [False]


def test_data_parallel_ranks_meet_as_often_past_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = limited_rig(data_parallel_size=2)
    meetings = count_meetings(rig, monkeypatch)
    seen = []
    for long in (LIMIT - 50, LIMIT + 50):
        rig.propose(Batch(seq_lens=[long, 40], query_lens=[4, 4]), 6)
        seen.append(meetings.copy())
        meetings.clear()
    rig.proposer.dummy_run(num_tokens=1)
    assert seen == [meetings, meetings]


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_requests_beside_one_past_the_limit_are_drafted_for_as_if_alone(v2: bool) -> None:
    arguments = {"long": LIMIT + 10}
    ours = run(limits.beside_a_long_one, mtp(3, max_model_len=LIMIT), v2=v2, **arguments)
    plain = run(limits.beside_a_long_one, {}, **arguments).value
    value = ours.value
    assert {name: part["tokens"] for name, part in value.items()} == {
        name: part["tokens"] for name, part in plain.items()
    }
    assert value["short"]["accepted"] > value["short"]["steps"]
    assert value["mixed"]["accepted"] == value["short"]["accepted"]
    assert value["long"]["accepted"] == 0
    assert f"Requests past {LIMIT} tokens are not drafted for" in ours.log


def test_vllms_own_proposer_drafts_for_nobody_then() -> None:
    value = run(limits.beside_a_long_one, mtp(3, max_model_len=LIMIT), mode="upstream", long=LIMIT + 10).value
    assert value["short"]["accepted"] > 0
    assert value["mixed"]["accepted"] < 0.2 * value["short"]["accepted"]
