"""Fused layers against the host's own."""

import pytest
import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from mtp.fusion.layers import fuse_gemma_norms, leave_uncompiled, use_kernels_of_the_host


def make_norm(size: int, dtype: torch.dtype) -> GemmaRMSNorm:
    with set_current_vllm_config(VllmConfig()):
        norm = GemmaRMSNorm(size, 1e-5)
    norm.weight.data.normal_(std=0.3)
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 192), (3, 8, 32), (0, 64)])
def test_a_fused_norm_is_the_hosts_to_the_bit_or_a_rounding_in_float32(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    norm, x = make_norm(shape[-1], dtype), torch.randn(shape).to(dtype)
    expected = norm(x)
    assert fuse_gemma_norms(nn.ModuleList([norm])) == 1
    rounding = 2 * torch.finfo(dtype).eps if dtype == torch.float32 else 0
    torch.testing.assert_close(norm(x), expected, rtol=rounding, atol=0)


def test_a_norm_of_views_into_a_wider_tensor_is_that_of_their_rows() -> None:
    norm, wide = make_norm(32, torch.float32), torch.randn(5, 400)
    view = wide[:, 7 : 7 + 192].view(5, 6, 32)
    expected = norm(view.contiguous())
    fuse_gemma_norms(norm)
    torch.testing.assert_close(norm(view), expected, rtol=1e-6, atol=0)


def test_a_fused_norm_sees_weights_that_are_updated_in_place() -> None:
    norm, x = make_norm(64, torch.float32), torch.randn(2, 64)
    fuse_gemma_norms(norm)
    before = norm(x)
    norm.weight.data.add_(1.0)
    torch.testing.assert_close(norm(x), before + before / (norm.weight) * 1.0)


def test_a_norm_with_a_residual_stays_the_hosts() -> None:
    norm, x, residual = make_norm(64, torch.float32), torch.randn(2, 64), torch.randn(2, 64)
    expected = norm(x.clone(), residual.clone())
    fuse_gemma_norms(norm)
    for ours, theirs in zip(norm(x.clone(), residual.clone()), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_batch_invariant_mode_keeps_the_hosts_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert fuse_gemma_norms(make_norm(64, torch.float32)) == 0


class Attention(nn.Module):
    """A part of a draft: a rotary embedding that it shares with the target, and an activation."""

    def __init__(self, rotary_dim: float) -> None:
        super().__init__()
        parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotary_dim}
        self.rotary_emb = get_rope(64, 500, rope_parameters=parameters)
        self.act_fn = SiluAndMul()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [1.0, 0.5])
def test_the_hosts_kernels_are_its_native_layers_and_the_target_keeps_those(
    rotary_dim: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))
    with set_current_vllm_config(config):
        target, draft = Attention(rotary_dim).to(dtype), Attention(rotary_dim).to(dtype)
    assert draft.rotary_emb is target.rotary_emb
    native = target.rotary_emb._forward_method
    assert use_kernels_of_the_host(draft, config) == 2
    assert draft.rotary_emb is not target.rotary_emb
    assert target.rotary_emb._forward_method == native == target.rotary_emb.forward_native
    assert draft.rotary_emb._forward_method != draft.rotary_emb.forward_native
    positions = torch.randint(0, 500, (9,))
    query, key, x = torch.randn(9, 4 * 64).to(dtype), torch.randn(9, 64).to(dtype), torch.randn(9, 64).to(dtype)
    rounding = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(
        draft.rotary_emb(positions, query.clone(), key.clone()), native(positions, query, key), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)
    torch.testing.assert_close(draft.act_fn(x), SiluAndMul.forward_native(x), rtol=rounding, atol=rounding)


def test_batch_invariant_mode_keeps_the_hosts_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))
    with set_current_vllm_config(config):
        draft = Attention(1.0)
    assert use_kernels_of_the_host(draft, config) == 0


def test_an_eager_engine_has_its_kernels_already() -> None:
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    with set_current_vllm_config(config):
        draft = Attention(1.0)
    assert use_kernels_of_the_host(draft, config) == 0


def test_a_reload_layer_by_layer_leaves_every_layer_its_table() -> None:
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))
    with set_current_vllm_config(config):
        target, draft = Attention(1.0), nn.ModuleList([Attention(1.0), Attention(1.0), Attention(0.5)])
    table = target.rotary_emb.cos_sin_cache
    use_kernels_of_the_host(draft, config)
    first, second, other = (attention.rotary_emb for attention in draft)
    assert first is second
    initialize_layerwise_reload(draft)
    assert target.rotary_emb.cos_sin_cache is table
    finalize_layerwise_reload(draft, config.model_config)
    assert first.cos_sin_cache is target.rotary_emb.cos_sin_cache is table
    assert other.cos_sin_cache is not table


def test_a_draft_that_is_left_uncompiled_has_no_part_that_the_host_compiles() -> None:
    class Part(nn.Module, TorchCompileWithNoGuardsWrapper):
        def __init__(self, do_not_compile: bool) -> None:
            nn.Module.__init__(self)
            self.do_not_compile = do_not_compile

    model = nn.Sequential(nn.Linear(2, 2), Part(False), Part(True))
    assert leave_uncompiled(model) == 1
    assert model[1].do_not_compile
    assert leave_uncompiled(model) == 0
