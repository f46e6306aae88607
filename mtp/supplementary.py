"""Storage beside the KV cache: rows for the tokens of a KV cache group that is not their own.

Hidden states are kept per token, as keys and values are, and for as long. A KV cache group of their own would be
billed at the widest page of all groups (vLLM issue 56774) and would have blocks of its own, which a prefix hit may or
may not bring along. So they have no group and no spec: the rows lie in one tensor indexed by the block ids of an
*anchor*, a full-attention group of the target whose block table they share. Where the keys of a token are, there is
its row; a block that is reused brings its rows along, and the scheduler knows nothing of them.

Who owns what. The layer here owns the tensor, the host the block tables. What the rows cost is added to the bytes of
a block before the number of blocks is fixed (`supplementary_bytes_per_block`), so that both fit.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, CommonAttentionMetadata
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
        known = [f"group {i}: {type(g.kv_cache_spec).__name__} of {', '.join(g.layer_names)}" for i, g in enumerate(groups)]
        raise ValueError(
            "Hidden states are stored by the block table of a full-attention group, and this model has none "
            f"({'; '.join(known) or 'there are no KV cache groups'}): its caches forget tokens that hidden states are "
            "wanted of. Extract from a model with at least one full-attention layer."
        )
    return min(full, key=lambda gid: (groups[gid].kv_cache_spec.block_size, gid))


def rows_of_step(cad: CommonAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the sequence position of each of the target's rows, `[num_actual_tokens]` int64 both.

    From the lengths alone: `cad.positions` are rotary ones, which are others under M-RoPE.
    """
    starts, device = cad.query_start_loc, cad.query_start_loc.device
    lens = starts.diff()
    rows = torch.arange(cad.num_actual_tokens, device=device)
    req_indices = torch.arange(cad.num_reqs, device=device).repeat_interleave(lens, output_size=cad.num_actual_tokens)
    # A request's last row is at the end of its sequence.
    ends = (cad.seq_lens - starts[1:]).long()
    return req_indices, rows + ends[req_indices]


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
    """The layer that owns the rows. It stands among the attention layers so that the host clears it as one of them.

    Attributes:
        kv_cache: `[num_blocks, block_size, num_layers, hidden_size]`, empty until `allocate`.

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
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"There is a layer {name} already: two drafters in one engine can't both store rows.")
        layers[name] = self

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
        # Not cleared: nobody reads a row that was not written, and clearing takes as long as a start.
        self.bind_kv_cache(torch.empty(num_blocks, block_size, *self.row_shape, dtype=self.dtype, device=device))
        return self.kv_cache

    def forward(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self.impl.do_kv_cache_update(self, rows, self.kv_cache, slot_mapping)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CacheOnlyBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        """None: the layer is in no KV cache group."""
