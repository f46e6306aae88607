"""What the V1 adapter works out itself on a CPU, or takes as the host has made it, against the host's own."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mtp.kernels.window import shift_rows_by_ops, shift_rows_on_host
from proposers.v1 import MultiGroupProposer
from tests.support.children import run_python
from tests.support.rig import Batch, Rig, full, layer_name, make_config, make_rig, sliding

BATCH = Batch(seq_lens=[33, 40], query_lens=[33, 4])


def make_rig_of(num_modules: int) -> Rig:
    config = make_config(num_modules)
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = num_modules
    return make_rig(MultiGroupProposer, config, [full(32), sliding(32), sliding(32)][:num_modules])


class HostBatch:
    """As much as is read of the host's `InputBatch`."""

    def __init__(self, num_reqs: int, vocab_size: int) -> None:
        self.num_reqs, self.vocab_size = num_reqs, vocab_size
        self.req_ids = [str(request) for request in range(num_reqs)]
        self.num_tokens_no_spec = torch.full((num_reqs,), 4).numpy()


class HostRequest:
    def get_token_id(self, index: int) -> int:
        return 1000 + index


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_sampled_and_rejected_tokens_are_counted_as_the_host_counts_them(num_drafts: int) -> None:
    rng, num_reqs, vocab_size = random.Random(num_drafts), 5, 50
    proposer = make_rig_of(1).proposer
    batch, requests = HostBatch(num_reqs, vocab_size), {str(request): HostRequest() for request in range(num_reqs)}
    for _ in range(20):
        is_discarded = [rng.random() < 0.3 for _ in range(num_reqs)]
        drafted = [0 if discarded else rng.randint(0, num_drafts) for discarded in is_discarded]
        sampled = torch.full((num_reqs, 1 + num_drafts), -1, dtype=torch.int32)
        for request, count in enumerate(drafted):
            taken = 1 + rng.randint(0, count)
            sampled[request, :taken] = torch.randint(vocab_size, (taken,), dtype=torch.int32)
        mask = torch.tensor([*is_discarded, True, True])  # as long as the host's buffer is
        arguments = (sampled, requests, batch, mask)
        next_tokens, counts = proposer.prepare_next_token_ids_padded(*arguments)
        hosts_tokens, hosts_counts = EagleProposer.prepare_next_token_ids_padded(proposer, *arguments)
        assert counts.tolist() == hosts_counts.tolist()
        assert counts.dtype == next_tokens.dtype == torch.int32
        for request, discarded in enumerate(is_discarded):
            assert discarded or next_tokens[request] == hosts_tokens[request]
            assert 0 <= next_tokens[request] < vocab_size
        cad, drafts = _drafted(drafted)
        ours = proposer.prepare_inputs_padded(cad, drafts, counts)
        hosts = EagleProposer.prepare_inputs_padded(proposer, cad, drafts, counts)
        for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
            assert getattr(ours[0], name) == getattr(hosts[0], name), name
        if not any(drafted):  # every last row is valid, as without verification
            assert ours[1:] == (None, None)
            assert not hosts[2].any()
            continue
        for mine, theirs in zip(ours[1:], hosts[1:], strict=True):
            assert mine.tolist() == theirs.tolist()
            assert mine.dtype == theirs.dtype


def _drafted(num_drafts: list[int]) -> tuple[CommonAttentionMetadata, SpecDecodeMetadata]:
    """A step of requests with so many drafts each."""
    query_lens = torch.tensor(num_drafts, dtype=torch.int32) + 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0, dtype=torch.int32)])
    cad = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=query_lens + 10,
        num_reqs=len(num_drafts),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(query_lens.max()) + 10,
        block_table_tensor=torch.zeros(len(num_drafts), 4, dtype=torch.int32),
        slot_mapping=torch.arange(int(starts[-1])),
    )
    return cad, SpecDecodeMetadata.make_dummy([[0] * count for count in num_drafts], torch.device("cpu"))


def test_rows_are_shifted_on_the_host_as_by_operators() -> None:
    token_ids = torch.randint(100, (9,), dtype=torch.int32)
    last_rows, follows = torch.tensor([2, 6, 8], dtype=torch.int32), torch.tensor([7, 8, 9])
    shifted = shift_rows_on_host(token_ids, last_rows, follows)
    assert shifted.dtype == token_ids.dtype
    assert shifted.tolist() == shift_rows_by_ops(token_ids, last_rows, follows).tolist()


def hand_over(rig: Rig, metadata: Any) -> dict[str, Any]:
    """Has the host build its step's metadata; returns what it gives `propose` besides."""
    rig.proposer.take_step_metadata(metadata)
    return {"slot_mappings": {layer_name(module): torch.arange(37) for module in range(rig.num_modules)}}


def test_the_pass_of_one_module_takes_what_the_host_has_made_of_the_step_for_its_layers() -> None:
    rig = make_rig_of(1)
    rig.propose(BATCH, 1)
    (built,) = rig.forwards
    hosts = replace(built.metadata)
    rig.propose(BATCH, 1, **hand_over(rig, {layer_name(0): hosts}))
    (forward,) = rig.forwards
    assert forward.metadata is hosts
    assert forward.slots == list(range(37))
    rig.propose(BATCH, 1)
    assert rig.forwards[0].metadata is not hosts, "it was of another step"
    assert rig.forwards[0].slots == built.slots


def test_windows_other_than_the_step_do_not_take_it() -> None:
    rig = make_rig_of(3)
    rig.propose(BATCH, **hand_over(rig, {layer_name(module): None for module in range(3)}))
    assert all(forward.metadata is not None for forward in rig.forwards)
    rig = make_rig_of(1)
    more = hand_over(rig, {layer_name(0): None})
    rig.proposer.prepare_next_token_ids_cpu([], {}, HostBatch(0, 50), {})  # its rows are the valid ones
    rig.propose(BATCH, 1, **more)
    assert rig.forwards[0].metadata is not None


def test_chunks_that_the_host_discards_are_followed_by_what_it_knows() -> None:
    rig = make_rig_of(1)
    rig.propose(Batch(seq_lens=[30, 40], query_lens=[4, 4], prompt_lens=[90, 40]), 1)
    assert [rig.forwards[0].input_ids[row] for row in (3, 7)] == [30, 7]


def test_the_runner_keeps_the_functions_that_vllm_has_for_a_cpu() -> None:
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.v1.worker import gpu_model_runner\n"
        "from vllm.v1.worker.cpu import shm\n"
        "print(gpu_model_runner.async_tensor_h2d is shm.async_tensor_h2d)"
    )
    assert run_python(code, MTP_PROPOSERS="on").endswith("True\n")
