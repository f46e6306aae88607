"""Captured passes in a real engine: every replay against the eager pass on the same inputs, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from bench.corpus import held_out_prompts
from bench.large_shapes import SHAPES
from bench.oracle.replayed import EagerGraph
from bench.oracle.runners import view_of
from bench.workers.engine import random_prompts
from mtp.graphs import PassShape, Replay
from mtp.rows import PassInputs
from tests.support.children import TINY


class Checked:
    """In place of `PassGraphs.replay`: runs the pass eagerly first, undoes what it did, then replays and compares.

    Eagerly it is made twice: on the graph's own inputs, padding included, which must give the same to the bit, and as
    a step without graphs would make it. There a batch is not padded, so GEMMs may add in another order.
    """

    def __init__(self, runner: Any) -> None:
        view = view_of(runner)
        self.drafter, self.graphs, self.layer_names = view.drafter, view.drafter.graphs, sorted(view.layer_names)
        self.replays: dict[tuple[int, PassShape], int] = {}
        self.drafts_that_differ = 0
        self._replay = self.graphs.replay
        self.graphs.replay = self

    def caches(self) -> list[torch.Tensor]:
        context = self.drafter.vllm_config.compilation_config.static_forward_context
        return [context[name].kv_cache for name in self.layer_names]

    def state(self) -> list[torch.Tensor]:
        """What a pass leaves behind: the history, less the slot that padding writes to, and the KV caches."""
        history = self.drafter.history
        if history is None:
            return self.caches()
        kept = [history.token_ids, history.positions, history.hidden_states, history.ends, history.valid]
        return [*(x[: history.padding_slot] for x in kept), *self.caches()]

    def poison_tables(self, seq_lens: torch.Tensor) -> None:
        """What lies past the blocks of a request must not matter: following such an entry leaves memory."""
        reach = seq_lens + self.drafter.plan.num_speculative_tokens + 1
        for group in self.drafter.groups.all:
            table = group.table(len(seq_lens))
            if not self.drafter.tables_stay:
                group.block_table = table = table.clone()
            columns = torch.arange(table.shape[1], device=table.device)
            table[columns[None] * group.block_size >= reach[:, None]] = 2**30

    def undone(self, run: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The drafts of a pass and what it left behind, put back to what was there before."""
        state = self.state()
        before = [x.clone() for x in state]
        drafts = run()
        left = [x.clone() for x in state]
        for x, old in zip(state, before, strict=True):
            x.copy_(old)
        return drafts, left

    def eager(self, num_drafts: int | None, inputs: PassInputs, num_rows: int, seq_lens: torch.Tensor) -> torch.Tensor:
        num_reqs, starts = len(seq_lens), inputs.rows.query_start_loc
        group = self.drafter.groups.primary
        cad = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=seq_lens,
            num_reqs=num_reqs,
            num_actual_tokens=num_rows,
            max_query_len=int(starts.diff().max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=group.table(num_reqs),
            slot_mapping=group.slot_mapping[:num_rows],
            seq_lens_cpu_upper_bound=seq_lens.cpu(),
        )
        configured = self.drafter.plan.num_speculative_tokens
        drafts = self.drafter._new_drafts(configured if num_drafts is None else num_drafts)
        self.drafter._run_pass(inputs, cad, None, drafts)
        found = torch.zeros(num_reqs, configured, dtype=torch.int64, device=seq_lens.device)
        for step, token_ids in enumerate(drafts.token_ids):
            found[:, step] = token_ids
        return found

    def padded(self, replay: Replay, *arguments: Any) -> torch.Tensor:
        graph, drafts = self.graphs._graphs[replay.shape]
        self.graphs._graphs[replay.shape] = EagerGraph(self.graphs, replay.shape, drafts), drafts
        result = self._replay(replay, *arguments)
        self.graphs._graphs[replay.shape] = graph, drafts
        return result

    def __call__(self, replay: Replay, inputs: PassInputs, num_rows: int, seq_lens: torch.Tensor) -> torch.Tensor:
        arguments, shape = (inputs, num_rows, seq_lens), replay.shape
        num_reqs = len(seq_lens)
        self.poison_tables(seq_lens)
        plain, plain_left = self.undone(lambda: self.eager(shape.num_drafts, *arguments))
        padded, padded_left = self.undone(lambda: self.padded(replay, *arguments))
        replayed = self._replay(replay, *arguments)
        assert torch.equal(replayed, padded)
        for x, wanted in zip(self.state(), padded_left, strict=True):
            assert torch.equal(x, wanted)
        if shape == self.graphs.even(num_reqs, shape.num_drafts):
            assert torch.equal(replayed, plain)
        for x, wanted in zip(self.state(), plain_left, strict=True):
            rounding = 64 * torch.finfo(x.dtype).eps if x.is_floating_point() else 0
            torch.testing.assert_close(x, wanted, rtol=rounding, atol=rounding)
        self.drafts_that_differ += int((replayed != plain).sum())
        key = (num_reqs, shape)
        self.replays[key] = self.replays.get(key, 0) + 1
        return replayed


@pytest.mark.parametrize(
    ("runner", "k", "dtype", "table"),
    [
        ("v1", 3, "float32", None),
        ("v1", 6, "bfloat16", None),
        ("v2", 3, "float32", [(1, 2, 3), (3, 4, 0), (5, 12, 1)]),
        ("v2", 6, "bfloat16", None),
    ],
)
def test_a_replay_is_the_eager_pass(
    runner: str, k: int, dtype: str, table: list[tuple[int, int, int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "v2")))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(
        TINY,
        dtype=dtype,
        max_model_len=400,
        max_num_seqs=12,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        attention_config={"backend": "TRITON_ATTN"},
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": k,
            "attention_backend": "TRITON_ATTN",
            "num_speculative_tokens_per_batch_size": table,
        },
        # The target is not compiled: it is not what is looked at, and would take most of the time.
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [(k + 1) * n for n in (1, 2, 4, 8, 12)],
        },
    )
    checked = Checked(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
    assert checked.graphs is not None
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TINY), 12, 150)
    for batch in (1, 3, 5, 12):
        params = [SamplingParams(temperature=0.0, max_tokens=20 + 7 * i, ignore_eos=True) for i in range(batch)]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:batch]], params, use_tqdm=False)
    sizes = {shape.num_reqs for _, shape in checked.replays if shape.even}
    assert sizes == {1, 2, 4, 8, 12}
    assert any(num_reqs < shape.num_reqs for num_reqs, shape in checked.replays if shape.even)
    assert len({shape for _, shape in checked.replays if not shape.even}) >= 2
    assert {shape.num_drafts for _, shape in checked.replays} == ({None} if table is None else {None, 0, 1})
    assert sum(checked.replays.values()) > 50
    assert checked.drafts_that_differ <= (0 if dtype == "float32" else 5)
    print(checked.replays, checked.drafts_that_differ)
    llm.llm_engine.engine_core.shutdown()


# FlashAttention takes values narrower than keys from its fourth version on, which isn't on every machine.
BACKENDS = {
    "step3p5": "FLASH_ATTN",
    "mimo-v2": "TRITON_ATTN_DIFFKV",
    "mimo": "FLASH_ATTN",
    "deepseek-v3": "FLASH_ATTN_MLA",
}
# Which captures no batch of queries of several lengths, so steps with a prompt run eagerly.
EVEN_ONLY = {"FLASH_ATTN_MLA"}


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replay_is_the_eager_pass_with_the_backends_of_large_models(
    shape: str, runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention, which takes neither float32 nor the tiny model's heads, and values narrower than keys."""
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "v2")))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape].make_config(4, 4096)))
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=400,
        max_num_seqs=6,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        attention_config={"backend": BACKENDS[shape]},
        speculative_config={"method": "mtp", "num_speculative_tokens": 3, "attention_backend": BACKENDS[shape]},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [4, 8, 16, 24],
        },
    )
    checked = Checked(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
    prompts = random_prompts(4096, 12, 350)
    lengths = [10 + 3 * i for i in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    texts = [{"prompt_token_ids": prompt[: 30 * (i + 1)]} for i, prompt in enumerate(prompts)]
    llm.generate(texts, params, use_tqdm=False)
    captured = {pass_shape for _, pass_shape in checked.replays}
    uneven = sum(not pass_shape.even for pass_shape in captured)
    assert uneven == 0 if BACKENDS[shape] in EVEN_ONLY else uneven >= 2
    assert any(pass_shape.even for pass_shape in captured)
    print(checked.replays, checked.drafts_that_differ)
    llm.llm_engine.engine_core.shutdown()
