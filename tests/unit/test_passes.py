"""Which rows of a module are computed to the end."""

from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from mtp.passes import Execution
from proposers.v1 import MultiGroupProposer
from tests.support.rig import Batch, SpyModel, full, make_config, make_rig, sliding

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
