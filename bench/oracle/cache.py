"""Reads keys and values back from the engine's KV cache.

The CPU backend packs a block's keys for its kernels. Rather than know the packing, `BlockLayout` has the backend write
numbered elements into a scratch block and looks where each went.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.oracle.runners import RunnerView


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the elements of a block lie.

    Attributes:
        keys, values: `[block_size, num_kv_heads, head_dim]` int64, indices into a flattened block. Values may be
            narrower than keys.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def probe(cls, layer: Any, block_size: int) -> "BlockLayout":
        """Finds the layout by having the layer's attention backend write into a scratch block.

        Latent attention has no packing to find: rows lie one after the other, and their values are made of the keys.

        Raises:
            RuntimeError: it didn't write every element to a place of its own, or a latent cache has other rows.
        """
        if hasattr(layer, "kv_lora_rank"):
            return cls._of_latents(layer, block_size)
        shapes = [(block_size, layer.num_kv_heads, size) for size in (layer.head_size, layer.head_size_v)]
        num_keys, num_values = (math.prod(shape) for shape in shapes)
        device, dtype = layer.kv_cache.device, layer.kv_cache.dtype

        def written(numbers: Tensor) -> Tensor:
            scratch = torch.zeros_like(layer.kv_cache[:1])
            split = numbers.to(dtype).split((num_keys, num_values))
            keys, values = (part.view(shape) for part, shape in zip(split, shapes, strict=True))
            layer.impl.do_kv_cache_update(layer, keys, values, scratch, torch.arange(block_size, device=device))
            return scratch.flatten()

        numbers = torch.arange(num_keys + num_values, device=device)
        places = written(torch.ones_like(numbers)).nonzero().flatten()
        # In digits that every dtype of a cache holds exactly.
        held = torch.zeros_like(places)
        for shift in (0, 8, 16):
            held += written((numbers >> shift) & 255)[places].long() << shift
        found = places[held.argsort()]
        if len(found) != len(numbers) or not torch.equal(held.sort().values, numbers):
            raise RuntimeError("The KV cache of this backend does not hold what was written to it, element by element.")
        keys, values = found.cpu().split((num_keys, num_values))
        return cls(keys.view(shapes[0]), values.view(shapes[1]))

    @classmethod
    def _of_latents(cls, layer: Any, block_size: int) -> "BlockLayout":
        width = layer.head_size
        if layer.kv_cache.shape[1:] != (block_size, width):
            raise RuntimeError(
                f"A latent cache of blocks {list(layer.kv_cache.shape[1:])} is none that the oracle can read: it knows "
                f"[{block_size}, {width}], latents and rotated features in the cache's dtype."
            )
        return cls(torch.arange(block_size * width).view(block_size, 1, width), torch.empty(block_size, 1, 0).long())


class ModuleCache:
    """One module's own part of the KV cache.

    Attributes:
        module: its number.
        group: the KV cache group its layer lies in.
        heads: the key and value heads that this tensor-parallel rank has of it.
        window: rows further than that behind a query are no longer the request's; None: all are.
        key_dim: of a head's keys.
    """

    def __init__(self, module: int, group: int, layer: Any, block_size: int, rank: int) -> None:
        first_head = 0 if hasattr(layer, "kv_lora_rank") else rank * layer.num_kv_heads  # each rank has all latents
        self.heads = slice(first_head, first_head + layer.num_kv_heads)
        self.module, self.group, self.block_size = module, group, block_size
        self.window: int | None = layer.sliding_window
        self.key_dim: int = layer.head_size
        self._layer = layer
        self._layout = BlockLayout.probe(layer, block_size)

    def first_visible(self, query: int) -> int:
        """The first row that a query at that position attends to; blocks before it may belong to somebody else."""
        return 0 if self.window is None else max(0, query - self.window + 1)

    def slots(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        """Physical places of the rows `[start, end)`, under a request's block table."""
        rows = torch.arange(start, end)
        table = torch.as_tensor(blocks, dtype=torch.int64)
        return table[rows // self.block_size] * self.block_size + rows % self.block_size

    def read(self, blocks: Sequence[int], start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows `[start, end)`, each `[end - start, num_kv_heads, head_dim]`."""
        first = start // self.block_size
        needed = torch.as_tensor(blocks, dtype=torch.int64)[first : -(-end // self.block_size)]
        pages = self._layer.kv_cache[needed.to(self._layer.kv_cache.device)].flatten(1).float().cpu()
        rows = slice(start - first * self.block_size, end - first * self.block_size)
        keys, values = (pages[:, where].flatten(0, 1)[rows] for where in (self._layout.keys, self._layout.values))
        return keys, values


def module_caches(view: RunnerView) -> list[ModuleCache]:
    """The caches of the draft's modules, in the order of their layers' indices.

    Raises:
        RuntimeError: a draft layer is in no group.
    """
    # Here and not above: what the engine reads from the environment must be set before vLLM is first imported.
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.models.utils import extract_layer_index

    runner = view.runner
    groups = runner.kv_cache_config.kv_cache_groups
    layers = runner.vllm_config.compilation_config.static_forward_context
    names = sorted(view.layer_names, key=extract_layer_index)
    caches = []
    for module, name in enumerate(names):
        where = [index for index, group in enumerate(groups) if name in group.layer_names]
        if len(where) != 1:
            raise RuntimeError(f"The draft layer {name} is in the KV cache groups {where}, and must be in one.")
        block_size = groups[where[0]].kv_cache_spec.block_size
        caches.append(ModuleCache(module, where[0], layers[name], block_size, get_tensor_model_parallel_rank()))
    return caches
