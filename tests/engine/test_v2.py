"""The drafter of vLLM's V2 model runner: with the runner's data types, and on its engine by Triton's interpreter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from bench.reference.mimo_checkpoint import VOCAB, write_checkpoint
from proposers.architecture import known_architectures, why_not_on_v2
from proposers.v2 import MultiGroupSpeculator, without_head
from tests.support import scenarios
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import Run, run
from tests.support.rig import CPU, MAX_NUM_SEQS, make_config


@pytest.fixture
def speculator() -> MultiGroupSpeculator:
    config = make_config()
    with set_current_vllm_config(config):
        return MultiGroupSpeculator(config, CPU)


def make_batch(lengths: list[int], rows: list[int], ends: list[int], has_prefill: bool) -> InputBatch:
    """A step in which request `r` of the runner's row `rows[r]` runs `lengths[r]` tokens, the last at `ends[r] - 1`."""
    buffers = InputBuffers(MAX_NUM_SEQS, 256, CPU)
    batch = InputBatch.make_dummy(len(lengths), sum(lengths), buffers)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return replace(
        batch,
        req_ids=[f"request {row}" for row in rows],
        idx_mapping=torch.tensor(rows),
        idx_mapping_np=np.array(rows),
        num_scheduled_tokens=np.array(lengths, dtype=np.int32),
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),
        input_ids=torch.arange(1000, 1000 + sum(lengths), dtype=torch.int32),
        has_prefill=has_prefill,
    )


def test_a_step_is_read_with_its_rejections_and_the_tokens_after_its_chunks(speculator: MultiGroupSpeculator) -> None:
    batch = make_batch([4, 10], rows=[5, 2], ends=[44, 10], has_prefill=True)
    last_sampled = torch.arange(MAX_NUM_SEQS)[:, None] + 50
    follow = torch.arange(4 * MAX_NUM_SEQS).view(4, MAX_NUM_SEQS) + 100
    inputs = speculator._read_step(
        batch, torch.zeros(14, 8), torch.tensor([2, 0]), torch.tensor([2, 0]), last_sampled, follow
    )
    assert inputs.rows.num_rejected.tolist() == [2, 0]
    assert inputs.rows.query_start_loc.tolist() == [0, 4, 14]
    assert inputs.rows.token_ids.tolist() == list(range(1000, 1014))
    assert inputs.next_token_ids[0] == 55
    assert inputs.history_slots.tolist() == [5, 2]
    assert inputs.prompt_token_ids.tolist() == [[-1] * 3, [102, 102 + MAX_NUM_SEQS, 102 + 2 * MAX_NUM_SEQS]]


def test_a_step_of_decodes_has_no_tokens_after_chunks(speculator: MultiGroupSpeculator) -> None:
    batch = make_batch([4], rows=[5], ends=[44], has_prefill=False)
    arguments = (torch.zeros(4, 8), torch.tensor([1]), torch.tensor([3]), torch.zeros(8, 1), torch.zeros(4, 8))
    assert speculator._read_step(batch, *arguments).prompt_token_ids is None


def test_a_row_of_the_runner_that_has_changed_hands_has_no_history(speculator: MultiGroupSpeculator) -> None:
    history = speculator.history
    assert history is not None
    speculator._forget_former_owners(["a", "b"], np.array([3, 1]))
    history.valid.fill_(2)
    speculator._forget_former_owners(["b", "a"], np.array([1, 3]))
    assert history.valid[[1, 3]].tolist() == [2, 2]
    speculator._forget_former_owners(["c", "a"], np.array([1, 3]))
    assert history.valid[[1, 3]].tolist() == [0, 2]


def test_the_hosts_profile_sees_the_largest_pass(speculator: MultiGroupSpeculator) -> None:
    seen: list[int] = []
    speculator.model = lambda **inputs: seen.append(inputs["input_ids"].shape[0])
    batch = make_batch([256], rows=[0], ends=[256], has_prefill=True)
    for is_profile in (False, True):
        with set_current_vllm_config(speculator.vllm_config):
            speculator.propose(batch, {}, {}, *[None] * 8, dummy_run=True, is_profile=is_profile)
    assert seen == [256] * 3 + [256 + 2 * MAX_NUM_SEQS] * 3


def test_passes_are_recorded_for_the_decode_steps_that_the_host_records(speculator: MultiGroupSpeculator) -> None:
    speculator.vllm_config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8, 12, 32, 64]
    assert speculator._graph_sizes() == [1, 2, 3, 8]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parallel_config.data_parallel_size": 2}, "data parallelism"),
        ({"speculative_config.enable_adaptive_verification": True}, "adaptive verification"),
        ({}, None),
    ],
)
def test_what_it_can_not_do_is_left_to_the_host(change: dict[str, Any], reason: str | None) -> None:
    config = make_config()
    for path, value in change.items():
        owner, name = path.split(".")
        setattr(getattr(config, owner), name, value)
    found = why_not_on_v2(config, known_architectures()["Step3p5MTP"])
    assert found is None if reason is None else reason in found


# On the engine. (`tests/oracle/test_oracle_on_v2.py` checks every row and every draft.)

SMALL = {"max_model_len": 96, "max_num_batched_tokens": 48, "max_num_seqs": 4, "num_gpu_blocks_override": 60}


def without() -> dict[str, Any]:
    # In one step: on the CPU the V1 runner can't have the prompts of seeded requests in chunks.
    value: dict[str, Any] = run(scenarios.few, SMALL | {"max_num_batched_tokens": 256}, mode="off").value
    return value


def on_v2(num_speculative_tokens: int, mode: str = "on", **speculative: Any) -> Run:
    return run(scenarios.few, SMALL | mtp(num_speculative_tokens, **speculative), mode=mode, v2=True)


@pytest.mark.parametrize("num_speculative_tokens", [1, 6])
def test_outputs_equal_no_speculation(num_speculative_tokens: int) -> None:
    done = on_v2(num_speculative_tokens)
    assert done.value["tokens"] == without()["tokens"]
    assert done.value["proposer"] == "proposers.v2.MultiGroupSpeculator"
    assert done.value["metrics"]["spec_decode_num_accepted_tokens"] > 0
    line = "proposers.v2.MultiGroupSpeculator drafts for Step3p5MTP on the V2 model runner"
    assert done.log.count(line) == 1


def test_drafts_by_local_argmax_are_the_same() -> None:
    by_logits, reduced = on_v2(3).value, on_v2(3, use_local_argmax_reduction=True).value
    assert reduced["tokens"] == by_logits["tokens"]
    assert (
        reduced["metrics"]["spec_decode_num_accepted_tokens"] == by_logits["metrics"]["spec_decode_num_accepted_tokens"]
    )


def test_probabilistic_drafts_follow_the_seed_of_their_request() -> None:
    done = on_v2(3, draft_sample_method="probabilistic").value
    assert done["tokens"] == without()["tokens"]
    assert done["drawn"] == done["drawn in reverse"]


def test_a_dummy_run_of_the_host_leaves_no_trace() -> None:
    done = run(scenarios.dummy_runs, SMALL | mtp(3), v2=True).value
    assert done["tokens"] == done["again"]
    # The second time the prompts come from the prefix cache.
    assert done["metrics"]["prefix_cache_hits"] > 0
    assert done["metrics"]["spec_decode_num_accepted_tokens"] > 0


def test_the_other_mode_keeps_vllms_own_speculator() -> None:
    done = on_v2(3, mode="upstream")
    assert done.value["proposer"].endswith("multi_module_mtp.speculator.MultiModuleMTPSpeculator")
    assert "drafts for Step3p5MTP" not in done.log


def test_a_model_of_one_module_is_drafted_for_without_loss(tmp_path: Path) -> None:
    engine = {"model": write_checkpoint(tmp_path), "skip_tokenizer_init": True}
    done = run(scenarios.random_prompts, engine | mtp(2), v2=True, vocab_size=VOCAB)
    assert done.value["proposer"] == "proposers.v2.MultiGroupSpeculator"
    assert done.value["tokens"] == run(scenarios.random_prompts, engine, v2=True, vocab_size=VOCAB).value["tokens"]
    assert min(done.value["metrics"]["spec_decode_num_accepted_tokens_per_pos"]) > 0


def test_a_draft_with_heads_of_its_own_is_shown_a_target_without_one() -> None:
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import get_target_lm_head

    part = torch.nn.Module()
    part.model, part.lm_head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    whole = torch.nn.Module()
    whole.get_language_model = lambda: part
    for target in (part, whole):
        shown = without_head(target)
        assert shown.model is part.model
        assert get_target_lm_head(shown, shown) is None
