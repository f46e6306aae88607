"""Hidden-state extraction: every token's hidden states are kept beside its keys and values.

What is written when. The target's layers write the residual stream of their rows to a buffer (`mtp/capture.py`), and
when its forward is over one scatter takes them to the slots of the anchor group (`mtp/store.py`). Both are
hooks of the model, so they are part of whatever graph it is captured in. From then on a row is right for as long as
its block is the request's, or in the prefix cache. The row of a rejected draft is written, too, and written again when
its position is run again; readers take verified rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheConfig

from mtp.base import GroupProposer
from mtp.capture import capture_residual_stream
from mtp.groups import bind_kv_groups, choose_anchor
from mtp.store import CacheOnlyAttention, RowStore
from proposers.hidden_states.drafts import UNKNOWN_TOKEN
from proposers.hidden_states.plan import ExtractionPlan, connector_of_records

LAYER_NAME, DRAFTS_NAME = "hidden_states.cache_only", "hidden_states.drafts"


class ExtractHiddenStatesProposer(GroupProposer):
    """Keeps hidden states, as a drafter keeps keys and values: rows at the slots of a KV cache group.

    Hidden states are the same on every tensor-parallel rank, so each keeps a slice of them, and the first one the
    drafts. Where they can't be divided the first one keeps them and the others have neither buffer nor store.

    Attributes:
        plan: what is extracted.
        store: the rows, or this rank's slice of them, once the KV cache is allocated; None before, and on a rank that
            keeps none.
    """

    def __init__(self, plan: ExtractionPlan, vllm_config: VllmConfig, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.store: RowStore | None = None
        self._rank = get_tensor_model_parallel_rank()
        self._keeps = self._rank < plan.num_slices
        self._checked = False
        if not self._keeps:
            return
        row_shape = (len(plan.layer_ids), plan.slice_size)
        self._max_num_tokens = max(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        # A value that no model has in all of a row, until the first forward, which is checked, writes another.
        self._unset = torch.finfo(plan.dtype).max
        self.rows = torch.full((self._max_num_tokens, *row_shape), self._unset, dtype=plan.dtype, device=device)
        self.layer = CacheOnlyAttention(vllm_config, LAYER_NAME, *row_shape, plan.dtype)
        self._drafts = None
        if plan.num_drafts and self._rank == 0:
            self._drafts = CacheOnlyAttention(vllm_config, DRAFTS_NAME, 1, plan.num_drafts, torch.int32)
            num_tokens = self._max_num_tokens + plan.num_drafts
            self._tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Hooks the target.

        Raises:
            ValueError: its residual stream isn't found.
        """
        if self._keeps:
            plan, first = self.plan, self._rank * self.plan.slice_size
            capture_residual_stream(target_model, plan.layer_ids, plan.num_layers, self.rows, plan.hidden_size, first)
            target_model.register_forward_hook(self._keep_rows)
            if self._drafts is not None:
                target_model.register_forward_hook(self._keep_drafts, with_kwargs=True)

    def allocate(
        self,
        kv_cache_config: KVCacheConfig,
        block_tables: Sequence[torch.Tensor] | None = None,
        block_sizes: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Makes the store for this KV cache, in place of an earlier one, and hands it to the KV connector.

        Args:
            block_tables, block_sizes: as of `mtp.groups.bind_kv_groups`.

        Returns:
            what was allocated, indexed by blocks: the rows `[num_blocks, block_size, num_layers, slice_size]`, and the
            drafts that follow them, where they are kept; nothing on a rank that keeps none.

        Raises:
            ValueError: no full-attention group, or a connector that doesn't read hidden states.
        """
        if not self._keeps:
            return []
        anchor = choose_anchor(kv_cache_config.kv_cache_groups)
        groups = bind_kv_groups(
            kv_cache_config,
            {anchor: []},
            self._max_num_tokens,
            self.device,
            block_tables=block_tables,
            block_sizes=block_sizes,
        )
        self.bind_groups(groups)
        rows = self.layer.allocate(groups.primary, kv_cache_config, self.device)
        drafts = None
        if self._drafts is not None:
            drafts = self._drafts.allocate(groups.primary, kv_cache_config, self.device)
        self.store = RowStore(rows, groups.primary, self.plan.layer_ids, drafts)
        if has_kv_transfer_group():
            self._bind(get_kv_transfer_group(), self.store)
        return [rows] if drafts is None else [rows, drafts]

    @staticmethod
    def _bind(connector: Any, store: RowStore) -> None:
        of_records = connector_of_records(connector)
        if of_records is None:
            raise ValueError(
                f"The KV connector {type(connector).__name__} doesn't take hidden states from vllm-mtp-proposers, and "
                "keys and values that it brings in come without them. Use HiddenStatesConnector, by itself or in "
                "MultiConnector, or MTP_PROPOSERS=upstream for vLLM's own extraction."
            )
        of_records.bind_store(store)

    def _keep_rows(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        stored = self.layer(self.rows)
        # The first forward of a start on CUDA is a profiling run; a later one may be under capture, and can't be
        # waited for.
        if not self._checked and (not stored or self.device.type == "cpu"):
            self._checked = True
            self._check_captures()

    def _keep_drafts(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Beside each row the tokens that were run after it in the same forward, of which the first are its drafts.

        A rejected draft's own row is run again with another token, and the row before the drafts is not.
        """
        assert self._drafts is not None
        token_ids = kwargs.get("input_ids", args[0] if args else None)
        if token_ids is None:  # the target was given embeddings
            self._tokens.fill_(UNKNOWN_TOKEN)
        else:
            self._tokens[: len(token_ids)].copy_(token_ids)
        self._drafts(self._tokens[1:].unfold(0, self.plan.num_drafts, 1).unsqueeze(1))

    def _check_captures(self) -> None:
        unset = (self.rows[0] == self._unset).all(dim=1).tolist()
        if missing := [layer_id for layer_id, empty in zip(self.plan.layer_ids, unset, strict=True) if empty]:
            raise RuntimeError(
                f"The hidden states of layers {missing} were not captured in the first forward: this vLLM or model "
                "runs its layers in a way that is not known. Please report it; MTP_PROPOSERS=upstream goes back to "
                "vLLM's own extraction."
            )
