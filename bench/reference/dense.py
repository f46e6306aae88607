"""Decoder models and their MTP modules in plain float32 torch, written from the architectures' definitions.

There are no pages, slots or batches here: one sequence at a time, its keys and values as long as it is. A row is
computed once and kept until one of the tokens it depends on changes, so that following a request costs little;
`Reference.forget` has everything computed anew, and the result must not depend on it.

Row p of module i takes the hidden state of module i - 1 at row p (for i = 0, and for every module of a model whose
hidden states don't flow, the target's) and the embedding of token p + 1 + i, attends to the rows up to p of its own
layer, and predicts token p + 2 + i.

`DenseModel` is Step-3.5, and the files beside this one have other architectures. What they share is here.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """The shape of one layer's attention.

    Attributes:
        window: a row attends to itself and the `window - 1` rows before it; None: to all rows before it.
        rotary_dim: that many leading features of a head are rotated; 0: none.
        gated: heads are scaled by gates of the row, one a head or one a feature.
        interleaved: a feature is rotated with its neighbour, and not with the one half of the features further.
        value_dim: the size of a value head, where it is not `head_dim`.
        value_scale: values are multiplied by it, in the cache, too.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rotary_dim: int
    theta: float
    gated: bool
    interleaved: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0

    @property
    def value_size(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer chooses each row's experts."""

    top_k: int
    activation: str
    renormalize: bool
    scale: float


def attention_of(config: dict[str, Any], layer: int) -> Attention:
    """Reads one layer's attention out of a `config.json` of Step-3.5.

    Raises:
        NotImplementedError: the layer's rotary embedding is scaled, which this reference doesn't do.
    """
    kind = config["layer_types"][layer]
    scaling = config.get("rope_scaling")
    if scaling and (not config.get("yarn_only_types") or kind in config["yarn_only_types"]):
        raise NotImplementedError(f"Layer {layer} scales its rotary embedding ({scaling}); the reference can't.")
    other = config.get("attention_other_setting") or {}
    shape = config | other if kind == other.get("attention_type") else config
    theta = config.get("rope_theta", 10_000.0)
    factors, rope_layers = config.get("partial_rotary_factors"), config.get("use_rope_layers")
    head_dim = shape["head_dim"]
    rotated = not rope_layers or rope_layers[layer]
    return Attention(
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_attention_groups"],
        head_dim=head_dim,
        window=config["sliding_window"] if kind == "sliding_attention" else None,
        rotary_dim=int(head_dim * (factors[layer] if factors else 1.0)) if rotated else 0,
        theta=theta[layer] if isinstance(theta, list) else theta,
        gated=bool(config.get("use_head_wise_attn_gate")),
    )


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Scales the last dimension to a root mean square of one, then by `gain`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def rotate(x: Tensor, positions: Tensor, rotary_dim: int, theta: float, interleaved: bool = False) -> Tensor:
    """Rotates `x` `[rows, heads, head_dim]` by its rows' positions; feature j pairs with j + rotary_dim / 2.

    With `interleaved` 2j pairs with 2j + 1.
    """
    if rotary_dim == 0:
        return x
    half = rotary_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        a, b = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Rows:
    """What one layer has computed for the first rows of one sequence.

    Attributes:
        keys, values: `[rows, num_kv_heads, head_dim]`, and of values `value_size`.
        output: `[rows, hidden_size]`, the residual stream after the layer.
        gaps: `[rows]`, how much better the worst expert taken was than the best one left; infinite without experts.
    """

    def __init__(self, attention: Attention, hidden_size: int) -> None:
        self.keys = torch.empty(0, attention.num_kv_heads, attention.head_dim)
        self.values = torch.empty(0, attention.num_kv_heads, attention.value_size)
        self.output = torch.empty(0, hidden_size)
        self.gaps = torch.empty(0)
        self.count = 0

    def truncate(self, count: int) -> None:
        """Keeps the first `count` rows."""
        self.count = max(0, min(self.count, count))

    def copy(self) -> "Rows":
        """Shares what is computed; what is added to one is not added to the other."""
        other = object.__new__(Rows)
        other.keys, other.values, other.output, other.gaps = (
            kept[: self.count] for kept in (self.keys, self.values, self.output, self.gaps)
        )
        other.count = self.count
        return other

    def extend(self, keys: Tensor, values: Tensor) -> None:
        self.keys = torch.cat([self.keys[: self.count], keys])
        self.values = torch.cat([self.values[: self.count], values])

    def finish(self, output: Tensor, gaps: Tensor) -> None:
        self.output = torch.cat([self.output[: self.count], output])
        self.gaps = torch.cat([self.gaps[: self.count], gaps])
        self.count = len(self.output)


class Layer:
    """One decoder layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.

    Its weights say what else it has: biases, norms of the query's and the key's heads, sinks, experts, a norm at its
    end.
    """

    def __init__(self, attention: Attention, eps: float, weights: dict[str, Tensor], routing: Routing) -> None:
        self.attention, self.eps, self.weights, self.routing = attention, eps, weights, routing
        self.is_moe = "moe.gate.weight" in weights

    def run(self, x: Tensor, rows: Rows) -> None:
        """Computes the rows after those that `rows` holds from their inputs `x` `[new, hidden_size]`."""
        if len(x) == 0:
            return
        x = x + self._attend(self._norm(x, "input_layernorm"), rows)
        y = self._norm(x, "post_attention_layernorm")
        gaps = torch.full((len(x),), math.inf)
        if self.is_moe:
            routed, gaps = self._experts(y)
            y = routed + self._mlp(y, "share_expert.")
        else:
            y = self._mlp(y, "mlp.")
        rows.finish(self._norm(x + y, "final_layernorm"), gaps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """The rows normed by that gain; as they are, where the architecture has no such norm."""
        gain = self.weights.get(f"{name}.weight")
        return x if gain is None else rms_norm(x, gain, self.eps)

    def _attend(self, x: Tensor, rows: Rows) -> Tensor:
        shape, new, first = self.attention, len(x), rows.count
        positions = torch.arange(first, first + new)
        query, key, value = (
            self._linear(x, f"self_attn.{name}_proj").view(new, heads, -1)
            for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads))
        )
        query, key = (
            rotate(
                self._norm(head, f"self_attn.{name}_norm"), positions, shape.rotary_dim, shape.theta, shape.interleaved
            )
            for name, head in (("q", query), ("k", key))
        )
        rows.extend(key, value * shape.value_scale)
        distance = positions[:, None] - torch.arange(first + new)
        visible = distance >= 0
        if shape.window is not None:
            visible &= distance < shape.window
        # Query heads h * repeat .. share the key and value head h.
        query = query.view(new, shape.num_kv_heads, -1, shape.head_dim)
        scores = torch.einsum("qhrd,khd->hrqk", query, rows.keys) * shape.head_dim**-0.5
        weights = self._softmax(scores.masked_fill(~visible, -math.inf))
        y = torch.einsum("hrqk,khd->qhrd", weights, rows.values).reshape(new, shape.num_heads, shape.value_size)
        if shape.gated:
            y = y * self._linear(x, "self_attn.g_proj").sigmoid().view(new, shape.num_heads, -1)
        return self._linear(y.reshape(new, -1), "self_attn.o_proj")

    def _softmax(self, scores: Tensor) -> Tensor:
        """Over the last of `[kv_heads, repeat, rows, keys]`; a sink is one more logit, which has no value."""
        sinks = self.weights.get("self_attn.attention_sink_bias")
        if sinks is None:
            return scores.softmax(-1)
        logits = sinks.view(*scores.shape[:2], 1, 1)
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), logits)
        return (scores - total).exp()

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = self._linear(x, f"{prefix}gate_proj"), self._linear(x, f"{prefix}up_proj")
        return self._linear(F.silu(gate) * up, f"{prefix}down_proj")

    def _experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts' weighted sum and `Rows.gaps`; the bias moves the choice and not the weights."""
        routing = self.routing
        logits = self._linear(x, "moe.gate")
        scores = logits.sigmoid() if routing.activation == "sigmoid" else logits.softmax(-1)
        ranking = scores + self.weights.get("moe.router_bias", torch.zeros(()))
        ranked = F.pad(ranking.sort(-1, descending=True).values, (0, 1), value=-math.inf)
        gaps = ranked[:, routing.top_k - 1] - ranked[:, routing.top_k]
        chosen = ranking.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if routing.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        gate, up, down = (self.weights[f"moe.{name}_proj.weight"] for name in ("gate", "up", "down"))
        for expert in chosen.unique().tolist():
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            taken = x[row]
            hidden = F.silu(F.linear(taken, gate[expert])) * F.linear(taken, up[expert])
            y.index_add_(0, row, F.linear(hidden, down[expert]) * weights[row, slot, None])
        return y * routing.scale, gaps


class DenseModel:
    """The weights of a Step-3.5 checkpoint: the target's layers, the modules, and their heads.

    Attributes:
        hidden_states_flow: module i takes the hidden states of module i - 1; else every module takes the target's.
        embeds_row_0: a module's first row has an embedding. vLLM's models of some architectures leave it out, whatever
            the checkpoint's own code says of it, and it is vLLM's model that a drafter runs.
        mtp: weights by name, of architectures whose modules share some, which have no place in `modules`.
    """

    embeds_row_0 = True

    def __init__(self, folder: Path, *, hidden_states_flow: bool = True) -> None:
        self.config = config = read_config(folder)
        self.hidden_states_flow = hidden_states_flow
        self.eps: float = config["rms_norm_eps"]
        # The norms' gains are one more than the checkpoint says.
        tensors = {name: t + 1.0 if "norm." in name else t for name, t in read_tensors(folder).items()}
        self.take_ends(tensors)
        num_layers = config["num_hidden_layers"]
        layers = [
            _step_layer(config, index, with_prefix(tensors, f"model.layers.{index}."))
            for index in range(num_layers + config["num_nextn_predict_layers"])
        ]
        self.target, self.modules = layers[:num_layers], layers[num_layers:]

    def take_ends(self, tensors: dict[str, Tensor]) -> None:
        """The embeddings, the final norm and the head, out of a checkpoint's tensors."""
        self.embeddings, self.norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
        self.head = self.embeddings if self.config.get("tie_word_embeddings") else tensors["lm_head.weight"]
        self.mtp: dict[str, Tensor] = {}

    @property
    def num_modules(self) -> int:
        return len(self.modules)

    def embed(self, tokens: Tensor, first: int) -> Tensor:
        """The embeddings `[rows, hidden_size]` that a module's rows from `first` on take."""
        embedding = self.embeddings[tokens]
        if first == 0 and not self.embeds_row_0:
            embedding[:1] = 0.0
        return embedding

    def target_state(self, hidden: Tensor) -> Tensor:
        """What the modules take of the target, of its hidden states `[rows, hidden_size]` before the final norm."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits `[rows, vocab]` from its hidden states before the final norm."""
        return F.linear(rms_norm(hidden, self.norm, self.eps), self.head)

    def module_logits(self, module: int, hidden: Tensor) -> Tensor:
        """Module `module`'s logits `[rows, vocab]` from its own hidden states."""
        weights = self.modules[module].weights
        normed = rms_norm(hidden, weights["shared_head.norm.weight"], self.eps)
        return F.linear(normed, weights["shared_head.output.weight"])

    def module_input(self, module: int, tokens: Tensor, hidden: Tensor, first: int) -> Tensor:
        """`eh_proj([enorm(embedding), hnorm(hidden)])`, row by row, the first of which is row `first`."""
        weights = self.modules[module].weights
        embedding = rms_norm(self.embed(tokens, first), weights["enorm.weight"], self.eps)
        hidden = rms_norm(hidden, weights["hnorm.weight"], self.eps)
        return F.linear(torch.cat([embedding, hidden], dim=-1), weights["eh_proj.weight"])


def _step_layer(config: dict[str, Any], layer: int, weights: dict[str, Tensor]) -> Layer:
    limits = [config.get(key) for key in ("swiglu_limits", "swiglu_limits_shared")]
    if any(limit and limit[layer] for limit in limits):
        raise NotImplementedError(f"Layer {layer} clamps its activation; the reference doesn't.")
    routing = Routing(
        config.get("moe_top_k", 1),
        config.get("moe_router_activation", "sigmoid"),
        bool(config.get("norm_expert_weight", True)),
        float(config.get("moe_router_scaling_factor", 1.0)),
    )
    return Layer(attention_of(config, layer), config["rms_norm_eps"], weights, routing)


class Reference:
    """One request as a from-scratch run would hold it."""

    def __init__(self, model: DenseModel) -> None:
        self.model = model
        self._held = torch.empty(0, model.embeddings.shape[1])
        self.forget()

    def forget(self) -> None:
        """Drops what was computed; the next `update` starts at the first token."""
        self._tokens: list[int] = []
        hidden_size = self.model.embeddings.shape[1]
        self._target = [Rows(layer.attention, hidden_size) for layer in self.model.target]
        self._modules = [Rows(layer.attention, hidden_size) for layer in self.model.modules]

    def hold(self, first: int, hidden: Tensor) -> None:
        """The modules take these hidden states of the target `[rows, hidden_size]` from row `first` on, not its own."""
        missing = torch.full((max(0, first - len(self._held)), hidden.shape[1]), math.nan)
        self._held = torch.cat([self._held[:first], missing, hidden])

    @torch.no_grad()
    def update(self, tokens: Sequence[int], last: int) -> None:
        """Computes rows 0 to `last` of the target and of every module.

        Args:
            tokens: the known tokens of the sequence, and the drafts that stand for those after them.
            last: the last row. Module i stops earlier where its token p + 1 + i isn't in `tokens`.
        """
        tokens = list(tokens)
        same = _common_prefix(self._tokens, tokens)
        self._tokens = tokens
        ids = torch.tensor(tokens)
        x = self.model.embeddings[ids[: last + 1]]
        for layer, rows in zip(self.model.target, self._target, strict=True):
            rows.truncate(min(same, last + 1))
            start = rows.count
            layer.run(x[start:], rows)
            x = rows.output[: last + 1]
        held = self._held[: last + 1]
        x = self.model.target_state(x)
        x = target = torch.cat([torch.where(held.isnan(), x[: len(held)], held), x[len(held) :]])
        for index, (layer, rows) in enumerate(zip(self.model.modules, self._modules, strict=True)):
            shift = 1 + index
            end = max(0, min(last + 1, len(tokens) - shift))
            rows.truncate(min(same - shift, end))
            start = rows.count
            layer.run(self.model.module_input(index, ids[start + shift : end + shift], x[start:end], start), rows)
            x = rows.output[:end] if self.model.hidden_states_flow else target

    def target_hidden(self) -> Tensor:
        """`[last + 1, hidden_size]`, before the final norm."""
        rows = self._target[-1]
        return rows.output[: rows.count]

    def target_state(self) -> Tensor:
        """`[last + 1, hidden_size]`, what the modules take of it."""
        return self.model.target_state(self.target_hidden())

    def residual_stream(self) -> Tensor:
        """`[last + 1, num_layers + 1, hidden_size]`: what enters each of the target's layers, and leaves the last."""
        count = self._target[-1].count
        embedded = self.model.embeddings[torch.tensor(self._tokens[:count])]
        return torch.stack([embedded, *(rows.output[:count] for rows in self._target)], dim=1)

    def keys(self, module: int) -> Tensor:
        """`[rows, num_kv_heads, head_dim]`, as the module's attention uses them: normed and rotated."""
        rows = self._modules[module]
        return rows.keys[: rows.count]

    def values(self, module: int) -> Tensor:
        """`[rows, num_kv_heads, value_size]`, scaled."""
        rows = self._modules[module]
        return rows.values[: rows.count]

    def module_hidden(self, module: int) -> Tensor:
        """`[rows, hidden_size]`, which the module's head and the next module take."""
        rows = self._modules[module]
        return rows.output[: rows.count]

    @torch.no_grad()
    def draft_logits(self, module: int, row: int) -> Tensor:
        """`[vocab]`, by the module's head at a row."""
        return self.model.module_logits(module, self.module_hidden(module)[row])

    @torch.no_grad()
    def slide(self, last: int, drafts: Sequence[int]) -> Tensor:
        """The logits `[vocab]` that choose the draft after `drafts`, which are at least one per module.

        The chain slides on over rows that the target hasn't run: at row `last + a` module 0's own hidden state of the
        row before stands for the target's, and module i takes the token that draft a - 1 + i stands for.
        """
        ends = [rows.copy() for rows in self._modules]
        for ahead in range(1, len(drafts) - len(ends) + 2):
            target = hidden = ends[0].output[last + ahead - 1 : last + ahead]
            for module, (layer, rows) in enumerate(zip(self.model.modules, ends, strict=True)):
                token = torch.tensor([drafts[ahead - 1 + module]])
                layer.run(self.model.module_input(module, token, hidden, last + ahead), rows)
                hidden = rows.output[-1:] if self.model.hidden_states_flow else target
        return self.model.module_logits(len(ends) - 1, ends[-1].output[-1:])[0]

    def closest_routing(self) -> tuple[float, float]:
        """The smallest `Rows.gaps` of the target and of the modules: where tiny, rounding may choose the expert."""
        return _smallest_gap(self._target), _smallest_gap(self._modules)


def _smallest_gap(layers: Sequence[Rows]) -> float:
    gaps = torch.cat([rows.gaps[: rows.count] for rows in layers])
    return gaps.min().item() if len(gaps) else math.inf


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, in float32."""
    files = map(load_file, sorted(folder.glob("*.safetensors")))
    return {name: tensor.float() for tensors in files for name, tensor in tensors.items()}


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def stack_experts(weights: dict[str, Tensor], bias: str = "mlp.gate.e_score_correction_bias") -> dict[str, Tensor]:
    """A layer's weights under the names that `Layer` knows, where the checkpoint has every expert's by itself.

    Args:
        bias: what moves the choice of experts is called that.
    """
    if "mlp.gate.weight" not in weights:
        return weights
    renamed = weights | {"moe.gate.weight": weights["mlp.gate.weight"], "moe.router_bias": weights[bias].flatten()}
    for name in ("gate_proj", "up_proj", "down_proj"):
        experts = [weights[f"mlp.experts.{expert}.{name}.weight"] for expert in range(len(weights["mlp.gate.weight"]))]
        renamed[f"moe.{name}.weight"] = torch.stack(experts)
        renamed[f"share_expert.{name}.weight"] = weights[f"mlp.shared_experts.{name}.weight"]
    return renamed


def refuse_expert_groups(config: dict[str, Any]) -> None:
    """Raises `NotImplementedError` where experts are chosen in groups, which `Layer` doesn't do."""
    if config.get("n_group", 1) != 1:
        raise NotImplementedError(f"The config has n_group={config['n_group']}; the reference knows one group.")


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
