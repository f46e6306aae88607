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
def test_a_fused_norm_is_the_hosts_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm, x = make_norm(shape[-1], dtype), torch.randn(shape).to(dtype)
    expected = norm(x)
    assert fuse_gemma_norms(nn.ModuleList([norm])) == 1
    assert torch.equal(norm(x), expected)


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
