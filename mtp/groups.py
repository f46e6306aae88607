"""The KV cache groups of a draft model.

The layers of a draft may lie in several groups, each with its own block table and block size. The host owns the
block tables and hands them over in every step; a group here borrows its table for that step, owns its slot-mapping
buffer, and holds the attention groups (layers of one backend and one spec) whose metadata is built from both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID
from vllm.v1.worker.utils import AttentionGroup

# Backends whose metadata is made by device operations alone; others plan on the host for each batch.
RECORDABLE_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN"})

# Measured on an H200: with a window of 512 a launch is 3 to 6 us shorter with whole sequences from 8 requests of 8 KV
# heads on, and up to 4 longer with one request. Without a window the longest sequence may be of any length.
WHOLE_WINDOW = 512
WHOLE_TILES = 64


@dataclass(slots=True)
class DraftGroup:
    """The draft layers of one KV cache group.

    Attributes:
        kv_cache_group_id: the host's id.
        block_size: tokens per entry of `block_table`. The runner's tables count the manager's blocks; an attention
            backend that wants smaller ones maps the table itself (`AttentionGroup.kernel_block_size`), and the slots
            are the same under both.
        slot_mapping: `[max_num_tokens]` int64, this group's own buffer. The slot of a row is where its key and value
            go, `block * block_size + offset`; `PADDING_SLOT_ID` writes nothing.
        attn_groups: layers by backend and spec, in the order of their names.
        block_table: `[num_reqs, max_blocks]` int32, borrowed from the host until the next step.
    """

    kv_cache_group_id: int
    block_size: int
    slot_mapping: torch.Tensor
    attn_groups: list[AttentionGroup] = field(default_factory=list)
    block_table: torch.Tensor | None = None

    def table(self, num_reqs: int) -> torch.Tensor:
        """The block tables of the first `num_reqs` requests.

        Raises:
            RuntimeError: the host has handed over none, or one for fewer requests.
        """
        if self.block_table is None or self.block_table.shape[0] < num_reqs:
            have = 0 if self.block_table is None else self.block_table.shape[0]
            raise RuntimeError(
                f"KV cache group {self.kv_cache_group_id} has block tables of {have} requests, and {num_reqs} are "
                "to be drafted for: set_per_group_attn_metadata must be called for every group before propose."
            )
        return self.block_table[:num_reqs]


class DraftGroups:
    """All groups of a draft, in the order of their ids, and which of them each module uses."""

    def __init__(self, groups: Sequence[DraftGroup], modules: Sequence[Iterable[str]]) -> None:
        self.all = list(groups)
        self._by_id = {group.kv_cache_group_id: group for group in groups}
        self._by_module = [
            [(group, attn) for group in groups for attn in group.attn_groups if not names.isdisjoint(attn.layer_names)]
            for names in map(set, modules)
        ]

    @property
    def primary(self) -> DraftGroup:
        """The group whose metadata the host hands to `propose`: the one with the lowest id."""
        return self.all[0]

    @property
    def recordable(self) -> bool:
        """Whether every backend makes its metadata by device operations alone, as a recorded pass must."""
        backends = {attn.backend.get_name() for group in self.all for attn in group.attn_groups}
        return backends <= RECORDABLE_BACKENDS

    def bind(self, kv_cache_group_id: int, block_table: torch.Tensor) -> None:
        """Takes the host's table of this step; groups in which the draft has no layer are not ours to keep."""
        if group := self._by_id.get(kv_cache_group_id):
            group.block_table = block_table

    def attn_groups_of(self, modules: Iterable[int]) -> list[tuple[DraftGroup, AttentionGroup]]:
        """What these modules use, each once."""
        found = (pair for module in modules for pair in self._by_module[module])
        return list({id(attn): (group, attn) for group, attn in found}.values())

    def groups_of(self, modules: Iterable[int]) -> list[DraftGroup]:
        return list({id(group): group for group, _ in self.attn_groups_of(modules)}.values())

    def slot_mapping_by_layer(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Views `[num_tokens]` of the groups' buffers, by layer name, as the forward context wants them."""
        return {
            name: group.slot_mapping[:num_tokens]
            for group in self.all
            for attn in group.attn_groups
            for name in attn.layer_names
        }


def build_draft_groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kernel_block_sizes: Sequence[int] | None,
    draft_layers: Mapping[str, AttentionLayerBase],
    num_modules: int,
    max_num_tokens: int,
    device: torch.device,
) -> DraftGroups:
    """Sorts the draft's attention layers into the host's KV cache groups.

    Args:
        kernel_block_sizes: per KV cache group, the block size that its backends were given; None: the manager's.
        draft_layers: the draft's layers that have a KV cache, by name.
        max_num_tokens: rows of the largest pass.

    Raises:
        ValueError: a layer is in no KV cache group, or the layers do not divide into that many modules.
    """
    groups: dict[int, DraftGroup] = {}
    attn_groups: dict[tuple[int, str, KVCacheSpec, int], AttentionGroup] = {}
    located = _locate_layers(kv_cache_config, draft_layers)
    for name in sorted(draft_layers):
        gid, spec = located[name]
        group = groups.get(gid)
        if group is None:
            buffer = torch.full((max_num_tokens,), PADDING_SLOT_ID, dtype=torch.int64, device=device)
            block_size = kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
            group = groups[gid] = DraftGroup(gid, block_size, buffer)
        backend = draft_layers[name].get_attn_backend()
        # Builders plan for one number of query heads, which layers of one spec need not share.
        key = (gid, backend.full_cls_name(), spec, getattr(draft_layers[name], "num_heads", 0))
        if key in attn_groups:
            attn_groups[key].layer_names.append(name)
        else:
            attn_groups[key] = AttentionGroup(backend, [name], spec, gid)
            group.attn_groups.append(attn_groups[key])
    # Builders read the layers of their group, so they are made once all of them are known.
    for (gid, *_), attn in attn_groups.items():
        size = kernel_block_sizes[gid] if kernel_block_sizes is not None and gid < len(kernel_block_sizes) else None
        attn.create_metadata_builders(vllm_config, device, kernel_block_size=size)
    return DraftGroups([groups[gid] for gid in sorted(groups)], layers_by_module(draft_layers, num_modules))


def bind_draft_groups(
    attn_groups: Sequence[Sequence[AttentionGroup]],
    block_tables: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    draft_layers: Iterable[str],
    num_modules: int,
    max_num_tokens: int,
    device: torch.device,
) -> DraftGroups:
    """The groups of a host that sorts the draft's layers itself and keeps its block tables in place.

    Args:
        attn_groups: of the draft alone, by KV cache group id.
        block_tables: by id, `[max_num_reqs, max_blocks]` int32, which the host fills before every pass.
        block_sizes: by id, tokens per entry of these.
        draft_layers: the names of the layers that must be in some group.
        max_num_tokens: rows of the largest pass.

    Raises:
        ValueError: a layer is in no KV cache group, or the layers do not divide into that many modules.
    """
    located = {name for groups in attn_groups for attn in groups for name in attn.layer_names}
    if homeless := sorted(set(draft_layers) - located):
        raise ValueError(
            _homeless(homeless, [sorted(n for a in groups for n in a.layer_names) for groups in attn_groups])
        )
    groups = []
    for gid, found in enumerate(attn_groups):
        if found:
            buffer = torch.full((max_num_tokens,), PADDING_SLOT_ID, dtype=torch.int64, device=device)
            ordered = sorted(found, key=lambda attn: min(attn.layer_names))
            groups.append(DraftGroup(gid, block_sizes[gid], buffer, ordered, block_tables[gid]))
    return DraftGroups(groups, layers_by_module(draft_layers, num_modules))


def layers_by_module(draft_layers: Iterable[str], num_modules: int) -> list[list[str]]:
    """The names of each module's attention layers: modules are numbered in the order of their layer index.

    Raises:
        ValueError: there are not as many layer indices as modules.
    """
    if num_modules == 1:
        return [sorted(draft_layers)]
    by_index: dict[int, list[str]] = {}
    for name in sorted(draft_layers):
        by_index.setdefault(extract_layer_index(name), []).append(name)
    if len(by_index) != num_modules:
        raise ValueError(
            f"The draft has {num_modules} modules, and its attention layers lie in decoder layers {sorted(by_index)}: "
            "there must be one decoder layer per module. Check the number of MTP layers in the checkpoint's config."
        )
    return [by_index[index] for index in sorted(by_index)]


def leave_sequences_whole(metadata: Any, windows: Iterable[int | None], spec: KVCacheSpec, num_reqs: int) -> None:
    """Has FlashAttention 3 not split sequences where a batch fills the device anyway and no sequence is long.

    Where there are graphs the host lets it split each into up to 32 parts, which a second launch then adds up.

    Args:
        metadata: of a backend, for these layers alone; that of others than FlashAttention has no such choice.
        windows: of the layers; None: none.
    """
    has_short_windows = all(window is not None and window <= WHOLE_WINDOW for window in windows)
    tiles = num_reqs * getattr(spec, "num_kv_heads", 0)
    if has_short_windows and tiles >= WHOLE_TILES and _may_split(metadata):
        metadata.max_num_splits = 1


def _may_split(metadata: Any) -> bool:
    # A plan made ahead counts on the splits; 0 leaves the choice to the kernel.
    return getattr(metadata, "max_num_splits", 0) > 1 and metadata.scheduler_metadata is None


def _locate_layers(
    kv_cache_config: KVCacheConfig, draft_layers: Mapping[str, AttentionLayerBase]
) -> dict[str, tuple[int, KVCacheSpec]]:
    """Group id and spec of each layer; a layer that shares another's cache has that layer's spec."""
    located: dict[str, tuple[int, KVCacheSpec]] = {}
    for gid, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in draft_layers.keys() & set(group.layer_names):
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                shared = getattr(draft_layers[name], "kv_sharing_target_layer_name", None)
                spec = spec.kv_cache_specs[name if name in spec.kv_cache_specs else shared]
            located[name] = (gid, spec)
    if homeless := sorted(draft_layers.keys() - located.keys()):
        raise ValueError(_homeless(homeless, [group.layer_names for group in kv_cache_config.kv_cache_groups]))
    return located


def _homeless(layers: Sequence[str], layers_by_group: Sequence[Sequence[str]]) -> str:
    known = [f"group {gid}: {', '.join(names)}" for gid, names in enumerate(layers_by_group)]
    return (
        f"The draft layers {layers} are in no KV cache group, so their keys and values have nowhere to go "
        f"({'; '.join(known) or 'there are no groups'}). This vLLM sorts layers in a way that this package does "
        "not know: run with MTP_PROPOSERS=upstream and report the model's architecture."
    )
