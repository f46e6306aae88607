"""Storage beside the KV cache: rows for the tokens of a KV cache group that is not their own.

Hidden states are kept per token, as keys and values are, and for as long. A KV cache group of their own would be
billed at the widest page of all groups (vLLM issue 56774) and would have blocks of its own, which a prefix hit may or
may not bring along. So they have no group and no spec: the rows lie in one tensor indexed by the block ids of an
*anchor*, a full-attention group of the target whose block table they share. Where the keys of a token are, there is
its row; a block that is reused brings its rows along, and the scheduler knows nothing of them.

Who owns what. The layer here owns the tensor, the host the block tables and the slots: those of the anchor's layers in
the same forward, so that a row can't lie anywhere but beside its keys, and padding, preemption and block sizes are no
matter of ours. What the rows cost is added to the bytes of a block before the number of blocks is fixed
(`supplementary_bytes_per_block`), so that both fit.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, is_full_attention_spec


class SupplementaryStore(NamedTuple):
    """The rows as a reader sees them.

    Attributes:
        rows: `[num_blocks, block_size, num_layers, hidden_size]` in the model's dtype, indexed by the block ids of
            the KV cache manager. Not initialised: only the rows of computed tokens mean something.
        kv_cache_group_id: the anchor, whose block ids these are.
        block_size: tokens per block of that group.
        layer_ids: what lies along the third dimension, in this order.
    """

    rows: torch.Tensor
    kv_cache_group_id: int
    block_size: int
    layer_ids: tuple[int, ...]


def anchor_group(kv_cache_config: KVCacheConfig) -> int:
    """The id of the group whose block table the rows share; the same in the scheduler and in every worker.

    Of several full-attention groups it is the one with the smallest blocks, since every block of the pool, whichever
    group it goes to, has room for a block's rows; among equals the first.

    Raises:
        ValueError: no group keeps all tokens of a request.
    """
    return _anchor(kv_cache_config.kv_cache_groups)


def supplementary_bytes_per_block(groups: Sequence[KVCacheGroupSpec], row_bytes: int) -> int:
    """What the rows add to a block of the pool.

    Raises:
        ValueError: there is no group to anchor them to.
    """
    return groups[_anchor(groups)].kv_cache_spec.block_size * row_bytes


def _anchor(groups: Sequence[KVCacheGroupSpec]) -> int:
    full = [gid for gid, group in enumerate(groups) if is_full_attention_spec(group.kv_cache_spec)]
    if not full:
        known = [
            f"group {i}: {type(g.kv_cache_spec).__name__} of {', '.join(g.layer_names)}" for i, g in enumerate(groups)
        ]
        raise ValueError(
            "Hidden states are stored by the block table of a full-attention group, and this model has none "
            f"({'; '.join(known) or 'there are no KV cache groups'}): its caches forget tokens that hidden states are "
            "wanted of. Extract from a model with at least one full-attention layer."
        )
    return min(full, key=lambda gid: (groups[gid].kv_cache_spec.block_size, gid))


class CacheOnlyImpl(AttentionImpl):
    """Writes rows to their slots, and attends to nothing."""

    def __init__(self) -> None:
        pass

    def do_kv_cache_update(
        self, layer: "CacheOnlyAttention", rows: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """One scatter.

        Args:
            rows: `[num_tokens, num_layers, hidden_size]`.
            kv_cache: `[num_blocks, block_size, num_layers, hidden_size]`.
            slot_mapping: `[num_tokens]` int64; padding goes to the first slot, which is the null block's.
        """
        kv_cache.flatten(0, 1).index_copy_(0, slot_mapping.clamp(min=0), rows)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("A cache-only layer has nothing to attend with.")


class CacheOnlyBackend(AttentionBackend):
    """The backend of a layer that only writes; it has no metadata and takes any layout."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "SUPPLEMENTARY"

    @staticmethod
    def get_impl_cls() -> type[CacheOnlyImpl]:
        return CacheOnlyImpl

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError("A cache-only layer is in no KV cache group, so nothing builds metadata for it.")

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True


class CacheOnlyAttention(torch.nn.Module, AttentionLayerBase):
    """The layer that owns the rows. It stands among the attention layers, so the host clears it as one of them.

    Attributes:
        kv_cache: `[num_blocks, block_size, num_layers, hidden_size]`, empty until `allocate`.
        anchor: a layer of the anchor group, by whose slots the rows are written.

    Raises:
        ValueError: at construction, when there is such a layer already.
    """

    def __init__(
        self, vllm_config: VllmConfig, name: str, num_layers: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.row_shape, self.dtype = (num_layers, hidden_size), dtype
        self.impl = CacheOnlyImpl()
        self.kv_cache = torch.tensor([])
        self.anchor = ""
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"There is a layer {name} already: two extractors in one engine can't both store rows.")
        layers[name] = self

    def allocate(self, kv_cache_config: KVCacheConfig, device: torch.device) -> tuple[torch.Tensor, int]:
        """Makes room for a row per slot of the anchor group, in place of what there was.

        Returns:
            the rows, and the anchor's id.

        Raises:
            ValueError: there is no group to anchor them to.
        """
        gid = anchor_group(kv_cache_config)
        group = kv_cache_config.kv_cache_groups[gid]
        self.anchor = group.layer_names[0]
        shape = (kv_cache_config.num_blocks, group.kv_cache_spec.block_size, *self.row_shape)
        # Not cleared: nobody reads a row that was not written, and clearing takes as long as a start.
        self.kv_cache = torch.empty(shape, dtype=self.dtype, device=device)
        return self.kv_cache, gid

    def forward(self, rows: torch.Tensor) -> bool:
        """Writes the first rows of a forward, one for each slot, padding included.

        Args:
            rows: `[at least num_tokens, num_layers, hidden_size]`.

        Returns:
            whether there were slots; a profiling run has none.
        """
        slot_mapping = get_forward_context().slot_mapping.get(self.anchor)
        if slot_mapping is None or self.kv_cache.numel() == 0:
            return False
        self.impl.do_kv_cache_update(self, rows[: slot_mapping.shape[0]], self.kv_cache, slot_mapping)
        return True

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CacheOnlyBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        """None: the layer is in no KV cache group."""
