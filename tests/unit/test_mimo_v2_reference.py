"""The dense reference of MiMo-V2 against the model that is trained, which was written apart from it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.reference import dense_model
from bench.reference.dense import Attention, Reference
from bench.reference.mimo_v2 import DenseMiMoV2, split_fused
from tools.tiny_mimo_v2 import TinyMiMoV2, TinyMiMoV2Config

# Several windows, of which the last isn't full; two chunks of a fused projection.
CONFIG = TinyMiMoV2Config(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=40,
    head_dim=8,
    num_full_heads=8,
    num_full_kv_heads=2,
    num_sliding_heads=8,
    num_sliding_kv_heads=4,
    sliding_window=6,
    target_layers="FSSF",
    dropout=0.0,
)
TOKENS = torch.randint(64, (21,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model() -> TinyMiMoV2:
    """With weights under which everything counts: the sinks, the norms' gains, attention that isn't near uniform."""
    torch.manual_seed(0)
    model = TinyMiMoV2(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.5 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model


@pytest.fixture(scope="module")
def folder(model: TinyMiMoV2, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo_v2")
    write(folder, dict(model.state_dict()))
    return folder


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def all_logits(folder: Path) -> list[Tensor]:
    """The target's, and each module's for the rows whose tokens are known."""
    dense = dense_model(folder)
    reference = Reference(dense)
    reference.update(TOKENS[:13], 12)  # so that the rest attends to rows computed before
    reference.update(TOKENS, len(TOKENS) - 1)
    modules = [dense.module_logits(i, reference.module_hidden(i)) for i in range(dense.num_modules)]
    return [dense.logits(reference.target_hidden()), *modules]


@torch.no_grad()
def test_the_trained_model_and_the_reference_have_the_same_logits(model: TinyMiMoV2, folder: Path) -> None:
    target, modules = model(torch.tensor([TOKENS]))
    expected = [target[0], *(logits[0, : -(1 + i)] for i, logits in enumerate(modules))]
    actual = all_logits(folder)
    assert len(actual) == 1 + len(CONFIG.module_layers)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_transformers_has_the_targets_logits_too(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(all_logits(folder)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [{"attention_value_scale": None}, {"swa_rope_theta": 77.0}, {"partial_rotary_factor": 1.0}],
    ids=lambda changed: next(iter(changed)),
)
def test_what_the_config_says_matters(changed: dict[str, float | None], folder: Path, tmp_path: Path) -> None:
    write(tmp_path, load_file(folder / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf() | changed))
    for ours, theirs in zip(all_logits(tmp_path), all_logits(folder), strict=True):
        assert (ours - theirs).abs().max() > 1e-2


def test_without_their_sinks_all_layers_that_slide_are_others(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if "sink" not in name})
    for ours, theirs in zip(all_logits(tmp_path), all_logits(folder), strict=True):
        assert (ours - theirs).abs().max() > 1e-2


def test_the_modules_take_the_targets_normed_state(folder: Path) -> None:
    dense = DenseMiMoV2(folder)
    reference = Reference(dense)
    reference.update(TOKENS, len(TOKENS) - 1)
    torch.testing.assert_close(reference.target_state() @ dense.head.T, dense.logits(reference.target_hidden()))
    assert not dense.hidden_states_flow


def test_fused_projections_are_taken_apart(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for prefix in sorted({name.partition(".q_proj")[0] for name in tensors if ".q_proj" in name}):
        parts = [tensors.pop(f"{prefix}.{name}_proj.weight") for name in "qkv"]
        tensors[f"{prefix}.qkv_proj.weight"] = torch.cat(parts)
    write(tmp_path, tensors)
    for ours, theirs in zip(all_logits(tmp_path), all_logits(folder), strict=True):
        assert torch.equal(ours, theirs)


def test_fused_projections_may_have_smaller_heads_of_values() -> None:
    attention = Attention(4, 2, 3, None, 2, 1e4, gated=False, value_dim=1)
    query, key, value = split_fused(torch.arange(20)[:, None], attention)
    assert [part.flatten().tolist() for part in (query, key, value)] == [[*range(12)], [*range(12, 18)], [18, 19]]


def test_experts_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    write(tmp_path, tensors | {"model.layers.1.mlp.gate.weight": torch.zeros(2, CONFIG.hidden_size)})
    with pytest.raises(NotImplementedError, match="has experts"):
        DenseMiMoV2(tmp_path)
