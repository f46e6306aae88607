"""Step-3.5's modules in fewer launches, and when they stay as they are (what they compute: `test_engine.py`)."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.utils import default_unquantized_gemm
from vllm.model_executor.models.step3p5 import Step3p5Attention, Step3p5DecoderLayer, Step3p5MLP
from vllm.model_executor.models.step3p5_mtp import (
    Step3p5AMultiTokenPredictor,
    Step3p5AMultiTokenPredictorLayer,
    Step3p5MTP,
)

from proposers import step3p5
from proposers.step3p5 import fuse_modules


class Another(nn.Module):
    pass


def bare(kind: type[nn.Module], **children: nn.Module) -> nn.Module:
    """A module of vLLM's without its weights, which nothing here looks at."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, child in children.items():
        setattr(module, name, child)
    return module


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
    monkeypatch.setattr(step3p5, "forwards_of_the_host", lambda: "another")


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


def product(kind: type[LinearBase], rows: int, columns: int) -> Any:
    """A layer as on a GPU: there `F.linear` multiplies with its weight."""
    linear = bare(kind)
    linear.quant_method = UnquantizedLinearMethod()
    linear.quant_method._gemm_impl = default_unquantized_gemm
    linear.bias, linear.skip_bias_add, linear.return_bias = None, False, True
    linear.tp_size, linear.tp_rank, linear.reduce_results = 1, 0, True
    linear.gather_output, linear.input_is_parallel = False, True
    linear.weight = nn.Parameter(torch.randn(rows, columns), requires_grad=False)
    return linear


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(step3p5, "has_kernels", lambda x: True)
    torch.manual_seed(0)
    attention = bare(
        Step3p5Attention,
        qkv_proj=product(QKVParallelLinear, (HEADS + 4) * HEAD_DIM, HIDDEN),
        g_proj=product(ColumnParallelLinear, HEADS, HIDDEN),
    )
    attention.use_head_wise_attn_gate = True
    attention.num_heads, attention.q_size, attention.kv_size = HEADS, HEADS * HEAD_DIM, 2 * HEAD_DIM
    return attention


def test_one_product_makes_queries_keys_values_and_gates(attention: Any) -> None:
    x = torch.randn(5, HIDDEN)
    expected = step3p5._project(attention, x)
    assert step3p5._both_weights(attention) is None
    step3p5._store_side_by_side(attention)
    assert step3p5._both_weights(attention).shape == (attention.qkv_proj.weight.shape[0] + HEADS, HIDDEN)
    for ours, wanted in zip(step3p5._project(attention, x), expected, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_weights_that_are_updated_in_place_are_those_of_the_one_product(attention: Any) -> None:
    step3p5._store_side_by_side(attention)
    x = torch.randn(5, HIDDEN)
    attention.g_proj.weight.data.copy_(torch.randn(HEADS, HIDDEN))
    torch.testing.assert_close(step3p5._project(attention, x)[3], x @ attention.g_proj.weight.T)


def test_a_weight_that_is_replaced_is_used(attention: Any) -> None:
    step3p5._store_side_by_side(attention)
    x = torch.randn(5, HIDDEN)
    attention.g_proj.weight = nn.Parameter(torch.randn(HEADS, HIDDEN), requires_grad=False)
    torch.testing.assert_close(step3p5._project(attention, x)[3], x @ attention.g_proj.weight.T)


def quantised(linear: Any) -> None:
    linear.quant_method = object()
    del linear.weight


def with_a_bias(linear: Any) -> None:
    linear.bias = nn.Parameter(torch.randn(linear.weight.shape[0]), requires_grad=False)


def by_another_kernel(linear: Any) -> None:
    linear.quant_method._gemm_impl = lambda *x: default_unquantized_gemm(*x)


def of_another_kind(linear: Any) -> None:
    linear.__class__ = type("Another", (type(linear),), {})


def of_unaligned_rows(linear: Any) -> None:
    linear.weight = nn.Parameter(torch.randn(linear.weight.shape[0] + 1, HIDDEN), requires_grad=False)


OTHERS = [quantised, with_a_bias, by_another_kernel, of_another_kind]


@pytest.mark.parametrize("made", [*OTHERS, of_unaligned_rows])
@pytest.mark.parametrize("name", ["qkv_proj", "g_proj"])
def test_other_projections_stay_apart(made: Callable[[Any], None], name: str, attention: Any) -> None:
    made(getattr(attention, name))
    step3p5._store_side_by_side(attention)
    assert step3p5._both_weights(attention) is None


class Mlp(nn.Module):
    """`Step3p5MLP` of three layers of vLLM's, and what its forward does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = product(ColumnParallelLinear, 12, HIDDEN)
        self.act_fn, self.down_proj = torch.nn.functional.silu, product(RowParallelLinear, HIDDEN, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Step3p5MLP.forward(self, x)


def of_several_ranks(linear: Any) -> None:
    # What reduces over them is the layer's own, which must be asked.
    linear.tp_size, linear.reduce_results = 2, False


@pytest.mark.parametrize("made", [lambda linear: None, *OTHERS[1:], of_several_ranks])
def test_an_mlp_is_added_to_the_residual_stream(made: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step3p5, "has_kernels", lambda x: True)
    torch.manual_seed(0)
    mlp, x, residual = Mlp(), torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    made(mlp.down_proj)
    mlp.down_proj.tp_rank = 0
    expected = mlp(x) + residual
    torch.testing.assert_close(step3p5._add_mlp(mlp, x, residual.clone()), expected)
