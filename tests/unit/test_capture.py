"""Where the residual stream of a model is, by its modules alone. That it is right: `tests/extraction/test_rows.py`."""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.commandr import LayerNorm

from mtp.capture import capture_residual_stream, residual_is_added

HIDDEN, LAYERS, TOKENS = 8, 3, 5


class AddingLayer(nn.Module):
    """Adds its input itself, as Step-3.5's do."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1


class PairLayer(nn.Module):
    """Hands on a residual, as Llama's do: its stream goes up by one."""

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        stream = hidden_states if residual is None else hidden_states + residual
        return torch.ones_like(stream), stream


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        if norm is not None:
            self.norm = norm


def buffer_for(layer_ids: list[int]) -> torch.Tensor:
    return torch.full((TOKENS + 2, len(layer_ids), HIDDEN), -1.0)


def norm(cls: type[nn.Module]) -> nn.Module:
    with set_current_vllm_config(VllmConfig()):
        return cls(HIDDEN)


def test_layers_that_add_are_captured_at_their_entries_and_at_the_exit_of_the_last() -> None:
    model, buffer = Model(AddingLayer), buffer_for([2, 0, 3])
    capture_residual_stream(model, [2, 0, 3], LAYERS, buffer)
    x = torch.zeros(TOKENS, HIDDEN)
    for layer in model.layers:
        x = layer(torch.arange(TOKENS), hidden_states=x)
    assert buffer[:TOKENS, :, 0].tolist() == [[2, 0, 3]] * TOKENS
    assert (buffer[TOKENS:] == -1).all()


@pytest.mark.parametrize("by_name", [True, False])
def test_layers_that_hand_on_a_residual_are_captured_with_it(by_name: bool) -> None:
    model, buffer = Model(PairLayer, norm(RMSNorm)), buffer_for([0, 1, 2, 3])
    capture_residual_stream(model, [0, 1, 2, 3], LAYERS, buffer)
    hidden, residual = torch.zeros(TOKENS, HIDDEN), None
    for layer in model.layers:
        hidden, residual = layer(hidden_states=hidden, residual=residual) if by_name else layer(hidden, residual)
    assert buffer[:TOKENS, :, 0].tolist() == [[0, 1, 2, 3]] * TOKENS


def test_a_residual_counts_if_the_final_norm_adds_it() -> None:
    like = torch.empty(HIDDEN)
    assert residual_is_added(Model(PairLayer, norm(RMSNorm)), like)
    assert not residual_is_added(Model(PairLayer, norm(LayerNorm)), like)
    assert residual_is_added(Model(PairLayer, nn.LayerNorm(HIDDEN)), like), "the model adds before such a norm"


class Doubling(nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return hidden if residual is None else hidden - residual


class Renamed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "num_layers", "message"),
    [
        (Model(AddingLayer), 4, r"Model has 4 decoder layers by its config.*its lists: layers of 3"),
        (nn.Sequential(), 4, "its lists: none"),
        (Model(Renamed), 3, r"Renamed take \['x'\] and no hidden_states"),
        (Model(PairLayer, Doubling()), 3, "neither adds the residual"),
    ],
)
def test_a_model_that_is_not_known_is_refused(model: nn.Module, num_layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capture_residual_stream(model, [1], num_layers, buffer_for([1]))


@pytest.mark.parametrize("shape", [(2, TOKENS, HIDDEN), (TOKENS, 2 * HIDDEN)])
def test_a_stream_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = Model(AddingLayer)
    capture_residual_stream(model, [1], LAYERS, buffer_for([1]))
    with pytest.raises(ValueError, match=r"The stream in AddingLayer has the shape"):
        model.layers[1](torch.arange(TOKENS), torch.zeros(shape))
