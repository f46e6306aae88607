"""The faults of vLLM's own V1 proposer that ours must not have, by the numbers of `docs/host_faults.md`.

Each check runs on both proposers: ours passes it, and vLLM's shows the fault. So no check here is one that can't fail.
A check that vLLM starts to pass is a sign that the fault was fixed upstream.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.transformers_utils.configs.extract_hidden_states import ExtractHiddenStatesConfig
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp.plan import DraftDescriptor, DraftPlan
from proposers.models import mimo
from proposers.v1 import MultiGroupProposer
from tests.support import scenarios
from tests.support.children import TINY, ChildFailedError
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import run
from tests.support.observed_pass import chain_length
from tests.support.rig import (
    CPU,
    MAX_NUM_SEQS,
    Batch,
    Rig,
    add_layer,
    full,
    kv_cache,
    layer_name,
    make_config,
    make_rig,
    sliding,
)

OURS, HOST = MultiGroupProposer, Step3p5MTPProposer
MODULES = 3


def assert_bites(check: Callable[[type], None]) -> None:
    """The check passes on our proposer and fails on vLLM's."""
    check(OURS)
    with pytest.raises(AssertionError):
        check(HOST)


# Six drafts of three modules: after the third ours slides its chain on by a row per draft, and vLLM's goes round to the
# first module. Both write rows past the last one of the window.
PAST_THE_MODULES = 6


# Fault 2: one block size for all groups.


def test_slots_follow_each_groups_own_block_size() -> None:
    def check(proposer: type) -> None:
        rig = make_rig(proposer, make_config(PAST_THE_MODULES), [full(16), sliding(32), sliding(32)])
        rig.tables[1][0, 1] = 21
        rig.propose(Batch(seq_lens=[33], query_lens=[33]), PAST_THE_MODULES)
        written = {slot for forward in rig.forwards if forward.module == 1 for slot in forward.slots}
        assert 21 * 32 + 1 in written, "position 33 is the second of its group's block 21"

    assert_bites(check)


def test_slots_are_right_in_every_group_for_a_mixed_batch_with_rejections() -> None:
    def check(proposer: type) -> None:
        rig = make_rig(proposer, make_config(PAST_THE_MODULES), [sliding(64), full(16), sliding(32)])
        rig.propose(Batch([33, 130, 4, 64], [33, 4, 4, 4], rejected=[0, 2, 3, 0]), PAST_THE_MODULES)
        assert rig.wrong_slots() == []
        # The same requests one step later, each after another number of accepted drafts.
        rig.propose(Batch([37, 132, 5, 68], [4, 4, 4, 4], rejected=[3, 0, 1, 2]), PAST_THE_MODULES)
        assert rig.wrong_slots() == []

    assert_bites(check)


def test_slots_in_an_engine_whose_groups_have_different_block_sizes(tmp_path: Path) -> None:
    config = json.loads(Path(TINY, "config.json").read_text())
    # Layers with half the heads have half the bytes per token; vLLM gives their group blocks of twice the size.
    config["attention_other_setting"]["num_attention_groups"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = {**mtp(3), "model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
    arguments = {"count": 4, "length": 100, "max_tokens": 30}
    ours = run(scenarios.observed, engine, **arguments).value
    host = run(scenarios.observed, engine, mode="upstream", **arguments).value
    assert len(set(ours["block sizes"])) > 1
    assert ours["wrong slots"] == []
    assert host["wrong slots"] != []


# Fault 3: near max_model_len two positions share a slot.


@pytest.mark.parametrize("before_the_end", [3, 2, 1, 0])
def test_rows_at_the_end_of_the_context_keep_their_slots_and_rows_past_it_have_none(before_the_end: int) -> None:
    limit = 128

    def check(proposer: type) -> None:
        # Equal block sizes, so that only the end of the context can be wrong; the second request is far from it.
        config = make_config(PAST_THE_MODULES, max_model_len=limit)
        rig = make_rig(proposer, config, [full(32), sliding(32), sliding(32)])
        rig.propose(Batch(seq_lens=[limit - before_the_end, 40], query_lens=[4, 4]), PAST_THE_MODULES)
        assert rig.wrong_slots() == []
        for step, forward in enumerate(rig.forwards):
            if ahead := rig.last_pass.ahead(step):
                assert forward.metadata.seq_lens.tolist() == [min(limit - before_the_end + ahead, limit), 40 + ahead]

    assert_bites(check)


# Fault 4: a step that asks for no drafts.


def test_no_drafts_are_no_columns_and_the_cache_is_written() -> None:
    def check(proposer: type) -> None:
        rig = make_rig(proposer, make_config(), [full(32), sliding(32), sliding(32)])
        drafts = rig.propose(Batch(seq_lens=[33, 40], query_lens=[33, 4]), num_speculative_tokens=0)
        assert drafts.shape == (2, 0)
        assert rig.wrong_slots() == []
        # Every module that drafts in other steps has run: rows that it left out here would be missing there.
        assert [forward.module for forward in rig.forwards] == list(range(chain_length(rig.proposer)))

    assert_bites(check)


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_fewer_drafts_than_configured_are_as_many_columns(wanted: int) -> None:
    rig = make_rig(OURS, make_config(), [full(32), sliding(32), sliding(32)])
    drafts = rig.propose(Batch(seq_lens=[33, 40], query_lens=[33, 4]), num_speculative_tokens=wanted)
    assert drafts.tolist() == [[rig.model.token(step) for step in range(wanted)]] * 2
    assert rig.wrong_slots() == []


# Fault 5: the head of the wrong module.


@pytest.mark.parametrize("speculative", [{}, {"use_local_argmax_reduction": True}], ids=["logits", "local argmax"])
def test_every_draft_is_the_greedy_token_of_its_own_modules_head(speculative: dict[str, Any]) -> None:
    value = run(scenarios.observed, mtp(3, **speculative), count=4, length=200, max_tokens=30).value
    heads = value["heads"]
    assert heads["drafts"] > 0
    assert heads["own head"] == heads["drafts"]
    # If the heads were alike, drafts of the wrong one would pass the check above.
    assert heads["first head"] < 0.6 * heads["drafts"]


def test_local_argmax_fails_in_vllms_own_proposer() -> None:
    engine = mtp(3, use_local_argmax_reduction=True)
    with pytest.raises(ChildFailedError, match="no attribute 'get_top_tokens'"):
        run(scenarios.observed, engine, mode="upstream", count=4, length=200, max_tokens=30)


# Fault 6: what the ranks of an expert-parallel or data-parallel group wait for.


class EplbSpy:
    """The one call that a proposer owes to vLLM's expert load balancer."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.calls: list[tuple[Any, int, int]] = []

    def prepare_forward(self, model_config: Any, num_tokens: int) -> None:
        self.calls.append((model_config, num_tokens, len(self.rig.forwards)))


def test_the_load_balancer_is_prepared_before_every_forward() -> None:
    def check(proposer: type) -> None:
        config = make_config()
        rig = make_rig(proposer, config, [full(32), sliding(32), sliding(32)])
        eplb = EplbSpy(rig)
        rig.proposer.set_eplb_state(eplb)
        rig.propose(Batch(seq_lens=[33, 40], query_lens=[33, 4]))
        draft = config.speculative_config.draft_model_config
        assert eplb.calls == [(draft, len(forward.input_ids), i) for i, forward in enumerate(rig.forwards)]

    assert_bites(check)


def count_meetings(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts a list of what a data-parallel rank does together with the others."""
    meetings: list[str] = []

    def coordinate(num_tokens_unpadded: int, **kwargs: Any) -> tuple[bool, torch.Tensor, int]:
        meetings.append("batch sizes")
        return False, torch.full((2,), num_tokens_unpadded), kwargs["cudagraph_mode"]

    monkeypatch.setattr(llm_base_proposer, "coordinate_batch_across_dp", coordinate)
    rig.model.register_forward_hook(lambda *_: meetings.append("forward"))
    return meetings


@pytest.mark.parametrize("configured", [1, 3, PAST_THE_MODULES])
def test_data_parallel_ranks_meet_equally_often_whatever_they_draft(
    configured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(proposer: type) -> None:
        config = make_config(configured)
        rig = make_rig(proposer, config, [full(32), sliding(32), sliding(32)], data_parallel_size=2)
        meetings = count_meetings(rig, monkeypatch)
        seen = []
        for wanted in (configured, 0, 1):
            drafts = rig.propose(Batch(seq_lens=[33, 40], query_lens=[33, 4]), num_speculative_tokens=wanted)
            seen.append(meetings.copy())
            assert drafts.shape == (2, wanted)
            # A rank without requests runs this instead, and must not be changed by what was drafted before.
            meetings.clear()
            rig.proposer.dummy_run(num_tokens=1)
            seen.append(meetings.copy())
            meetings.clear()
        assert seen == [seen[0]] * len(seen)
        assert "forward" in seen[0]

    assert_bites(check)


def test_the_hosts_profile_sees_the_largest_pass() -> None:
    rig = make_rig(OURS, make_config(MODULES), [full(32), sliding(32), sliding(32)])
    limit = rig.proposer.vllm_config.scheduler_config.max_num_batched_tokens
    rig.proposer.dummy_run(num_tokens=limit - 1)
    rig.proposer.dummy_run(num_tokens=limit)
    rows = [len(forward.input_ids) for forward in rig.forwards]
    assert rows == [limit - 1] * 3 + [limit + 2 * MAX_NUM_SEQS] * 3


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_a_lone_rank_runs_no_forward_more_than_it_needs(wanted: int) -> None:
    rig = make_rig(OURS, make_config(PAST_THE_MODULES), [full(32), sliding(32), sliding(32)])
    rig.propose(Batch(seq_lens=[33], query_lens=[33]), num_speculative_tokens=wanted)
    assert len(rig.forwards) == MODULES


# Fault 7: the slots of rows that are gathered, without padding, after rejections.


def test_slots_of_gathered_rows_are_their_own() -> None:
    engine, arguments = mtp(3, disable_padded_drafter_batch=True), {"count": 4, "length": 200, "max_tokens": 30}
    ours = run(scenarios.observed, engine, **arguments).value
    host = run(scenarios.observed, engine, mode="upstream", **arguments).value
    assert ours["metrics"]["spec_decode_num_accepted_tokens"] < ours["metrics"]["spec_decode_num_draft_tokens"], (
        "without a rejection no row is gathered"
    )
    assert ours["wrong slots"] == []
    assert ours["fed"]["wrong"] == []
    assert host["wrong slots"] != []


# Fault 8: the token that the last row of a prompt chunk takes.


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        pytest.param({"max_num_batched_tokens": 48}, {"count": 4, "length": 200, "max_tokens": 30}, id="prompts"),
        # Too few blocks for all: requests are preempted, and computed again with the tokens they had generated.
        pytest.param(
            {
                "max_num_batched_tokens": 32,
                "num_gpu_blocks_override": 24,
                "enable_prefix_caching": False,
                "max_model_len": 256,
            },
            {"count": 6, "length": 60, "max_tokens": 120},
            id="resumed requests",
        ),
    ],
)
def test_the_last_row_of_a_chunk_is_fed_the_token_that_follows(
    engine: dict[str, Any], arguments: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    ours = run(scenarios.observed, {**mtp(3), **engine}, **arguments).value
    host = run(scenarios.observed, {**mtp(3), **engine}, mode="upstream", **arguments).value
    assert ours["fed"]["chunk ends"] > 0
    assert ours["fed"]["wrong"] == []
    assert ours["wrong slots"] == []
    assert any("a chunk's end" in wrong for wrong in host["fed"]["wrong"])
    if "resumed" in request.node.callspec.id:
        assert ours["metrics"]["num_preemptions"] > 0
        assert ours["fed"]["chunk ends in the output"] > 0


# Fault 9: M-RoPE.


def test_slots_come_from_sequence_positions_where_rotary_positions_differ() -> None:
    def check(proposer: type) -> None:
        config = make_config(PAST_THE_MODULES)
        for model_config in (config.model_config, config.speculative_config.draft_model_config):
            model_config.hf_config.mrope_section = [8, 4, 4]
        rig = make_rig(proposer, config, [full(32), sliding(32), sliding(32)])
        assert rig.proposer.uses_mrope
        # An image of 60 tokens takes far fewer rotary positions than rows.
        rope = torch.tensor([[20, 21, 22, 23], [9, 10, 11, 12], [30, 31, 32, 33]])
        rig.propose(Batch(seq_lens=[70], query_lens=[4], rejected=[1], rope_positions=rope), PAST_THE_MODULES)
        for step, forward in enumerate(rig.forwards):
            written = [row for row, slot in enumerate(forward.slots) if slot != PADDING_SLOT_ID]
            ahead = rig.last_pass.ahead(step)
            # The last valid row is at position 68; vLLM's also writes the rejected one after it, which does no harm.
            sequence = [68 + ahead] if ahead else [66, 67, 68, 69][: len(written)]
            assert [forward.slots[row] for row in written] == [
                rig.last_pass.slot(forward.module, 0, position) for position in sequence
            ]
            # The rotary positions themselves go on in every dimension.
            columns = rope[:, 2:3] + ahead if ahead else rope[:, : len(written)]
            assert torch.equal(forward.positions[:, written], columns)

    assert_bites(check)


# Fault 11: Step-3.5 with the bundled config.


def bundled_layer_types() -> tuple[list[str], int]:
    bundled = json.loads(Path(TINY, "config.json").read_text())
    return bundled["layer_types"], bundled["num_hidden_layers"]


def test_the_draft_knows_the_types_of_its_layers_and_the_target_keeps_its_own_list() -> None:
    layer_types, num_layers = bundled_layer_types()
    assert len(layer_types) > num_layers, "the checkpoint must be one that the fault is about"
    config = make_config()
    target = config.model_config.hf_config
    assert config.speculative_config.draft_model_config.hf_config.layer_types == layer_types
    assert target.layer_types == layer_types[:num_layers]
    # This is what vLLM's extraction makes of the target's config; it refuses a list with the modules' types in it.
    assert ExtractHiddenStatesConfig(target).layer_types == layer_types[:num_layers]
    target.layer_types = layer_types
    with pytest.raises(Exception, match="num_hidden_layers"):
        ExtractHiddenStatesConfig(target)


@pytest.mark.usefixtures("unpatched")
def test_without_the_start_up_fix_the_draft_lacks_the_types_of_its_layers() -> None:
    layer_types, num_layers = bundled_layer_types()
    draft = make_config().speculative_config.draft_model_config.hf_config
    assert draft.layer_types == layer_types[:num_layers]


def test_without_the_plugin_the_engine_does_not_start() -> None:
    with pytest.raises(ChildFailedError, match="IndexError: list index out of range"):
        run(scenarios.lossless, mtp(3), mode="off")


# What a model or a host can't do is said at start-up, with state, cause and remedy.


def test_a_draft_layer_without_a_group_is_named() -> None:
    config = make_config()
    rig = make_rig(OURS, config, [full(32), sliding(32), sliding(32)], bind=False)
    add_layer(config, "model.layers.9.self_attn.attn", full(32))
    rig.proposer._draft_attn_layer_names.add("model.layers.9.self_attn.attn")
    with pytest.raises(ValueError, match=r"model\.layers\.9\.self_attn\.attn.*are in no KV cache group"):
        rig.proposer.initialize_attn_backend(rig.kv_cache_config)


def test_more_drafts_than_the_context_holds_are_refused() -> None:
    descriptor = DraftDescriptor("Any")
    assert DraftPlan.make(descriptor, None, 7, 8).num_speculative_tokens == 7
    with pytest.raises(ValueError, match=r"num_speculative_tokens=8 leaves no room .* max_model_len=8"):
        DraftPlan.make(descriptor, None, 8, 8)


def test_a_draft_before_the_groups_are_bound_is_refused() -> None:
    rig = make_rig(OURS, make_config(), [full(32), sliding(32), sliding(32)], bind=False)
    with pytest.raises(RuntimeError, match="initialize_attn_backend, or set_attn on the V2 runner"):
        rig.proposer.set_per_group_attn_metadata(0, torch.zeros(1, 4), torch.zeros(1))


def test_a_draft_before_the_block_tables_were_handed_over_is_refused() -> None:
    rig = make_rig(OURS, make_config(), [full(32), sliding(32), sliding(32)])
    announce = rig.proposer.set_per_group_attn_metadata
    rig.proposer.set_per_group_attn_metadata = lambda gid, *rest: announce(gid, *rest) if gid == 0 else None
    with pytest.raises(RuntimeError, match=r"KV cache group 1 .*set_per_group_attn_metadata must be called"):
        rig.propose(Batch(seq_lens=[33], query_lens=[33]))


def test_a_checkpoint_without_modules_is_refused() -> None:
    config = make_config()
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = 0
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0: there is no module to draft with"):
        OURS(config, CPU)


def test_a_draft_for_requests_that_nobody_named_is_refused() -> None:
    rig = make_rig(OURS, make_config(), [full(32), sliding(32), sliding(32)])
    rig._hand_over = lambda batch: None
    with pytest.raises(RuntimeError, match="without one of the prepare_next_token_ids methods before it"):
        rig.propose(Batch(seq_lens=[33], query_lens=[33]))


def test_a_proposer_of_one_module_runs_it_in_every_step() -> None:
    rig = make_rig(functools.partial(MultiGroupProposer, architecture=mimo.ARCHITECTURE), make_config(), [sliding(32)])
    drafts = rig.propose(Batch(seq_lens=[33, 40], query_lens=[33, 4], rejected=[0, 2]))
    assert drafts.tolist() == [[rig.model.token(0)] * 3] * 2
    assert [len(forward.input_ids) for forward in rig.forwards] == [37, 2, 2]
    assert rig.wrong_slots() == []


def test_layers_of_one_group_share_its_slots_and_metadata() -> None:
    rig = make_rig(OURS, make_config(), [full(32), sliding(32), sliding(32)], bind=False)
    rig.kv_cache_config = kv_cache(([layer_name(0)], full(32)), ([layer_name(1), layer_name(2)], sliding(32)))
    rig.bind()
    rig.propose(Batch(seq_lens=[33, 40], query_lens=[33, 4]))
    assert rig.wrong_slots() == []
    assert len(rig.proposer.groups.all) == 2
    assert rig.forwards[1].metadata is rig.forwards[2].metadata
