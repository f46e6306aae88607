"""The references' targets are transformers' own models, where it has them."""

from pathlib import Path

import pytest
import torch
import transformers

from bench.reference import TINY_CHECKPOINTS, deepseek_v3_checkpoint, dense_model, ernie4_5_moe_checkpoint
from bench.reference.cheap import make_cheap, rounded
from bench.reference.dense import Reference

# The trained MiMo-V2 knows text and no random tokens; its reference has tests of its own.
CHECKPOINTS = {name: tiny.write for name, tiny in TINY_CHECKPOINTS.items() if name != "mimo-v2"}
CHECKPOINTS["deepseek-v3"] = deepseek_v3_checkpoint.write_checkpoint  # whose target has experts, too
IN_TRANSFORMERS = {name: write for name, write in CHECKPOINTS.items() if name != "mimo"}
IN_TRANSFORMERS["ernie4.5-moe, with bias"] = ernie4_5_moe_checkpoint.write_with_bias
TOKENS = torch.randint(1, 127, (150,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_a_references_target_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    IN_TRANSFORMERS[name](tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs, report = load(tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"]
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    reference = Reference(dense_model(tmp_path))
    reference.update(TOKENS, len(TOKENS) - 1)
    logits = reference.model.logits(reference.target_hidden())
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert logits.std() > 1


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_tiny_checkpoints_drafts_are_often_right_and_not_always(name: str, tmp_path: Path) -> None:
    CHECKPOINTS[name](tmp_path)
    model = dense_model(tmp_path)
    reference = Reference(model)
    reference.update(TOKENS, len(TOKENS) - 1)
    best = model.logits(reference.target_hidden()).argmax(-1)
    for module in range(model.num_modules):
        drafts = model.module_logits(module, reference.module_hidden(module)).argmax(-1)
        right = best[1 + module :][: len(drafts)] == drafts
        assert 0.2 < right.float().mean() < 0.9


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_references_rows_do_not_depend_on_how_they_were_computed(name: str, tmp_path: Path) -> None:
    CHECKPOINTS[name](tmp_path)
    model = dense_model(tmp_path)
    followed, fresh = Reference(model), Reference(model)
    followed.update(TOKENS[:60], 40)
    followed.update([*TOKENS[:50], 7, 8, *TOKENS[52:90]], 80)
    followed.update(TOKENS, 120)
    fresh.update(TOKENS, 120)
    torch.testing.assert_close(followed.target_hidden(), fresh.target_hidden(), atol=1e-4, rtol=1e-4)
    for module in range(model.num_modules):
        torch.testing.assert_close(followed.keys(module), fresh.keys(module), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(followed.module_hidden(module), fresh.module_hidden(module), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["exaone-moe", "qwen3.5-two-modules", "glm4-moe"])
def test_a_cheap_references_modules_project_their_inputs_by_rounded_weights(name: str, tmp_path: Path) -> None:
    """Also where all of them share one projection, as EXAONE-MoE's and Qwen3.5's do."""
    TINY_CHECKPOINTS[name].write(tmp_path)
    exact, cheap = dense_model(tmp_path), make_cheap(dense_model(tmp_path), range(8))
    shared = {key: weight for key, weight in exact.mtp.items() if weight.dim() == 2} or exact.modules[0].weights
    projection = next(key for key in shared if key.endswith(("fc.weight", "eh_proj.weight")))
    found = (cheap.mtp or cheap.modules[0].weights)[projection]
    assert torch.equal(found, rounded(shared[projection]))
    assert not torch.equal(found, shared[projection])
