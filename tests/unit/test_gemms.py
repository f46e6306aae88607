"""Two GEMMs as one, and the layers that must stay as they are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.utils import default_unquantized_gemm

from mtp.fusion.gemms import is_plain, store_side_by_side, weight_of_both
from tests.support.host_layers import plain_linear

INPUT = 24


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr("mtp.fusion.gemms.has_kernels", lambda x: True)
    torch.manual_seed(0)
    return Pair(plain_linear(QKVParallelLinear, 48, INPUT), plain_linear(ColumnParallelLinear, 8, INPUT))


def test_weights_side_by_side_are_one_and_still_those_of_their_layers(pair: Pair) -> None:
    weights = [layer.weight.clone() for layer in pair]
    assert weight_of_both(*pair) is None
    assert store_side_by_side(*pair)
    assert torch.equal(weight_of_both(*pair), torch.cat(weights))
    for layer, weight in zip(pair, weights, strict=True):
        assert torch.equal(layer.weight, weight)
        assert isinstance(layer.weight, nn.Parameter)


def test_a_weight_that_is_updated_in_place_is_updated_in_both(pair: Pair) -> None:
    store_side_by_side(*pair)
    pair.second.weight.data.copy_(torch.ones(8, INPUT))
    assert (weight_of_both(*pair)[48:] == 1).all()


def by_another_weight(pair: Pair) -> None:
    pair.second.weight = nn.Parameter(torch.randn(8, INPUT), requires_grad=False)


def into_one_buffer_elsewhere(pair: Pair) -> None:
    # As trainers do that keep all weights in one buffer; the weight of another layer lies in between.
    flat = torch.randn(100, INPUT)
    pair.first.weight.data, pair.second.weight.data = flat[:48], flat[60:68]


def by_a_layer_with_an_adapter(pair: Pair) -> None:
    pair.first.__class__ = type("WithAdapter", (QKVParallelLinear,), {})


@pytest.mark.parametrize("replaced", [by_another_weight, into_one_buffer_elsewhere, by_a_layer_with_an_adapter])
def test_what_is_replaced_later_is_not_taken_for_one(replaced: Callable[[Pair], None], pair: Pair) -> None:
    assert store_side_by_side(*pair)
    replaced(pair)
    assert weight_of_both(*pair) is None


def quantised(linear: Any) -> None:
    linear.quant_method = object()
    del linear.weight


def with_a_bias(linear: Any) -> None:
    linear.bias = nn.Parameter(torch.randn(len(linear.weight)), requires_grad=False)


def by_another_kernel(linear: Any) -> None:
    linear.quant_method._gemm_impl = lambda *x: default_unquantized_gemm(*x)


def of_another_kind(linear: Any) -> None:
    linear.__class__ = type("Another", (type(linear),), {})


def gathered_over_ranks(linear: Any) -> None:
    linear.gather_output = True


@pytest.mark.parametrize("made", [quantised, with_a_bias, by_another_kernel, of_another_kind, gathered_over_ranks])
@pytest.mark.parametrize("which", [0, 1])
def test_layers_that_do_more_stay_apart(made: Callable[[Any], None], which: int, pair: Pair) -> None:
    assert is_plain(pair[which])
    made(pair[which])
    assert not is_plain(pair[which])
    assert not store_side_by_side(*pair)
    assert weight_of_both(*pair) is None


def of_unaligned_rows(pair: Pair) -> None:
    pair.second.weight = nn.Parameter(torch.randn(9, INPUT), requires_grad=False)


def of_two_dtypes(pair: Pair) -> None:
    pair.second.weight = nn.Parameter(pair.second.weight.bfloat16(), requires_grad=False)


@pytest.mark.parametrize("made", [of_unaligned_rows, of_two_dtypes])
def test_weights_that_do_not_fit_together_stay_apart(made: Callable[[Pair], None], pair: Pair) -> None:
    made(pair)
    assert not store_side_by_side(*pair)
    assert weight_of_both(*pair) is None


def test_on_a_cpu_no_layer_is_plain() -> None:
    assert not is_plain(plain_linear(ColumnParallelLinear, 8, INPUT))
