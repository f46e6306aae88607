"""Marks of what a load leaves unset, in parameters of every kind."""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from proposers.checkpoint import is_of_quantisation, is_of_the_modules
from proposers.unset_weights import MarkedWeights

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32]


def parameter(*shape: int, dtype: torch.dtype = torch.float32, **attributes: Any) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def layer(sizes: list[int] | None = None, **parameters: nn.Parameter) -> nn.Module:
    module = nn.Module()
    if sizes is not None:
        module.output_partition_sizes = sizes
    for name, value in parameters.items():
        module.register_parameter(name, value)
    return module


def model(**layers: nn.Module) -> nn.Module:
    made = nn.Module()
    made.mtp_block = nn.ModuleDict(layers)
    return made


def unset(whole: nn.Module, **loaded: torch.Tensor) -> list[str]:
    """Marks the model, fills the views that are named, and takes what is unset."""
    marked = MarkedWeights(whole, own_heads=False)
    for view in loaded.values():
        view.fill_(0)
    return marked.take_unset()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_of_a_fused_weight_is_named(dtype: torch.dtype) -> None:
    weight = parameter(8, 3, dtype=dtype, output_dim=0)
    whole = model(qkv_proj=layer([4, 2, 2], weight=weight))
    assert unset(whole, q=weight.data[:4], v=weight.data[6:]) == ["mtp_block.k_proj.weight"]


def test_parts_of_packed_rows_and_of_blocks_are_where_theirs_are() -> None:
    packed, scales = parameter(3, 2, dtype=torch.int32, output_dim=1), parameter(4, 1, output_dim=0)
    whole = model(gate_up_proj=layer([8, 8], qweight=packed, weight_scale_inv=scales))
    names = unset(whole, gate=packed.data[:, :1], up=scales.data[2:])
    assert names == ["mtp_block.up_proj.qweight", "mtp_block.gate_proj.weight_scale_inv"]


def test_one_scale_for_all_of_a_fused_layer_is_enough_and_two_of_three_are_not() -> None:
    scales = parameter(3)
    scales.data.fill_(-5)
    whole = model(qkv_proj=layer([4, 2, 2], weight_scale=scales))
    assert unset(whole, first=scales.data[:1]) == []
    assert scales.tolist() == [0, -5, -5]
    assert unset(whole, first=scales.data[:2]) == ["mtp_block.v_proj.weight_scale"]


def test_experts_are_named_and_padding_within_them_stays() -> None:
    w13, w2 = parameter(3, 8, 5), parameter(3, 5, 4)
    whole = model(experts=layer(w13_weight=w13, w2_weight=w2))
    gates, up, downs = w13.data[:, :3], w13.data[:2, 4:], w2.data[1:]
    names = unset(whole, gates=gates, up=up, downs=downs)
    assert names == ["mtp_block.experts.2.up_proj.weight", "mtp_block.experts.0.down_proj.weight"]
    w13.data.fill_(1)
    assert unset(whole, gates=gates, up=w13.data[:, 4:], downs=w2.data) == []
    assert w13[:, 3].eq(1).all()


def test_padding_of_what_is_too_large_to_copy_is_zero() -> None:
    weight = parameter(100, 50)
    assert unset(model(o_proj=layer(weight=weight)), rows=weight.data[:, :40]) == []
    assert weight.eq(0).all()


def test_what_a_checkpoint_need_not_have_keeps_its_value() -> None:
    scale, meta = parameter(1), nn.Parameter(torch.empty(2, device="meta"))
    scale.data.fill_(1)
    attention = layer(k_scale=scale)
    attention.quant_method = BaseKVCacheMethod.__new__(BaseKVCacheMethod)
    upper = parameter(1)
    whole = model(attn=attention, late=layer(weight=meta), o_proj=layer(input_scale_ub=upper, empty=parameter(0)))
    assert unset(whole) == []
    assert (scale.item(), upper.item()) == (1, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.47.self_attn.q_proj.weight", False),
        ("model.layers.48.self_attn.q_proj.weight", True),
        ("layers.48.eh_proj.weight", True),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("mtp.fc.weight", True),
        ("model.mtp.layers.0.eh_proj.weight", True),
        ("model.smtp.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_tensors_of_the_modules_are_known_by_their_names(name: str, expected: bool) -> None:
    assert is_of_the_modules(name, 48) == expected


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("a.weight", "BF16", False),
        ("a.weight", "F8_E4M3", True),
        ("a.weight_scale_inv", "F32", True),
        ("a.qweight", "I32", True),
        ("scaled.bias", "F32", False),
    ],
)
def test_tensors_of_a_quantisation_are_known_by_name_or_type(name: str, dtype: str, expected: bool) -> None:
    assert is_of_quantisation(name, dtype) == expected
