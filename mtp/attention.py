"""What is particular to attention backends: which can be captured, what latent attention reads on the host, and how
FlashAttention 3 splits sequences.
"""

from collections.abc import Iterable
from typing import Any

from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder, QueryLenSupport
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.utils import AttentionGroup

from mtp.groups import KVGroups

# Backends whose metadata is made by device operations alone; others plan on the host for each batch.
CAPTURABLE_BACKENDS = frozenset(
    {"FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "FLASH_ATTN_MLA"}
)

# Measured on an H200: with a window of 512 a launch is 3 to 6 us shorter with whole sequences from 8 requests of 8 KV
# heads on, and up to 4 longer with one request. Without a window the longest sequence may be of any length.
WHOLE_WINDOW = 512
WHOLE_TILES = 64


def can_be_captured(groups: KVGroups) -> bool:
    """Whether every backend of the groups makes its metadata by device operations alone, as a captured pass must."""
    backends = {attn.backend.get_name() for group in groups.all for attn in group.attn_groups}
    return backends <= CAPTURABLE_BACKENDS


def can_capture_prompts(groups: KVGroups) -> bool:
    """Whether passes with a prompt can be captured where others can: latent attention plans prompts on the host."""
    return not any(_is_latent(attn) for group in groups.all for attn in group.attn_groups)


def with_lengths_on_host(attn: AttentionGroup, cad: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The metadata with the sequences' lengths on the host, where the backend reads them there.

    Latent attention takes long windows, and those of other lengths than the rest, for prompts, and plans these by what
    the host knows. Of a prompt that is its length. Of a request that decodes it is a bound, rejected drafts counted in.
    So where such a window may be among them the host waits for the device; a captured pass has none.
    """
    if not _is_latent(attn):
        return cad
    builder: Any = attn.get_metadata_builder()
    uniform = builder.query_len_support != QueryLenSupport.VARLEN
    _, num_prefills, _, _ = split_decodes_and_prefills(cad, builder.reorder_batch_threshold or 1, uniform)
    return cad.replace(seq_lens_cpu_upper_bound=cad.seq_lens.cpu()) if num_prefills else cad


def _is_latent(attn: AttentionGroup) -> bool:
    return isinstance(attn.get_metadata_builder(), MLACommonMetadataBuilder)


def leave_sequences_whole(
    metadata: Any, windows: Iterable[int | None], spec: KVCacheSpec, num_reqs: int, fills_device: bool = False
) -> None:
    """Has FlashAttention 3 not split sequences where a batch fills the device anyway and no sequence is long.

    Where there are CUDA graphs the host lets it split each sequence into up to 32 parts, which a second launch then
    adds up, or, of many rows, leaves the choice to a heuristic that a graph can't have.

    Args:
        metadata: of a backend, for these layers alone; that of others than FlashAttention has no such choice.
        windows: of the layers; None: none.
        fills_device: a captured pass with a prompt, whose rows do so however long the sequences are. The parts of
            as many rows would need room besides.
    """
    has_short_windows = all(window is not None and window <= WHOLE_WINDOW for window in windows)
    tiles = num_reqs * getattr(spec, "num_kv_heads", 0)
    # A plan made ahead counts on the splits; without one, 0 leaves the choice to the kernel.
    splits = 1 if getattr(metadata, "scheduler_metadata", None) is not None else getattr(metadata, "max_num_splits", 1)
    if (has_short_windows and tiles >= WHOLE_TILES and splits > 1) or (fills_device and splits != 1):
        metadata.max_num_splits = 1
