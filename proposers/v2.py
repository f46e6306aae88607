"""`MultiGroupSpeculator`: drafting passes on vLLM's V2 model runner.

The runner keeps every request's state in a row of its own for as long as it runs, and says in each step which rows are
in the batch. That row is the request's slot of the history; block tables, lengths and tokens are on the device already,
in tensors that stay where they are. So a decode step hands over nothing that the host would have to compute.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.utils import AttentionGroup

from mtp.attention import can_be_captured
from mtp.groups import bind_kv_groups, layers_by_module
from mtp.kernels.window import read_following
from mtp.passes import Drafts, Execution
from mtp.rows import PassInputs, StepRows
from mtp.window import History, Window
from proposers.architecture import Architecture
from proposers.drafter import ArchitecturePasses
from proposers.options import Options

logger = init_logger(f"vllm.{__name__}")


class MultiGroupSpeculator(ArchitecturePasses, DraftModelSpeculator):
    """A drafter over several KV cache groups with per-step choice of module, groups and head.

    Raises:
        ValueError: at construction, when the model can't make the number of drafts asked for.
    """

    tables_stay: ClassVar = True

    def __init__(self, vllm_config: VllmConfig, device: torch.device, architecture: Architecture | None = None) -> None:
        super().__init__(vllm_config, device)
        self.init_architecture(architecture, vllm_config, self.max_num_reqs)
        depth = self.plan.chain_length - 1
        self._max_rows = self.max_num_tokens + depth * self.max_num_reqs
        self._owners: list[str | None] = [None] * self.max_num_reqs
        self._may_capture = False
        self._draft_steps = torch.arange(self.plan.num_speculative_tokens, device=device)
        options = Options.of(vllm_config)
        # The host's buffers for sampling have no room for the request that has what is left over.
        if self.draft_logits is None:
            self.max_captured_rows = min(options.captured_rows, self._max_rows)
        if depth > 0:
            self.history = History(depth, self.max_num_reqs, self.hidden_size, self.dtype, (), device)

    # What the host calls before a step.

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        # The host shares the target's head with a draft that doesn't say that it has heads, as most MTP models don't.
        shared_from = without_head(target_model) if self.descriptor.own_heads else target_model
        with self.cheap.while_loading():
            self.model = load_eagle_model(shared_from, self.vllm_config)
        self.prepare_model()
        return self.model

    def _validate_local_argmax_reduction(self) -> None:
        """`top_tokens` knows the head of each module, whether the model has a method for it or not."""
        if self.use_local_argmax_reduction and self.draft_logits is not None:
            super()._validate_local_argmax_reduction()

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[AttentionGroup]],
    ) -> None:
        """Binds the draft's layers to the KV cache groups.

        Raises:
            ValueError: a layer has no group, or the layers don't divide into the modules (`mtp.groups`).
        """
        super().set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        self.bind_groups(
            bind_kv_groups(
                kv_cache_config,
                {gid: found for gid, found in enumerate(self.attn_groups) if found},
                self._max_rows,
                self.device,
                modules=layers_by_module(self.draft_attn_layer_names, self.plan.num_modules),
                block_tables=block_tables.input_block_tables,
                block_sizes=block_tables.block_sizes,
            )
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Whole passes are captured, so nothing of the host's is needed."""
        self._may_capture = self._captures(cudagraph_mode) and can_be_captured(self.bound_groups)

    def capture(self) -> None:
        """Captures the pass of every decode step that the host has captured, and of steps that carry a prompt."""
        if not self._may_capture:
            return
        self.graphs = self.make_graphs()
        with graph_capture(device=self.device):
            for num_reqs in reversed(self._graph_sizes()):
                for num_drafts in (None, *self.fewer_drafts()):
                    self.graphs.capture(self.graphs.even(num_reqs, num_drafts))
            self.capture_uneven()

    def _graph_sizes(self) -> list[int]:
        """Numbers of requests of the host's decode graphs, in which each has a token and all its drafts."""
        query_len = 1 + self.plan.num_speculative_tokens
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        return sorted({size // query_len for size in sizes if 0 < size // query_len <= self.max_num_reqs})

    # A drafting pass.

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Drafts for every request of the batch.

        Args:
            last_hidden_states: `[num_tokens, hidden_size]`, the target's.
            num_sampled, num_rejected: `[num_reqs]`, of this step; none is sampled where a chunk ends before its prompt.
            last_sampled: `[max_num_reqs, 1]` int64, by the request's row.
            next_prefill_tokens: `[num_prefill_lookahead, max_num_reqs]` int32, the prompt's tokens after this step's,
                by the request's row.
            temperature, seeds: `[max_num_reqs]`, by the request's row.
            num_speculative_tokens: drafts wanted in this step; None: the configured number.

        Returns:
            `[num_reqs, configured number]` int64 token ids; those past `num_speculative_tokens` are 0.
        """
        num_reqs = input_batch.num_reqs
        if dummy_run:
            # The host profiles its largest step; the pass of one has the rows of the history too.
            self.warm_up(self._max_rows if is_profile else input_batch.num_tokens)
            return torch.zeros_like(self.draft_tokens[:num_reqs])
        logger.info_once("First draft by %s.%s", type(self).__module__, type(self).__name__)
        self.bound_groups.bind_target_slots(slot_mappings)
        if self.draft_logits is not None:
            self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds)
        if self.history is not None and input_batch.has_prefill:
            self._forget_former_owners(input_batch.req_ids, input_batch.idx_mapping_np)
        inputs = self._read_step(
            input_batch, last_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens
        )
        num_steps = self.plan.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        query_lens, upper = input_batch.num_scheduled_tokens, input_batch.seq_lens_cpu_upper_bound.numpy()
        unread = self.unread_rows(query_lens, upper, input_batch.prefill_len_np)
        inputs = inputs._replace(num_unread=unread)
        if self.graphs is not None:
            has_chunk_ends = inputs.prompt_token_ids is not None
            if replay := self.graphs.plan(query_lens, upper, has_chunk_ends, num_steps, unread):
                return self.graphs.replay(replay, inputs, input_batch.num_tokens, input_batch.seq_lens[:num_reqs])
        max_query_len = int(query_lens.max())
        drafts = self._new_drafts(num_steps)
        self._run_pass(inputs, self._read_metadata(input_batch, max_query_len), None, drafts)
        found = torch.zeros_like(self.draft_tokens[:num_reqs])
        for step, token_ids in enumerate(drafts.token_ids):
            found[:, step] = token_ids
        return found

    def _forget_former_owners(self, req_ids: Sequence[str], rows: np.ndarray) -> None:
        """Empties the history of rows that have changed hands. Only a step with a prompt can bring a new request."""
        assert self.history is not None
        owners = zip(rows.tolist(), req_ids, strict=True)
        fresh = {row: req_id for row, req_id in owners if self._owners[row] != req_id}
        if fresh:
            for row, req_id in fresh.items():
                self._owners[row] = req_id
            self.history.forget(list(fresh))

    def _read_step(
        self,
        batch: InputBatch,
        hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
    ) -> PassInputs:
        starts = batch.query_start_loc[: batch.num_reqs + 1]
        rows = StepRows(
            batch.input_ids[: batch.num_tokens],
            batch.positions[: batch.num_tokens],
            hidden_states[: batch.num_tokens],
            num_rejected,
            starts,
        )
        indices, last_sampled = batch.idx_mapping, last_sampled.squeeze(1)
        if batch.has_prefill:
            next_token_ids, prompt_token_ids = read_following(
                last_sampled, next_prefill_tokens, num_sampled, indices, self.plan.chain_length
            )
        else:
            next_token_ids, prompt_token_ids = last_sampled.index_select(0, indices), None
        return PassInputs(rows, next_token_ids, None if self.history is None else indices, prompt_token_ids)

    def _read_metadata(self, batch: InputBatch, max_query_len: int) -> CommonAttentionMetadata:
        """Of the target's step, for the draft's first KV cache group."""
        num_reqs, group = batch.num_reqs, self.bound_groups.primary
        upper = batch.seq_lens_cpu_upper_bound[:num_reqs]
        return CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[: num_reqs + 1]),
            seq_lens=batch.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=upper,
            num_reqs=num_reqs,
            num_actual_tokens=batch.num_tokens,
            max_query_len=max_query_len,
            max_seq_len=min(int(upper.max()), self.max_model_len),
            block_table_tensor=group.table(num_reqs),
            slot_mapping=group.slot_mapping[: batch.num_tokens],
            causal=True,
        )

    def _model_inputs(
        self,
        module: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        num_input_tokens: int,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
    ) -> dict[str, Any]:
        rows = {"input_ids": token_ids, "positions": positions, "hidden_states": hidden_states, "inputs_embeds": None}
        return rows | self._selection(module)

    def _idle_inputs(self, module: int, num_rows: int, num_input_tokens: int) -> dict[str, Any]:
        token_ids = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        positions = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        hidden_states = torch.zeros(num_rows, self.hidden_size, dtype=self.dtype, device=self.device)
        return self._model_inputs(module, token_ids, positions, hidden_states, num_input_tokens, None)

    def _plan_execution(self, num_rows: int) -> Execution:
        return Execution(CUDAGraphMode.NONE, num_rows, None)

    def _prepare_eplb(self, num_rows: int) -> None:
        self._prepare_eplb_forward(num_rows)

    # Drafts.

    def _sample_step(self, step: int, hidden: torch.Tensor, window: Window, drafts: Drafts) -> None:
        module = self.plan.module_of_step(step)
        if self.draft_logits is None and not self.use_local_argmax_reduction:
            # As the host's `sample_draft`, but for its argmax, and for adaptive verification, which is refused.
            drafts.token_ids.append(self.likeliest(hidden, module))
            return
        # A draw is keyed by the position before the token that it makes.
        assert window.last_positions is not None
        positions = window.last_positions + (1 + step)
        num_reqs = hidden.shape[0]
        token_ids = self.sample_draft(
            hidden,
            positions,
            self.idx_mapping[:num_reqs],
            self.temperature,
            self.seeds,
            self._draft_steps[step],
            self.draft_logits,
            spec_step_idx=module,
        )
        drafts.token_ids.append(token_ids)

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        return self.cheap.to_all(self.logits(hidden_states, spec_step_idx))

    def get_draft_top_tokens(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        return self.top_tokens(hidden_states, spec_step_idx)


def without_head(target_model: Any) -> Any:
    """A target as `load_eagle_model` sees it, with no head that it could share."""
    has_parts = hasattr(target_model, "get_language_model")
    return SimpleNamespace(model=(target_model.get_language_model() if has_parts else target_model).model)
