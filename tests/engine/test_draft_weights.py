"""A draft whose weights are not all in the checkpoint is refused by their names; one that is stored otherwise than its
target drafts as it is stored.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support import scenarios
from tests.support.checkpoints import quantised, without
from tests.support.children import TINY, ChildFailedError
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import Run, run
from tests.support.tiny_models import write_model

MODULE = "model.layers.7"
MIMO_MODULE = "model.mtp_layers.0"


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("mimo", tmp_path_factory.mktemp("mimo"))


def draft(model: str, mode: str = "on", **more: Any) -> Run:
    engine = {**mtp(1), "model": model, "skip_tokenizer_init": True, **more}
    return run(scenarios.random_prompts, engine, mode=mode, vocab_size=128)


# vLLM's products with weights of int8 take no float32 on CPUs with AMX.
QUANTISED = {"dtype": "bfloat16"}


def length(outcome: Run) -> float:
    """Acceptance length."""
    metrics = outcome.value["metrics"]
    return 1 + metrics["spec_decode_num_accepted_tokens"] / metrics["spec_decode_num_drafts"]


# Tensors that are missing.


LACKING = (
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "shared_head.output.weight",
)


def test_a_module_that_lacks_tensors_is_refused_by_their_names(tmp_path: Path) -> None:
    model = without(TINY, tmp_path, *(f"{MODULE}.{name}" for name in LACKING))
    with pytest.raises(ChildFailedError) as failed:
        draft(model)
    message = str(failed.value)
    assert f"has no weights for {len(LACKING)} parts of its MTP layers" in message
    for name in LACKING:
        assert f"{MODULE}.{name}" in message.replace("shared_head.head", "shared_head.output")
    assert "MTP_PROPOSERS=upstream" in message


@pytest.mark.parametrize("name", ["self_attn.v_proj.bias"])
def test_so_is_one_whose_layers_have_other_names_in_the_checkpoint(name: str, mimo: str, tmp_path: Path) -> None:
    model = without(mimo, tmp_path, f"{MIMO_MODULE}.{name}")
    with pytest.raises(ChildFailedError, match=f"1 parts of its MTP layers: {MIMO_MODULE}.{name}"):
        draft(model)
    # vLLM's own drafts with what was in memory.
    assert draft(model, mode="upstream").value["metrics"]["spec_decode_num_drafts"] > 0


def test_embedding_and_head_that_are_the_targets_may_be_absent(mimo: str) -> None:
    assert length(draft(mimo)) > 1.3


def test_a_target_that_lacks_a_tensor_is_vllms_to_judge(mimo: str, tmp_path: Path) -> None:
    assert draft(without(mimo, tmp_path, "model.layers.1.self_attn.k_proj.weight")).value["tokens"]


# Modules that are stored otherwise than the target.


IGNORED = ["mtp"], ["re:.*mtp_layers.*"]
AS_VLLM_NAMES_THEM = [r"re:.*layers\.2\..*"]


def ignoring(mimo: str, folder: Path, names: list[str]) -> str:
    """A quantised MiMo with modules that are not, and an ignore list that calls them so."""
    return quantised(mimo, folder, ["lm_head", *names], keep="mtp")


@pytest.mark.parametrize("names", IGNORED, ids=["name", "regex"])
def test_modules_that_are_not_quantised_draft_as_they_are(names: list[str], mimo: str, tmp_path: Path) -> None:
    rightly = draft(ignoring(mimo, tmp_path / "rightly", AS_VLLM_NAMES_THEM), mode="upstream", **QUANTISED)
    ours = draft(ignoring(mimo, tmp_path / "ours", names), **QUANTISED)
    assert "The checkpoint's MTP layers are not quantised" in ours.log
    assert ours.value["tokens"] == rightly.value["tokens"]
    assert length(ours) >= length(rightly) > 1.3


def test_modules_that_are_quantised_draft_as_quantised(mimo: str, tmp_path: Path) -> None:
    ours = draft(quantised(mimo, tmp_path, ["lm_head"], keep="input_proj"), **QUANTISED)
    assert "are not quantised" not in ours.log
    assert length(ours) > 1.2


def test_quantised_modules_that_lack_scales_are_refused_by_name(mimo: str, tmp_path: Path) -> None:
    model = quantised(mimo, tmp_path, ["lm_head"], keep="input_proj", lacking=r"mtp.*up_proj\.weight_scale")
    with pytest.raises(ChildFailedError) as failed:
        draft(model)
    assert f"MTP layers: {MIMO_MODULE}.mlp.up_proj.weight_scale. They" in str(failed.value)
    assert "quantised by compressed-tensors: layers that the checkpoint has unquantised must" in str(failed.value)


# Step-3.5, whose model has a check of its own.

STEP_IGNORED = ["lm_head", r"re:.*moe.*", r"re:.*share_expert.*", r"re:.*g_proj.*", r"re:.*layers\.[678]\..*"]
step_quantised = functools.partial(
    quantised, TINY, ignore=STEP_IGNORED, keep=r"moe|share_expert|g_proj|layers\.[678]\."
)


@pytest.mark.parametrize("mode", ["on", "upstream"])
def test_a_quantised_step3p5_starts_with_modules_that_are_not(mode: str, tmp_path: Path) -> None:
    outcome = run(scenarios.rates, {**mtp(3), **QUANTISED, "model": step_quantised(tmp_path)}, mode=mode)
    assert length(outcome) > 2


def test_one_that_lacks_a_tensor_is_refused_in_the_mode_upstream_too(tmp_path: Path) -> None:
    model = step_quantised(tmp_path, lacking=r"layers\.7\.hnorm")
    with pytest.raises(ChildFailedError, match=r"model\.layers\.7\.hnorm\.weight are not in the checkpoint"):
        draft(model, mode="upstream")
