"""Every row of every layer in the store of a running engine, against dense references."""

from typing import Any

import pytest

from tests.support import extraction_scenarios
from tests.support.children import TINY
from tests.support.engine_arguments import extract
from tests.support.forked_engine import run
from tests.support.tiny_models import write_model

# Small chunks, and too few blocks for all requests at once.
CROWDED = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 60}
ALL_OF_STEP = [6, 0, 5, 1, 4, 2, 3]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The path of a tiny model by its family's name."""
    folder = tmp_path_factory.mktemp("models")
    return lambda family: TINY if family == "step3p5" else write_model(family, folder / family)


def parity(path: str, layer_ids: list[int], **more: Any) -> dict[str, Any]:
    arguments = {key: more.pop(key) for key in ("witnessed", "env") if key in more}
    engine = {**extract(layer_ids), "model": path, "skip_tokenizer_init": True, "max_num_seqs": 16, **more}
    return run(extraction_scenarios.parity, engine, **arguments).value


def assert_right(found: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found["num_missing"] == 0
    assert found["num_rows"] > 3000
    assert max(found["worst"]) < tolerance
    assert found["proposer"] == "proposers.hidden_states.extractor.ExtractHiddenStatesProposer"


@pytest.mark.parametrize(
    ("family", "layer_ids"),
    [("llama", [2, 0, 3, 1]), ("qwen3", [3, 1]), ("gemma3", [0, 3, 2]), ("mimo", [2, 1, 0]), ("cohere", [3, 0, 1, 2])],
)
def test_rows_are_those_of_transformers(family: str, layer_ids: list[int], model_path: Any) -> None:
    found = parity(model_path(family), layer_ids)
    assert_right(found)
    assert found["metrics"]["prefix_cache_hits"] > 1000
    assert found["store"][2] == len(layer_ids)


def test_rows_of_step3p5_are_those_of_its_reference_over_chunks_and_preemptions(model_path: Any) -> None:
    found = parity(model_path("step3p5"), ALL_OF_STEP, **CROWDED)
    assert_right(found)
    assert found["metrics"]["prefix_cache_hits"] > 500
    assert found["metrics"]["num_preemptions"] > 0
    assert set(found["specs"]) == {"FullAttentionSpec", "SlidingWindowSpec"}
    assert found["store"][:3] == [60, 32, 7]


# Inductor takes a minute for Step-3.5, so there the graph that Dynamo has traced is run as it is.
@pytest.mark.parametrize(
    ("family", "layer_ids", "env"),
    [("step3p5", ALL_OF_STEP, {"VLLM_CPU_CI_ENV": "1"}), ("mimo", [2, 0, 1], {})],
    ids=["traced", "by Inductor"],
)
def test_rows_are_right_in_a_compiled_model(
    family: str, layer_ids: list[int], env: dict[str, str], model_path: Any
) -> None:
    assert_right(parity(model_path(family), layer_ids, env=env, enforce_eager=False))


@pytest.mark.parametrize(
    ("family", "more", "spec"),
    [
        # The CPU build's MLA wants bfloat16, and its prefix cache of recurrent states Triton.
        ("deepseek", {"dtype": "bfloat16"}, "MLAAttentionSpec"),
        ("lfm2", {}, "MambaSpec"),
    ],
)
def test_rows_of_mla_and_of_a_hybrid_model_are_what_its_layers_saw(
    family: str, more: dict[str, Any], spec: str, model_path: Any
) -> None:
    engine = {"enable_prefix_caching": False, **more}
    found = parity(model_path(family), [2, 3, 0, 1], witnessed=True, **engine)
    assert_right(found, tolerance=0.01 if more else 1e-5)
    assert spec in found["specs"]
