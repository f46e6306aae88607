"""The KV cache groups that a proposer writes to.

The host sorts attention layers into KV cache groups, each with block tables and a block size of its own, and owns the
tables. A `KVGroup` here is one of them as a proposer sees it: it borrows the host's table, owns a buffer for slots, and
holds the attention groups (layers of one backend and one spec) whose metadata is built from both.

Every proposer binds its groups by `bind_kv_groups`: a drafter those of its own layers, which may be several, and the
hidden-state extractor the *anchor*, a full-attention group of the target beside whose keys it keeps its rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    is_full_attention_spec,
)
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID
from vllm.v1.worker.utils import AttentionGroup


@dataclass(slots=True)
class KVGroup:
    """One KV cache group of the host.

    Attributes:
        kv_cache_group_id: the host's id.
        block_size: tokens per entry of `block_table`. The V1 runner's tables count the manager's blocks, and an
            attention backend that wants smaller ones maps the table itself (`AttentionGroup.kernel_block_size`); the
            slots are the same under both.
        slot_mapping: `[max_num_tokens]` int64, this group's own buffer. The slot of a row is where its key and value
            go, `block * block_size + offset`; `PADDING_SLOT_ID` writes nothing.
        layer_names: all layers of the group, the target's too.
        attn_groups: the proposer's own layers by backend and spec, in the order of their names.
        block_table: `[num_reqs, max_blocks]` int32, borrowed from the host until the next step.
        target_slot_mapping: `[num_tokens]` int64, the host's slots of the rows that the target runs in this step. A
            drafting pass has rows of its own; the extractor writes at these.
    """

    kv_cache_group_id: int
    block_size: int
    slot_mapping: torch.Tensor
    layer_names: tuple[str, ...] = ()
    attn_groups: list[AttentionGroup] = field(default_factory=list)
    block_table: torch.Tensor | None = None
    target_slot_mapping: torch.Tensor | None = None

    def table(self, num_reqs: int) -> torch.Tensor:
        """The block tables of the first `num_reqs` requests.

        Raises:
            RuntimeError: the host has handed over none, or one for fewer requests.
        """
        if self.block_table is None or self.block_table.shape[0] < num_reqs:
            have = 0 if self.block_table is None else self.block_table.shape[0]
            raise RuntimeError(
                f"KV cache group {self.kv_cache_group_id} has block tables of {have} requests, and there are "
                f"{num_reqs}: set_per_group_attn_metadata must be called for every group before a pass."
            )
        return self.block_table[:num_reqs]

    def take_slots(self, slot_mapping: torch.Tensor, num_padded_tokens: int) -> None:
        """Has the buffer hold these slots `[num_tokens]`, and padding up to `num_padded_tokens`."""
        num_tokens = slot_mapping.shape[0]
        self.slot_mapping[:num_tokens] = slot_mapping
        if num_padded_tokens > num_tokens:
            self.slot_mapping[num_tokens:num_padded_tokens] = PADDING_SLOT_ID

    def slots_in_forward(self) -> torch.Tensor | None:
        """The host's slots `[num_tokens]` in the forward that is being run; None in one that writes no cache.

        In a CUDA graph they lie where every replay finds those of its own step.
        """
        slot_mapping = get_forward_context().slot_mapping
        assert isinstance(slot_mapping, dict)  # a list is of a batch in two halves, which is refused at start-up
        found = slot_mapping.get(self.layer_names[0])
        if found is not None:
            self.target_slot_mapping = found
        return found


class KVGroups:
    """All groups of a proposer, in the order of their ids, and which of them each of its modules uses.

    Attributes:
        layers_by_module: the names of each module's attention layers.
    """

    def __init__(self, groups: Sequence[KVGroup], modules: Sequence[Iterable[str]] = ()) -> None:
        self.all = list(groups)
        self._by_id = {group.kv_cache_group_id: group for group in groups}
        self.layers_by_module = [sorted(names) for names in modules]
        self._by_module = [
            [(group, attn) for group in groups for attn in group.attn_groups if not names.isdisjoint(attn.layer_names)]
            for names in map(set, self.layers_by_module)
        ]

    @property
    def primary(self) -> KVGroup:
        """The group whose metadata the host hands to `propose`: the one with the lowest id."""
        return self.all[0]

    def bind(
        self, kv_cache_group_id: int, block_table: torch.Tensor, target_slot_mapping: torch.Tensor | None = None
    ) -> None:
        """Takes the host's table and slots of this step; groups that the proposer has no part in are not kept."""
        if group := self._by_id.get(kv_cache_group_id):
            group.block_table, group.target_slot_mapping = block_table, target_slot_mapping

    def bind_target_slots(self, slot_mapping_by_layer: Mapping[str, torch.Tensor]) -> None:
        """Takes the host's slots of this step, of a host whose block tables stay in place (`bind_kv_groups`).

        Args:
            slot_mapping_by_layer: `[num_tokens]` int64 each, by the names of all layers of these groups.
        """
        for group in self.all:
            group.target_slot_mapping = slot_mapping_by_layer[group.layer_names[0]]

    def attn_groups_of(self, modules: Iterable[int]) -> list[tuple[KVGroup, AttentionGroup]]:
        """What these modules use, each once."""
        found = (pair for module in modules for pair in self._by_module[module])
        return list({id(attn): (group, attn) for group, attn in found}.values())

    def groups_of(self, modules: Iterable[int]) -> list[KVGroup]:
        return list({id(group): group for group, _ in self.attn_groups_of(modules)}.values())

    def slot_mapping_by_layer(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Views `[num_tokens]` of the groups' buffers, by layer name, as the forward context wants them."""
        return {
            name: group.slot_mapping[:num_tokens]
            for group in self.all
            for attn in group.attn_groups
            for name in attn.layer_names
        }


def bind_kv_groups(
    kv_cache_config: KVCacheConfig,
    attn_groups: Mapping[int, Sequence[AttentionGroup]],
    max_num_tokens: int,
    device: torch.device,
    modules: Sequence[Iterable[str]] = (),
    block_tables: Sequence[torch.Tensor] | None = None,
    block_sizes: Sequence[int] | None = None,
) -> KVGroups:
    """The groups of a proposer.

    Args:
        attn_groups: of the proposer's own layers, by KV cache group id. A group without any is bound for its slots.
        max_num_tokens: rows of the largest forward.
        modules: the names of each module's attention layers (`layers_by_module`).
        block_tables: by id, `[max_num_reqs, max_blocks]` int32 each, of a host that fills them in place before every
            step; None: the host hands one over in each step (`KVGroups.bind`).
        block_sizes: by id, tokens per entry of these tables; None: the block sizes of the KV cache manager.

    Raises:
        ValueError: a module's layer is in no KV cache group.
    """
    hosts = kv_cache_config.kv_cache_groups
    located = {name for attns in attn_groups.values() for attn in attns for name in attn.layer_names}
    if homeless := sorted({name for names in modules for name in names} - located):
        raise ValueError(_homeless(homeless, [group.layer_names for group in hosts]))
    groups = [
        KVGroup(
            kv_cache_group_id=gid,
            block_size=hosts[gid].kv_cache_spec.block_size if block_sizes is None else block_sizes[gid],
            slot_mapping=torch.full((max_num_tokens,), PADDING_SLOT_ID, dtype=torch.int64, device=device),
            layer_names=tuple(hosts[gid].layer_names),
            attn_groups=sorted(attn_groups[gid], key=lambda attn: min(attn.layer_names)),
            block_table=None if block_tables is None else block_tables[gid],
        )
        for gid in sorted(attn_groups)
    ]
    return KVGroups(groups, modules)


def make_attn_groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kernel_block_sizes: Sequence[int] | None,
    layers: Mapping[str, AttentionLayerBase],
    device: torch.device,
) -> dict[int, list[AttentionGroup]]:
    """Sorts layers by KV cache group, backend and spec, for a host that doesn't do it for a proposer's own.

    Args:
        kernel_block_sizes: per KV cache group, the block size that its backends were given; None: the manager's.
        layers: that have a KV cache, by name.

    Raises:
        ValueError: a layer is in no KV cache group.
    """
    located = _locate_layers(kv_cache_config, layers)
    found: dict[tuple[int, str, KVCacheSpec, int], AttentionGroup] = {}
    for name in sorted(layers):
        gid, spec = located[name]
        backend = layers[name].get_attn_backend()
        # Builders plan for one number of query heads, which layers of one spec need not share.
        key = (gid, backend.full_cls_name(), spec, getattr(layers[name], "num_heads", 0))
        if key in found:
            found[key].layer_names.append(name)
        else:
            found[key] = AttentionGroup(backend, [name], spec, gid)
    by_group: dict[int, list[AttentionGroup]] = {}
    # Builders read the layers of their group, so they are made once all of them are known.
    for (gid, *_), attn in found.items():
        size = kernel_block_sizes[gid] if kernel_block_sizes is not None and gid < len(kernel_block_sizes) else None
        attn.create_metadata_builders(vllm_config, device, kernel_block_size=size)
        by_group.setdefault(gid, []).append(attn)
    return by_group


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


def choose_anchor(groups: Sequence[KVCacheGroupSpec]) -> int:
    """The id of the group beside whose keys a token's hidden states are kept; the same in every process.

    Of several full-attention groups it is the one with the smallest blocks, since every block of the pool, whichever
    group it goes to, has room for a block's rows; among equals the first.

    Raises:
        ValueError: no group keeps all tokens of a request.
    """
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


def _locate_layers(
    kv_cache_config: KVCacheConfig, layers: Mapping[str, AttentionLayerBase]
) -> dict[str, tuple[int, KVCacheSpec]]:
    """Group id and spec of each layer; a layer that shares another's cache has that layer's spec."""
    located: dict[str, tuple[int, KVCacheSpec]] = {}
    for gid, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in layers.keys() & set(group.layer_names):
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                shared = getattr(layers[name], "kv_sharing_target_layer_name", None)
                spec = spec.kv_cache_specs[name if name in spec.kv_cache_specs else shared]
            located[name] = (gid, spec)
    if homeless := sorted(layers.keys() - located.keys()):
        raise ValueError(_homeless(homeless, [group.layer_names for group in kv_cache_config.kv_cache_groups]))
    return located


def _homeless(layers: Sequence[str], layers_by_group: Sequence[Sequence[str]]) -> str:
    known = [f"group {gid}: {', '.join(names)}" for gid, names in enumerate(layers_by_group)]
    return (
        f"The draft layers {layers} are in no KV cache group, so their keys and values have nowhere to go "
        f"({'; '.join(known) or 'there are no groups'}). This vLLM sorts layers in a way that this package does "
        "not know: run with MTP_PROPOSERS=upstream and report the model's architecture."
    )
