"""Hidden-state extraction: nothing is drafted, and every token's hidden states are kept beside its keys and values.

What is written when. The target's layers write the residual stream of their rows to a buffer (`mtp/capture.py`), and
when its forward is over one scatter takes them to the slots of the anchor group (`mtp/store.py`). Both are
hooks of the model, so they are part of whatever graph it is captured in. From then on a row is right for as long as
its block is the request's, or in the prefix cache.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from mtp.capture import capture_residual_stream
from mtp.store import CacheOnlyAttention, SupplementaryStore
from proposers.hidden_states.plan import ExtractionPlan

logger = init_logger(f"vllm.{__name__}")

LAYER_NAME = "hidden_states.cache_only"


class ExtractHiddenStatesProposer:
    """Serves `"method": "extract_hidden_states"`.

    Hidden states are the same on every tensor-parallel rank, so the first one keeps them and the others have neither
    buffer nor store.

    Attributes:
        plan: what is extracted.
        store: the rows, once the KV cache is allocated; None before, and on a rank that keeps none.

    Raises:
        ValueError: at construction, for layer ids that the model doesn't have.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.plan = ExtractionPlan.of(vllm_config)
        self.device = device
        self.store: SupplementaryStore | None = None
        self._keeps = get_tensor_model_parallel_rank() == 0
        self._checked = False
        if not self._keeps:
            return
        row_shape = (len(self.plan.layer_ids), self.plan.hidden_size)
        max_num_tokens = max(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        # A value that no model has in all of a row, until the first forward, which is checked, writes another.
        self._unset = torch.finfo(self.plan.dtype).max
        self.rows = torch.full((max_num_tokens, *row_shape), self._unset, dtype=self.plan.dtype, device=device)
        self.layer = CacheOnlyAttention(vllm_config, LAYER_NAME, *row_shape, self.plan.dtype)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Hooks the target.

        Raises:
            ValueError: its residual stream isn't found.
        """
        if self._keeps:
            capture_residual_stream(target_model, self.plan.layer_ids, self.plan.num_layers, self.rows)
            target_model.register_forward_hook(self._keep_rows)

    def allocate(self, kv_cache_config: KVCacheConfig) -> torch.Tensor | None:
        """Makes the store for this KV cache, in place of an earlier one, and hands it to the KV connector.

        Returns:
            the rows `[num_blocks, block_size, num_layers, hidden_size]`; None on a rank that keeps none.

        Raises:
            ValueError: no full-attention group, or a connector that doesn't read hidden states.
        """
        if not self._keeps:
            return None
        rows, gid = self.layer.allocate(kv_cache_config, self.device)
        self.store = SupplementaryStore(rows, gid, rows.shape[1], self.plan.layer_ids)
        if has_kv_transfer_group():
            self._bind(get_kv_transfer_group(), self.store)
        return rows

    @staticmethod
    def _bind(connector: Any, store: SupplementaryStore) -> None:
        if not hasattr(connector, "bind_store"):
            raise ValueError(
                f"The KV connector {type(connector).__name__} doesn't take hidden states from vllm-mtp-proposers, and "
                "keys and values that it brings in come without them. Use HiddenStatesConnector, or "
                "MTP_PROPOSERS=upstream for vLLM's own extraction."
            )
        connector.bind_store(store)

    def _keep_rows(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        stored = self.layer(self.rows)
        # The first forward of a start on CUDA is a profiling run; a later one may be under capture, and can't be
        # waited for.
        if not self._checked and (not stored or self.device.type == "cpu"):
            self._checked = True
            self._check_captures()

    def _check_captures(self) -> None:
        unset = (self.rows[0] == self._unset).all(dim=1).tolist()
        if missing := [layer_id for layer_id, empty in zip(self.plan.layer_ids, unset, strict=True) if empty]:
            raise RuntimeError(
                f"The hidden states of layers {missing} were not captured in the first forward: this vLLM or model "
                "runs its layers in a way that is not known. Please report it; MTP_PROPOSERS=upstream goes back to "
                "vLLM's own extraction."
            )

    # What the host asks of every drafter.

    def initialize_cudagraph_keys(self, cudagraph_mode: Any) -> None:
        """Nothing to do: the hooks are part of the target's graphs."""

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: there is no model of its own to profile, to warm up, or to agree on with other ranks."""
