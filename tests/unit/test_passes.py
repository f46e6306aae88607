"""Which rows of a module are computed, and which of them to the end."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mtp.passes import Execution
from proposers.v1 import MultiGroupProposer
from tests.support.rig import CPU, WINDOW, Batch, SpyModel, full, make_config, make_rig, sliding

BATCH = Batch(seq_lens=[33, 40], query_lens=[33, 4])
LAST_ROWS = [32, 36]


class EndsEarly(SpyModel):
    """Notes which rows are wanted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.wanted: list[list[int] | None] = []

    def forward(self, wanted: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        self.wanted.append(None if wanted is None else wanted.tolist())
        output = super().forward(**kwargs)
        return output if wanted is None else output[wanted]


@pytest.mark.parametrize(
    ("num_modules", "takes_wanted", "mode", "wanted"),
    [
        (3, True, CUDAGraphMode.NONE, [None, None, LAST_ROWS]),  # the others feed the next one
        (1, True, CUDAGraphMode.NONE, [LAST_ROWS]),
        (1, True, CUDAGraphMode.PIECEWISE, [None]),  # the host's graph has all rows
        (3, False, CUDAGraphMode.NONE, [None, None, None]),
    ],
)
def test_rows_that_nothing_reads_end_early_where_the_model_can(
    num_modules: int, takes_wanted: bool, mode: CUDAGraphMode, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(num_modules)
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = num_modules
    rig = make_rig(MultiGroupProposer, config, [full(32), sliding(32), sliding(32)][:num_modules])
    rig.model = rig.proposer.model = EndsEarly(rig.model.vocab_size, num_modules)
    rig.proposer.takes_wanted = takes_wanted
    monkeypatch.setattr(rig.proposer, "_plan_execution", lambda num_rows: Execution(mode, num_rows, None))
    drafts = rig.propose(BATCH, num_modules)
    assert rig.model.wanted == wanted
    assert drafts.tolist() == [[rig.model.token(module) for module in range(num_modules)]] * len(BATCH)


def test_rows_of_prompts_that_no_draft_depends_on_are_left_out() -> None:
    config = make_config()
    config.cache_config.enable_prefix_caching = False
    rig = make_rig(MultiGroupProposer, config, [sliding(32)] * 3)
    reach = rig.proposer.prompt_reach
    assert reach == 3 * WINDOW - 2
    chunks = Batch(seq_lens=[100, 30], query_lens=[100, 20], prompt_lens=[100 + reach, 400])
    assert rig.propose(chunks).tolist() == [[0] * 3] * 2
    assert rig.forwards == []  # all rows of both are too early
    batch = Batch(seq_lens=[200, 75, 10], query_lens=[190, 45, 4], prompt_lens=[50 + reach, 42 + reach, 10])
    rig.propose(batch)
    assert [forward.starts for forward in rig.forwards] == [[0, 150, 183, 187]] * 3
    assert rig.forwards[0].positions[[0, 150, 183]].tolist() == [50, 42, 6]


@pytest.mark.parametrize("reader", ["prefix cache", "KV connector", "full attention"])
def test_rows_that_somebody_may_read_are_all_run(reader: str) -> None:
    config = make_config()
    config.cache_config.enable_prefix_caching = reader == "prefix cache"
    if reader == "KV connector":
        config.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    last = full(32) if reader == "full attention" else sliding(32)
    rig = make_rig(MultiGroupProposer, config, [sliding(32), sliding(32), last])
    rig.propose(Batch(seq_lens=[100], query_lens=[100], prompt_lens=[400]))
    assert [forward.starts for forward in rig.forwards] == [[0, 100]] * 3


def test_the_chain_of_one_module_or_of_weights_of_8_bits_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    rigs = {}
    for num_modules in (1, 3):
        config = make_config(num_modules)
        config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = num_modules
        rigs[num_modules] = make_rig(MultiGroupProposer, config, [full(32), sliding(32), sliding(32)][:num_modules])
    assert not rigs[1].proposer._compiles_chain()
    assert rigs[3].proposer._compiles_chain()
    monkeypatch.setattr(rigs[3].proposer.cheap, "fp8", True)
    assert not rigs[3].proposer._compiles_chain()


def test_a_row_without_a_draft_to_consume_takes_a_token_that_does_not_depend_on_the_batch() -> None:
    inputs = []
    for others in ([], [20]):
        rig = make_rig(MultiGroupProposer, make_config(), [full(32), sliding(32), sliding(32)])
        lens = [30, *others]
        rig.propose(Batch(lens, query_lens=[4] * len(lens), prompt_lens=lens), num_speculative_tokens=0)
        inputs.append([forward.input_ids[:4] for forward in rig.forwards])
    assert inputs[0] == inputs[1]
    assert inputs[0] == [[1, 2, 3, 7], [2, 3, 7, 7], [3, 7, 7, 7]]


def test_where_nobody_has_drafts_the_pass_has_the_steps_own_rows_and_metadata() -> None:
    proposer = make_rig(MultiGroupProposer, make_config(), [full(32), sliding(32), sliding(32)]).proposer
    host = super(MultiGroupProposer, proposer)
    batch, goes_on = SimpleNamespace(num_reqs=2, req_ids=["a", "b"], vocab_size=99), torch.tensor([False, True, True])
    batch.num_tokens_no_spec, known = [3, 3], SimpleNamespace(get_token_id=lambda position: 50)
    sampled = torch.tensor([[7], [8]], dtype=torch.int32)
    arguments = sampled, {"a": known, "b": known}, batch, goes_on
    (ours, counts), (theirs, host_counts) = (x.prepare_next_token_ids_padded(*arguments) for x in (proposer, host))
    assert counts.tolist() == host_counts.tolist() == [1, 0]
    assert ours[0] == theirs[0] == 7  # the other's is the prompt's, which the pass looks up
    assert (ours.dtype, counts.dtype) == (theirs.dtype, host_counts.dtype)

    starts = torch.tensor([0, 5, 9], dtype=torch.int32)
    cad: Any = SimpleNamespace(query_start_loc_cpu=starts)
    no_drafts = SpecDecodeMetadata.make_dummy([[], []], CPU)
    assert proposer.prepare_inputs_padded(cad, no_drafts, counts) == (cad, None, None)
