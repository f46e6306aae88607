"""Fused norms against the host's own."""

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from mtp.norms import fuse_gemma_norms


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
