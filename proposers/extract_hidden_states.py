"""Hidden-state extraction: nothing is drafted, and every token's hidden states are kept beside its keys and values.

What is written when. The target's own forward writes the stream of the step's rows to a buffer (`mtp/residual.py`);
after it `propose` scatters them to the slots of the anchor group (`mtp/supplementary.py`). A row is right from then on
for as long as its block is the request's, or in the prefix cache.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp.groups import DraftGroup
from mtp.residual import capture_residual_stream
from mtp.slots import write_slot_mappings
from mtp.supplementary import CacheOnlyAttention, SupplementaryStore, anchor_group, rows_of_step
from proposers.extraction import ExtractionPlan

logger = init_logger(f"vllm.{__name__}")

LAYER_NAME = "hidden_states.cache_only"


class ExtractHiddenStatesProposer:
    """Serves `"method": "extract_hidden_states"`.

    Hidden states are the same on every tensor-parallel rank, so the first one keeps them and the others have neither
    buffer nor store.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.plan = ExtractionPlan.of(vllm_config)
        self.max_model_len = vllm_config.model_config.max_model_len
        self.kv_cache_gid = -1
        self.store: SupplementaryStore | None = None
        self._keeps = get_tensor_model_parallel_rank() == 0
        if not self._keeps:
            return
        row_shape = (len(self.plan.layer_ids), self.plan.hidden_size)
        max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        # Until something else is written, which the first step checks.
        self.rows = torch.full((max_num_tokens, *row_shape), torch.nan, dtype=self.plan.dtype, device=device)
        self._checked = False
        self.slot_mapping = torch.full((max_num_tokens,), PADDING_SLOT_ID, dtype=torch.int64, device=device)
        self.layer = CacheOnlyAttention(vllm_config, LAYER_NAME, *row_shape, self.plan.dtype)

    # What the host calls before a step.

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Hooks the target's layers.

        Raises:
            ValueError: its residual stream isn't found.
        """
        if self._keeps:
            capture_residual_stream(target_model, self.plan.layer_ids, self.plan.num_layers, self.rows)

    def allocate(self, kv_cache_config: KVCacheConfig) -> torch.Tensor | None:
        """Makes the store for this KV cache, in place of an earlier one, and hands it to the KV connector.

        Returns:
            the rows `[num_blocks, block_size, num_layers, hidden_size]`; None on a rank that keeps none.

        Raises:
            ValueError: no full-attention group, or a connector that doesn't read hidden states.
        """
        self.kv_cache_gid = gid = anchor_group(kv_cache_config)
        if not self._keeps:
            return None
        block_size = kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
        rows = self.layer.allocate(kv_cache_config.num_blocks, block_size, self.device)
        self.group = DraftGroup(gid, block_size, self.slot_mapping)
        self.store = SupplementaryStore(rows, gid, block_size, self.plan.layer_ids)
        if has_kv_transfer_group():
            self._bind(get_kv_transfer_group(), self.store)
        return rows

    @staticmethod
    def _bind(connector: Any, store: SupplementaryStore) -> None:
        if not hasattr(connector, "bind_store"):
            raise ValueError(
                f"The KV connector {type(connector).__name__} doesn't take hidden states from "
                "vllm-mtp-proposers, and what it brings in has none. Use HiddenStatesConnector, or "
                "MTP_PROPOSERS=upstream for vLLM's own extraction."
            )
        connector.bind_store(store)

    def validate_same_kv_cache_group(self, kv_cache_config: KVCacheConfig) -> None:
        """The host's check of its own layout; the rows are in no group."""

    def initialize_cudagraph_keys(self, cudagraph_mode: Any) -> None:
        """Nothing here is captured: the hooks are part of the target's graphs."""

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """No model runs here, so there is nothing to profile, to warm up or to agree on with other ranks."""

    # A step.

    def propose(self, common_attn_metadata: CommonAttentionMetadata) -> list[list[int]]:
        """Keeps the step's rows, and drafts nothing.

        Args:
            common_attn_metadata: of the anchor group.

        Returns:
            an empty list per request.
        """
        cad = common_attn_metadata
        if self._keeps:
            num_tokens = cad.num_actual_tokens
            self._check_captures(num_tokens)
            self.group.block_table = cad.block_table_tensor
            req_indices, positions = rows_of_step(cad)
            write_slot_mappings([self.group], cad.num_reqs, req_indices, positions, self.max_model_len, num_tokens)
            self.layer(self.rows[:num_tokens], self.slot_mapping[:num_tokens])
        return [[] for _ in range(cad.num_reqs)]

    def _check_captures(self, num_tokens: int) -> None:
        """Once, since it waits for the device: a model that doesn't call its layers would leave everything unset."""
        if self._checked:
            return
        self._checked = True
        unset = self.rows[:num_tokens].isnan().all(dim=2).all(dim=0).tolist()
        if missing := [layer_id for layer_id, empty in zip(self.plan.layer_ids, unset, strict=True) if empty]:
            raise RuntimeError(
                f"The hidden states of layers {missing} were not captured in the first step, or are not a number "
                "throughout. If the weights are sound, this vLLM or model runs its layers in a way that is not known: "
                "please report it; MTP_PROPOSERS=upstream goes back to vLLM's own extraction."
            )
