"""The norm between a model's last layer and its head, as the model's own code computes it.

Families differ in what their norms do with the weight that a checkpoint holds: most multiply by it, some by one more,
some norm in groups. So the norm is built by the model's own class in transformers, on no device, and given its weight.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

# What RMS norms add to their weight in families that transformers has no class for, or none to build, by vLLM's models.
_OFFSETS = {"mimo": 0.0, "mimo_v2": 0.0, "rnj1": 1.0, "step3p5": 1.0}

# By their whole names: draft modules and the other parts of a multi-modal model have norms of their own.
_NAMES = ("norm", "final_layernorm", "final_norm", "embedding_norm", "norm_f", "ln_f")
_PARENTS = (
    "",
    "backbone.",
    "language_model.model.",
    "model.",
    "model.language_model.",
    "model.text_model.",
    "transformer.",
    "transformer.encoder.",
)


class FinalNorm:
    """The final norm of a checkpoint.

    Raises:
        ValueError: the checkpoint isn't there, or its norm isn't known.
    """

    def __init__(self, model: str | Path) -> None:
        folder = Path(model)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{model} is no local folder with a checkpoint's config.json. Name one that is.")
        try:
            self._norm = _load(folder)
        except Exception as error:  # of a config that transformers doesn't take, anything may come
            raise ValueError(
                f"The final norm of {model} is not known, so the hidden states after it can't be computed: "
                f"{' '.join(str(error).split())[:300]}. Export to speculators, which wants them before it."
            ) from error

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[T, H]` in float32 inside, and in the dtype of the hidden states outside; gradients go through it."""
        normed: torch.Tensor = self._norm(hidden.float())
        return normed.to(hidden.dtype)


class _RMSNorm(nn.Module):
    def __init__(self, config: dict[str, Any], offset: float) -> None:
        super().__init__()
        self._eps, self._offset = config["rms_norm_eps"], offset
        self.weight = nn.Parameter(torch.empty(config["hidden_size"], device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * (self.weight + self._offset)


def _load(folder: Path) -> nn.Module:
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(folder)
    text = config.get("text_config") or config
    if text["model_type"] in _OFFSETS:
        norm: nn.Module = _RMSNorm(text, _OFFSETS[text["model_type"]])
        names: tuple[str, ...] = ("norm", "final_layernorm")
    else:
        names, norm = _norm_of_transformers(folder)
    norm.load_state_dict(_weights(folder, names, [name for name, _ in norm.named_parameters()]), assign=True)
    return norm.eval().requires_grad_(False)


def _norm_of_transformers(folder: Path) -> tuple[tuple[str], nn.Module]:
    """The norm without its weights, after its name in the decoder."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(decoder=True)
    with torch.device("meta"):
        decoder: Any = AutoModel.from_config(config)
    found = [(name, child) for name, child in decoder.named_children() if name in _NAMES]
    if len(found) != 1:
        raise ValueError(f"{type(decoder).__name__} has not exactly one of the norms {', '.join(_NAMES)}")
    ((name, norm),) = found
    return (name,), norm


def _weights(folder: Path, names: tuple[str, ...], parameters: list[str]) -> dict[str, torch.Tensor]:
    """The norm's parameters in float32, by their names in the module."""
    candidates: dict[str, dict[str, torch.Tensor]] = {f"{parent}{name}": {} for parent in _PARENTS for name in names}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            keys = set(file.keys())
            for stem, found in candidates.items():
                found |= {p: file.get_tensor(f"{stem}.{p}").float() for p in parameters if f"{stem}.{p}" in keys}
    whole = [found for found in candidates.values() if len(found) == len(parameters)]
    if len(whole) != 1:
        raise ValueError(
            f"the checkpoint has {len(whole)} norms of a name that final norms have ({', '.join(names)} there)"
        )
    return whole[0]
