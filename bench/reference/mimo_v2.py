"""MiMo-V2 in plain float32 torch: full and sliding layers, and modules that all take the target's normed state."""

import shutil
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bench.reference.dense import (
    Attention,
    DenseModel,
    Layer,
    Routing,
    read_config,
    read_tensors,
    rms_norm,
    with_prefix,
)

# Only a checkout has it.
TRAINED = Path(__file__).resolve().parents[2] / "assets" / "tiny-mimo-v2"
NO_EXPERTS = Routing(1, "softmax", False, 1.0)


class DenseMiMoV2(DenseModel):
    """The weights of a MiMo-V2 checkpoint. Its modules take the target's head and embedding, and no other's state.

    Raises:
        NotImplementedError: a layer has experts, or its rotary embedding is scaled.
    """

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        self.hidden_states_flow = False
        self.eps = config["layernorm_epsilon"]
        tensors = read_tensors(folder)
        self.take_ends(tensors)
        self.target = [
            self._layer(with_prefix(tensors, f"model.layers.{index}."), sliding=bool(sliding))
            for index, sliding in enumerate(config["hybrid_layer_pattern"][: config["num_hidden_layers"]])
        ]
        # The config names no number of modules.
        modules = with_prefix(tensors, "model.mtp.layers.")
        self.modules = [
            self._layer(with_prefix(modules, f"{index}."), sliding=True)
            for index in range(len({name.split(".")[0] for name in modules}))
        ]

    def _layer(self, weights: dict[str, Tensor], *, sliding: bool) -> Layer:
        if "mlp.gate.weight" in weights:
            raise NotImplementedError("A layer has experts; the reference of MiMo-V2 knows dense layers only.")
        attention = _attention(self.config, sliding)
        # The same norm has another name in the modules.
        weights = {name.replace("pre_mlp_", "post_attention_"): tensor for name, tensor in weights.items()}
        for kind in ("weight", "bias"):
            fused = weights.pop(f"self_attn.qkv_proj.{kind}", None)
            if fused is not None:
                parts = split_fused(fused, attention)
                weights |= {f"self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        return Layer(attention, self.eps, weights, NO_EXPERTS)

    def target_state(self, hidden: Tensor) -> Tensor:
        """The modules take the target's hidden states as its head does."""
        return rms_norm(hidden, self.norm, self.eps)

    def module_logits(self, module: int, hidden: Tensor) -> Tensor:
        """The module's hidden states are normed already (`final_layernorm`)."""
        return F.linear(hidden, self.head)


def split_fused(fused: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """The projections of queries, keys and values out of one, whose rows are those of each, in this order.

    (Quantised, the published checkpoints have them in another order, by the ranks that they were made for.)
    """
    query, key, value = fused.split(
        [
            attention.num_heads * attention.head_dim,
            attention.num_kv_heads * attention.head_dim,
            attention.num_kv_heads * attention.value_size,
        ]
    )
    return query, key, value


def _attention(config: dict[str, Any], sliding: bool) -> Attention:
    prefix = "swa_" if sliding else ""
    if (config.get("rope_scaling") or {}).get("rope_type", "default") != "default":
        raise NotImplementedError(f"The rotary embedding is scaled ({config['rope_scaling']}); the reference can't.")
    head_dim = config[f"{prefix}head_dim"]
    return Attention(
        num_heads=config[f"{prefix}num_attention_heads"],
        num_kv_heads=config[f"{prefix}num_key_value_heads"],
        head_dim=head_dim,
        window=config["sliding_window_size"] if sliding else None,
        rotary_dim=int(head_dim * config.get("partial_rotary_factor", 1.0)),
        theta=config[f"{prefix}rope_theta"],
        gated=False,
        value_dim=config.get(f"{prefix}v_head_dim"),
        value_scale=config.get("attention_value_scale") or 1.0,
    )


def copy_trained(folder: Path) -> None:
    """Copies the trained tiny model.

    Raises:
        ValueError: it is not there.
    """
    if not TRAINED.is_dir():
        raise ValueError(f"There is no trained MiMo-V2 at {TRAINED}, as there is in a checkout: give --model instead.")
    shutil.copytree(TRAINED, folder, dirs_exist_ok=True)
