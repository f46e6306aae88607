"""Storage beside the KV cache: rows for the tokens of a KV cache group that is not their own.

Hidden states are kept per token, as keys and values are, and for as long. A KV cache group of their own would be
billed at the widest page of all groups (vLLM issue 56774) and would have blocks of its own, which a prefix hit may or
may not bring along. So they have no group and no spec: the rows lie in one tensor indexed by the block ids of an
*anchor*, a full-attention group of the target whose block table they share. Where the keys of a token are, there is
its row; a block that is reused brings its rows along, and the scheduler knows nothing of them.

Who owns what. The layer here owns the tensor, the host the block tables and the slots: those that the running forward
has for the anchor (`KVGroup.slots_in_forward`), so that a row can't lie anywhere but beside its keys, and padding,
preemption and block sizes are no matter of ours. What the rows cost is added to the bytes of a block before the number
of blocks is fixed (`row_bytes_per_block`), so that both fit.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from mtp.groups import KVGroup, choose_anchor


class RowStore(NamedTuple):
    """The rows as a reader sees them.

    Attributes:
        rows: `[num_blocks, block_size, num_layers, width]` in the model's dtype, indexed by the block ids of the KV
            cache manager; the width is the hidden size, or a slice's. Not initialised: only the rows of computed tokens
            mean something.
        anchor: the group whose block ids these are.
        layer_ids: what lies along the third dimension, in this order.
        drafts: `[num_blocks, block_size, 1, num_drafts]` int32, the tokens that were run after each row in the forward
            that has written it; None: they are not kept.
    """

    rows: torch.Tensor
    anchor: KVGroup
    layer_ids: tuple[int, ...]
    drafts: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block id of the manager's. The anchor's table may be in smaller blocks; the slots are the same."""
        return self.rows.shape[1]


def row_bytes_per_block(groups: Sequence[KVCacheGroupSpec], row_bytes: int) -> int:
    """What rows of `row_bytes` bytes each add to a block of the pool.

    Raises:
        ValueError: there is no group to anchor them to.
    """
    block_size: int = groups[choose_anchor(groups)].kv_cache_spec.block_size
    return block_size * row_bytes


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

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32, torch.int32]
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
        anchor: the group by whose slots the rows are written; None until `allocate`.

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
        self.anchor: KVGroup | None = None
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"There is a layer {name} already: two extractors in one engine can't both store rows.")
        layers[name] = self

    def allocate(self, anchor: KVGroup, kv_cache_config: KVCacheConfig, device: torch.device) -> torch.Tensor:
        """Makes room for a row per slot of the anchor, in place of what there was, and returns it."""
        self.anchor = anchor
        spec = kv_cache_config.kv_cache_groups[anchor.kv_cache_group_id].kv_cache_spec
        shape = (kv_cache_config.num_blocks, spec.block_size, *self.row_shape)
        # Not cleared: nobody reads a row that was not written, and clearing takes as long as a start.
        self.kv_cache = torch.empty(shape, dtype=self.dtype, device=device)
        return self.kv_cache

    def forward(self, rows: torch.Tensor) -> bool:
        """Writes the first rows of a forward, one for each slot, padding included.

        Args:
            rows: `[at least num_tokens, num_layers, hidden_size]`.

        Returns:
            whether there were slots; a profiling run has none.
        """
        slot_mapping = None if self.anchor is None else self.anchor.slots_in_forward()
        if slot_mapping is None:
            return False
        self.impl.do_kv_cache_update(self, rows[: slot_mapping.shape[0]], self.kv_cache, slot_mapping)
        return True

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CacheOnlyBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        """None: the layer is in no KV cache group."""
