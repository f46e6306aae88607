"""The compiled chain beside the eager one, on one engine: compiling takes longer than all that is run."""

from typing import Any

import torch
from torch._dynamo.utils import counters
from vllm import LLM

from bench.corpus import held_out_prompts
from bench.workers.engine import drafter_of
from proposers.v1 import SampledDrafts
from tests.support import weights
from tests.support.scenarios import greedy, runner


def beside_the_eager_chain(llm: LLM, max_tokens: int) -> dict[str, Any]:
    """Runs the eager chain before the compiled one on the same rows, with batches of several sizes; then new weights.

    Returns:
        `passes`: number of rows and requests of each compiled pass, and whether its drafts were the eager chain's;
        `largest`: difference of hidden states; `graphs`: compiled after the engine had started; `updated`: of
        `tests.support.weights.updated`.
    """
    drafter = drafter_of(runner(llm))
    run_compiled, chain = drafter._run_compiled, drafter.chain
    passes: list[tuple[int, int, bool]] = []
    largest = 0.0

    def run_both(_: Any, window: Any, inputs: Any, layers: Any, execution: Any, drafts: Any) -> torch.Tensor | None:
        nonlocal largest
        eager = SampledDrafts(drafts.num_steps)
        drafter.chain = None
        expected = drafter._run_chain(window, inputs, None, eager)
        drafter.chain = chain
        found = run_compiled(chain, window, inputs, layers, execution, drafts)
        same = all(map(torch.equal, drafts.token_ids, eager.token_ids))
        passes.append((window.num_rows, len(window.last_rows), same and len(drafts.token_ids) == len(eager.token_ids)))
        largest = max(largest, float((found - expected).abs().max()))
        return found

    before = counters["stats"]["unique_graphs"]
    drafter._run_compiled = run_both
    texts = held_out_prompts(llm.get_tokenizer(), 8, 150)
    for size in (1, 8, 3):
        greedy(llm, [text[: 20 + 16 * i] for i, text in enumerate(texts[:size])], max_tokens)
    drafter._run_compiled = run_compiled
    updated = weights.updated(llm, "draft", max_tokens)
    graphs = counters["stats"]["unique_graphs"] - before
    return {"passes": passes, "largest": largest, "graphs": graphs, "updated": updated}


beside_the_eager_chain.prepare = weights.updated.prepare


def has_a_chain(llm: LLM) -> bool:
    return drafter_of(runner(llm)).chain is not None
