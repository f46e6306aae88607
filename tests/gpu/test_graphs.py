"""Recorded passes in a real engine: every replay against the eager pass on the same inputs, bit for bit."""

import copy
import os
from typing import Any

import pytest
import torch

from bench.corpus import held_out_prompts
from tests.engine import TINY

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


class Checked:
    """Stands before `PassGraphs.replay`: runs the eager pass first and undoes it, then replays and compares."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.replays: dict[tuple[int, int], int] = {}
        self._replay = drafter.graphs.replay
        drafter.graphs.replay = self

    def caches(self) -> list[torch.Tensor]:
        context = self.drafter.vllm_config.compilation_config.static_forward_context
        return [context[name].kv_cache for name in sorted(self.drafter._draft_attn_layer_names)]

    def state(self) -> list[torch.Tensor]:
        """What a pass leaves behind: the history, less the slot that padding writes to, and the KV caches."""
        history = self.drafter.history
        kept = [history.token_ids, history.positions, history.hidden_states, history.ends, history.valid]
        return [*(x[: history.padding_slot] for x in kept), *self.caches()]

    def poison_tables(self, cad: Any) -> None:
        """What lies past the blocks of a request must not matter: following such an entry leaves memory."""
        reach = cad.seq_lens + self.drafter.plan.num_speculative_tokens + 1
        for group in self.drafter.groups.all:
            table = group.table(cad.num_reqs).clone()
            columns = torch.arange(table.shape[1], device=table.device)
            table[columns[None] * group.block_size >= reach[:, None]] = 2**30
            group.block_table = table

    def __call__(self, size: int, rows: Any, next_token_ids: Any, history_slots: Any, cad: Any) -> torch.Tensor:
        from mtp.proposer import Drafts
        from mtp.window import PassInputs

        state = self.state()
        before = [x.clone() for x in state]
        slots = torch.tensor(history_slots, device=cad.seq_lens.device)
        drafts = Drafts(self.drafter.plan.num_speculative_tokens, None)
        inputs = PassInputs(rows, next_token_ids, slots)
        self.drafter._run_pass(inputs, copy.copy(cad), None, None, drafts)
        eager_drafts = torch.stack(drafts.token_ids, dim=1)
        eager = [x.clone() for x in state]
        for x, old in zip(state, before, strict=True):
            x.copy_(old)
        self.poison_tables(cad)
        replayed = self._replay(size, rows, next_token_ids, history_slots, cad)
        assert torch.equal(replayed, eager_drafts)
        for x, wanted in zip(state, eager, strict=True):
            assert torch.equal(x, wanted)
        key = (cad.num_reqs, size)
        self.replays[key] = self.replays.get(key, 0) + 1
        return replayed


@pytest.mark.parametrize(("k", "dtype"), [(3, "float32"), (6, "bfloat16")])
def test_a_replay_is_the_eager_pass(k: int, dtype: str) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    llm = LLM(
        TINY,
        dtype=dtype,
        max_model_len=400,
        max_num_seqs=12,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.2,
        attention_config={"backend": "TRITON_ATTN"},
        speculative_config={"method": "mtp", "num_speculative_tokens": k, "attention_backend": "TRITON_ATTN"},
        compilation_config={"cudagraph_capture_sizes": [(k + 1) * n for n in (1, 2, 4, 8, 12)]},
    )
    drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    assert drafter.graphs is not None
    checked = Checked(drafter)
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TINY), 12, 150)
    for batch in (1, 3, 5, 12):
        params = [SamplingParams(temperature=0.0, max_tokens=20 + 7 * i, ignore_eos=True) for i in range(batch)]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:batch]], params, use_tqdm=False)
    sizes = {size for _, size in checked.replays}
    assert sizes == {1, 2, 4, 8, 12}
    assert any(num_reqs < size for num_reqs, size in checked.replays)
    assert sum(checked.replays.values()) > 50
    print(checked.replays)
