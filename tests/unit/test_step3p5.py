"""Step-3.5's modules in fewer launches, and when they stay as they are.

What they compute is held against vLLM's own in `tests/engine/test_drafting.py`.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.step3p5 import Step3p5Attention, Step3p5DecoderLayer, Step3p5MLP
from vllm.model_executor.models.step3p5_mtp import (
    Step3p5AMultiTokenPredictor,
    Step3p5AMultiTokenPredictorLayer,
    Step3p5MTP,
)

from mtp.fusion.blocks import add_mlp, project
from mtp.fusion.gemms import store_side_by_side
from mtp.fusion.guard import KnownForwards
from proposers.models import step3p5_modules
from proposers.models.step3p5_modules import fuse_modules
from tests.support.host_layers import bare, plain_linear


class Another(nn.Module):
    pass


@pytest.fixture
def model() -> Any:
    norms = lambda *names: {name: bare(GemmaRMSNorm) for name in names}  # noqa: E731
    attention = bare(Step3p5Attention, **norms("q_norm", "k_norm"))
    attention.use_head_wise_attn_gate = False
    block = bare(
        Step3p5DecoderLayer,
        self_attn=attention,
        mlp=bare(Step3p5MLP),
        **norms("input_layernorm", "post_attention_layernorm"),
    )
    block.use_moe = False
    module = bare(Step3p5AMultiTokenPredictorLayer, mtp_block=block, **norms("enorm", "hnorm"))
    return bare(Step3p5MTP, model=bare(Step3p5AMultiTokenPredictor, layers=nn.ModuleDict({"8": module})))


def block_of(model: Any) -> Any:
    return model.model.layers["8"].mtp_block


def test_the_installed_vllms_modules_are_known(model: Any) -> None:
    assert fuse_modules(model)
    assert isinstance(model.forward, functools.partial)
    assert model.forward.args == (model.model,)


def of_a_subclass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.__class__ = type("Another", (Step3p5MTP,), {})


def with_another_predictor(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model = Another()


def with_another_norm(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block_of(model).self_attn.k_norm = Another()


def with_another_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block_of(model).self_attn = Another()


def with_another_mlp(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block_of(model).mlp = Another()


def of_another_release(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    another = KnownForwards(step3p5_modules.KNOWN_FORWARDS.modules, "another")
    monkeypatch.setattr(step3p5_modules, "KNOWN_FORWARDS", another)


def wrapped_by_somebody(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Step3p5DecoderLayer.forward
    monkeypatch.setattr(Step3p5DecoderLayer, "forward", functools.wraps(original)(lambda *x: original(*x)))


@pytest.mark.parametrize(
    "made",
    [
        of_a_subclass,
        with_another_predictor,
        with_another_norm,
        with_another_attention,
        with_another_mlp,
        of_another_release,
        wrapped_by_somebody,
    ],
)
def test_other_modules_stay_as_they_are_and_a_line_says_so(
    made: Callable[..., None],
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    vllm_log: pytest.LogCaptureFixture,
) -> None:
    made(model, monkeypatch)
    with vllm_log.at_level(logging.INFO, logger="vllm.proposers"):
        assert not fuse_modules(model)
    assert "run as they are" in vllm_log.text
    assert "forward" not in vars(model)


def test_batch_invariant_mode_keeps_the_hosts_modules(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert not fuse_modules(model)
    assert "forward" not in vars(model)


HIDDEN, HEADS, HEAD_DIM = 24, 8, 4


@pytest.mark.parametrize("with_gates", [True, False])
def test_queries_keys_values_and_gates_are_the_same_by_one_gemm(
    with_gates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp.fusion.gemms.has_kernels", lambda x: True)
    torch.manual_seed(0)
    qkv_proj = plain_linear(QKVParallelLinear, (HEADS + 4) * HEAD_DIM, HIDDEN)
    g_proj = plain_linear(ColumnParallelLinear, HEADS, HIDDEN) if with_gates else None
    x, sizes = torch.randn(5, HIDDEN), [HEADS * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM]
    apart = project(qkv_proj, g_proj, x, sizes)
    if with_gates:
        assert store_side_by_side(qkv_proj, g_proj)
    for ours, wanted in zip(project(qkv_proj, g_proj, x, sizes), apart, strict=True):
        assert (ours is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(ours, wanted)
    assert (apart[3] is None) != with_gates


class Mlp(nn.Module):
    """`Step3p5MLP` of layers made here, and what its forward does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = plain_linear(ColumnParallelLinear, 12, HIDDEN)
        self.act_fn, self.down_proj = nn.functional.silu, plain_linear(RowParallelLinear, HIDDEN, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Step3p5MLP.forward(self, x)


def alone(linear: Any) -> None:
    pass


def of_several_ranks(linear: Any) -> None:
    # What reduces over them is the layer's own, which must be asked.
    linear.tp_size, linear.reduce_results = 2, False


def with_a_bias(linear: Any) -> None:
    linear.bias = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)


@pytest.mark.parametrize("made", [alone, of_several_ranks, with_a_bias])
def test_an_mlp_is_added_to_the_residual_stream(made: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp.fusion.gemms.has_kernels", lambda x: True)
    torch.manual_seed(0)
    mlp, x, residual = Mlp(), torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    made(mlp.down_proj)
    expected = mlp(x) + residual
    asked = []
    mlp.down_proj.register_forward_hook(lambda *_: asked.append(1))
    torch.testing.assert_close(add_mlp(mlp, x, residual.clone()), expected)
    assert bool(asked) == (made is not alone)
