"""Which weights of a draft model a checkpoint has left as they were.

vLLM's loaders say which parameters they wrote to, and for a fused one that is said when its first part came; for a
quantised model nobody looks at all. So every parameter is marked before the load, and where the mark is still there
after it, nothing was loaded. A mark is a bit pattern: a NaN, or of integers one that no weight is full of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

# What a fused parameter's parts are called in a checkpoint.
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERT_PARTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}

# Built from the quantization config, whatever the checkpoint has.
NOT_LOADED = ("input_scale_ub",)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 4096
"""Elements up to which a parameter is copied before it is marked."""


@dataclass
class MarkedWeights:
    """The marked parameters of a model that is about to be loaded.

    Left out is what a checkpoint need not have: embedding and head where they are the target's, scales of the KV cache,
    and what is quantised while it is loaded, which has no memory yet.

    Attributes:
        own_heads: the modules' heads are their own.
    """

    model: nn.Module
    own_heads: bool
    _marked: list[tuple[str, nn.Module, nn.Parameter, torch.Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for prefix, module in self.model.named_modules():
            if self._may_be_absent(module):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if name not in NOT_LOADED and _can_be_marked(parameter):
                    before = parameter.data.clone() if parameter.numel() <= _SMALL else None
                    _bits(parameter.data).fill_(_mark_of(parameter.dtype))
                    self._marked.append((f"{prefix}.{name}", module, parameter, before))

    def _may_be_absent(self, module: nn.Module) -> bool:
        if isinstance(module, VocabParallelEmbedding):
            return not (self.own_heads and isinstance(module, ParallelLMHead))
        method = getattr(module, "quant_method", None)
        return isinstance(method, BaseKVCacheMethod) or getattr(method, "uses_meta_device", False)

    def take_unset(self) -> list[str]:
        """Names of what was not loaded, by the parts of fused parameters, as near to the checkpoint's as is known.

        Marks within what was loaded are padding of some kernel's; they are taken away.
        """
        unset = []
        for name, module, parameter, before in self._marked:
            parts = list(_parts_of(name, module, parameter))
            missing = [part for part, data in parts if _is_unset(data)]
            # A checkpoint may have one scale for all of a fused layer, which is loaded as the first part's.
            if len(missing) == len(parts) - 1 > 0 and parts[0][0] not in missing and parameter.numel() == len(parts):
                missing = []
            unset += [name_in_checkpoint(self.model, part) for part in missing]
            if not missing:
                _take_marks(parameter.data, before)
        return unset


def _can_be_marked(parameter: nn.Parameter) -> bool:
    if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
        return False
    return parameter.numel() > 0 and parameter.dtype is not torch.bool and parameter.layout is torch.strided


def _bits(data: torch.Tensor) -> torch.Tensor:
    return data.view(_BITS[data.element_size()])


def _mark_of(dtype: torch.dtype) -> int:
    """All bits set are a NaN in nearly every floating-point type, and -1 in the others, which a weight may well be."""
    byte = b"\xff" if dtype.is_floating_point else b"\xa5"
    return int.from_bytes(byte * dtype.itemsize, "little", signed=True)


def _is_unset(data: torch.Tensor) -> bool:
    return bool((_bits(data) == _mark_of(data.dtype)).all())


def _take_marks(data: torch.Tensor, before: torch.Tensor | None) -> None:
    """Puts back what was there before, or zero, in pieces, since a stack of experts may fill half of a device."""
    for index in range(len(data)) if data.dim() > 2 else (...,):
        bits = _bits(data[index])
        marks = bits == _mark_of(data.dtype)
        if marks.any():
            bits.copy_(torch.where(marks, 0 if before is None else _bits(before[index]), bits))


def _parts_of(name: str, module: nn.Module, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint has as tensors of their own, and where they lie."""
    *path, layer, leaf = name.split(".")
    data = parameter.data
    kind = leaf.partition("_")[0]
    if kind in EXPERT_PARTS and data.dim() > 2:
        names, suffix = EXPERT_PARTS[kind], leaf.removeprefix(f"{kind}_")
        for expert in range(len(data)):
            halves = data[expert].chunk(len(names)) if data.shape[1] % len(names) == 0 else (data[expert],)
            for part, half in zip(names if len(halves) > 1 else ("/".join(names),), halves, strict=True):
                yield ".".join((*path, layer, str(expert), part, suffix)), half
        return
    sizes = getattr(module, "output_partition_sizes", [])
    pieces = _split(data, getattr(parameter, "output_dim", 0), sizes)
    names = PARTS.get(layer, tuple(f"{layer}[{i}]" for i in range(len(sizes))))
    if pieces is None or len(names) != len(pieces):
        yield name, data
    else:
        for part, piece in zip(names, pieces, strict=True):
            yield ".".join((*path, part, leaf)), piece


def _split(data: torch.Tensor, dim: int | None, sizes: Sequence[int]) -> Sequence[torch.Tensor] | None:
    """The parts of a fused parameter, whose rows may be packed or stand for blocks; None where it has none."""
    if len(sizes) < 2 or data.dim() == 0:
        return None
    if data.numel() == len(sizes):
        return data.reshape(-1).split(1)
    length, total = data.shape[dim or 0], sum(sizes)
    scaled = [size * length for size in sizes]
    if any(size % total for size in scaled):
        return None
    return data.split([size // total for size in scaled], dim or 0)


def name_in_checkpoint(model: Any, name: str) -> str:
    """A parameter's name in the checkpoint, as far as the model's own mapping can be read backwards."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for given, made in (getattr(mapper, "orig_to_new_prefix", None) or {}).items():
        if made and given and name.startswith(made):
            name = given + name.removeprefix(made)
            break
    for given, made in (getattr(mapper, "orig_to_new_substr", None) or {}).items():
        if made and given and made in name:
            name = name.replace(made, given)
    return name.replace(".mtp_block.", ".")
