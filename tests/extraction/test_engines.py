"""The faults of vLLM's own extraction (`docs/host_faults.md`) that ours must not have, on running engines.

Those of its configuration are in `tests/unit/test_extraction_plan.py`, of its memory in `tests/unit/test_store.py`.
"""

from typing import Any

import pytest

from tests.support import extraction_scenarios
from tests.support.children import TINY, ChildFailedError
from tests.support.engine_arguments import extract
from tests.support.forked_engine import run
from tests.support.tiny_models import write_model

PROMPTS = [list(range(1, 40)), list(range(5, 90))]
NEW_TOKENS = 20


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has the EAGLE3 interface, so that vLLM extracts from it too."""
    return write_model("llama", tmp_path_factory.mktemp("models") / "llama")


def decode(path: str, mode: str = "on", engine: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    arguments = {"prompts": PROMPTS, "max_tokens": NEW_TOKENS, **sampling}
    engine = {"model": path, "skip_tokenizer_init": True, **(extract([1, 3]) if engine is None else engine)}
    return run(extraction_scenarios.decode, engine, mode=mode, **arguments).value


def test_vllm_itself_refuses_models_without_the_eagle3_interface() -> None:
    """That ours takes them is in `tests/extraction/test_rows.py`."""
    with pytest.raises(ChildFailedError, match="Model does not support EAGLE3 interface"):
        decode(TINY, mode="upstream")


def test_nothing_is_drafted_and_a_step_makes_a_token(llama: str) -> None:
    """vLLM hands back a draft that is never right, and verifies its position for nothing."""
    ours, host = decode(llama), decode(llama, mode="upstream")
    assert ours["proposer"] == "proposers.hidden_states.extractor.ExtractHiddenStatesProposer"
    assert host["proposer"] == "vllm.v1.spec_decode.extract_hidden_states.ExtractHiddenStatesProposer"
    drafted = [r["metrics"]["spec_decode_num_draft_tokens"] for r in (ours, host)]
    assert drafted[0] == 0 < drafted[1]
    # The first step has both prompts, and each step after it a position of each request.
    assert ours["num_tokens"] == [sum(map(len, PROMPTS))] + [2] * (NEW_TOKENS - 1)
    assert max(host["num_tokens"][1:]) == 4


# vLLM's rejection sampler crashes on the CPU in steps without a draft whose requests all have a top-k.
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 5, "seed": 1}], ids=["greedy", "top-k"])
def test_generation_is_what_it_is_without_extraction(sampling: dict[str, Any], llama: str) -> None:
    plain = decode(llama, mode="off", engine={}, **sampling)
    ours = decode(llama, **sampling)
    assert ours["tokens"] == plain["tokens"]
    assert ours["num_tokens"] == plain["num_tokens"]


def test_blocks_are_copied_with_their_rows(llama: str) -> None:
    """The host copies blocks where a prefix of recurrent states ends inside one, every tensor of its list."""
    engine = {"model": llama, "skip_tokenizer_init": True, **extract([1, 3])}
    assert run(extraction_scenarios.copies_rows, engine).value


def test_tensor_parallel_ranks_keep_a_slice_each_and_have_as_many_blocks() -> None:
    engine = {**extract([6, 2]), "skip_tokenizer_init": True, "tensor_parallel_size": 2}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    found = run(extraction_scenarios.ranks, engine, env=env, prompt=PROMPTS[0]).value
    assert found["widths"] == [96, 96]
    assert len(set(found["num_blocks"])) == 1
    assert found["worst"] < 1e-5


def test_a_connector_that_does_not_take_the_rows_is_refused(llama: str) -> None:
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(ChildFailedError, match=r"ExampleConnector doesn't take hidden states"):
        decode(llama, engine={**extract([1, 3]), "kv_transfer_config": connector})
