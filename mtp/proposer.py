"""`MultiGroupProposer`: drafts with modules whose layers may lie in several KV cache groups.

Who owns what. The host owns block tables, the target's hidden states and the metadata of its step; nothing of it is
changed here. The proposer owns one slot-mapping buffer per group (`mtp/groups.py`) and its input buffers, which the
base class allocates. `initialize_attn_backend` binds the groups, `set_per_group_attn_metadata` hands over their block
tables in every step, `propose` uses both.

What is written when. The first pass runs module 0 over the rows that the target has just computed, rejected ones
included: those lie past the last valid row and are written again before anything reads them. Each further step runs
one row per request at the next position. A prompt's rows in the later modules are therefore not exact yet: the exact
chain, which runs every module over every row, is to take this place.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from mtp.groups import DraftGroups, build_draft_groups
from mtp.slots import query_rows, write_slot_mappings
from mtp.steps import DraftDescriptor, DraftPlan

logger = init_logger(f"vllm.{__name__}")


class MultiGroupProposer(EagleProposer):
    """A drafter over several KV cache groups with per-step choice of module, groups and head.

    Subclasses name their `descriptor` and add what is truly their own.

    Raises:
        ValueError: at construction, when the model can't make the number of drafts asked for.
    """

    descriptor: ClassVar[DraftDescriptor]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.plan = DraftPlan.make(
            self.descriptor, self.draft_model_config.hf_config, self.num_speculative_tokens, self.max_model_len
        )
        self.groups: DraftGroups | None = None
        self._decode_query_start_loc_cpu = torch.arange(self.max_batch_size + 1, dtype=torch.int32)
        self._input_batch: InputBatch | None = None
        # Ranks of a data-parallel group meet in every forward, so none may run fewer than the others.
        self._fixed_forwards = vllm_config.parallel_config.data_parallel_size > 1

    # What the host calls before a step.

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Binds the draft's layers to the KV cache groups.

        Raises:
            ValueError: a layer has no group (`mtp.groups.build_draft_groups`).
        """
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        self.groups = build_draft_groups(
            self.vllm_config,
            kv_cache_config,
            kernel_block_sizes,
            {name: layers[name] for name in self._draft_attn_layer_names},
            self.plan.num_modules,
            self.max_num_tokens,
            self.device,
        )
        # Names under which the host finds them.
        self.draft_attn_groups = [attn for group in self.groups.all for attn in group.attn_groups]
        self.kv_cache_gid = self.groups.primary.kv_cache_group_id
        self.block_size = self.groups.primary.block_size

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode) -> None:
        """The host's graphs know a number of rows and no module: with several modules they would replay the first."""
        super().initialize_cudagraph_keys(cudagraph_mode if self.plan.num_modules == 1 else CUDAGraphMode.NONE)

    def set_per_group_attn_metadata(self, gid: int, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Takes the block table of one KV cache group for the coming step.

        The host's slots are not used: they are those of the target's rows in the order that the target ran them, which
        a draft pass need not keep.
        """
        self._bound_groups().bind(gid, block_table)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Kept for `propose`, which knows where each chunk ends.
        self._input_batch = gpu_input_batch
        return super().prepare_next_token_ids_padded(sampled_token_ids, requests, gpu_input_batch, discard_request_mask)

    # A drafting pass.

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Drafts for every request of the batch.

        Args:
            num_speculative_tokens: drafts wanted in this step, from 0 to the configured number.
            target_token_ids, target_positions, target_hidden_states: the target's rows, `[num_tokens]`,
                `[num_tokens]` (`[3, num_tokens]` under M-RoPE) and `[num_tokens, hidden_size]`.
            next_token_ids: `[batch_size]` int32, the token after each request's last valid row.
            token_indices_to_sample: `[batch_size]`, the last valid row of each request; None: its last row.
            common_attn_metadata: of the target's step, for the primary group; not changed.
            num_rejected_tokens_gpu: `[batch_size]`, how many of each request's last rows were rejected.

        Returns:
            `[batch_size, num_speculative_tokens]` int64 token ids.

        Raises:
            RuntimeError: the groups or their block tables were not handed over.
        """
        logger.info_once("First draft by %s.%s", type(self).__module__, type(self).__name__)
        cad = common_attn_metadata
        self._last_draft_probs: torch.Tensor | None = None
        num_tokens, last_rows, cad = self.set_inputs_first_pass(
            target_token_ids,
            self._correct_chunk_ends(next_token_ids, cad),
            target_positions,
            target_hidden_states,
            token_indices_to_sample,
            cad,
            num_rejected_tokens_gpu,
        )
        req_indices, seq_positions = query_rows(cad.query_start_loc, cad.seq_lens, num_tokens)
        mode, num_input_tokens, across_dp = self._determine_batch_execution_and_padding(num_tokens)
        inputs, _ = self.build_model_inputs_first_pass(num_tokens, num_input_tokens, mm_embed_inputs)
        sample_hidden, hidden = self._run_step(
            0, cad, req_indices, seq_positions, inputs, mode, num_input_tokens, across_dp
        )

        # Without a draft to make the pass has still written its keys and values, or the next one would read holes.
        num_steps = self.plan.num_speculative_tokens if self._fixed_forwards else num_speculative_tokens
        drafts: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        if num_steps > 0:
            self._sample_step(0, sample_hidden[last_rows], sampling_metadata, drafts, probs)
        if num_steps > 1:
            self._roll_out(num_steps, cad, last_rows, num_rejected_tokens_gpu, hidden, sampling_metadata, drafts, probs)
        return self._collect(num_speculative_tokens, cad.batch_size(), drafts, probs)

    def _roll_out(
        self,
        num_steps: int,
        cad: CommonAttentionMetadata,
        last_rows: torch.Tensor,
        num_rejected_tokens: torch.Tensor | None,
        hidden: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        drafts: list[torch.Tensor],
        probs: list[torch.Tensor],
    ) -> None:
        """Steps 1 and on: one row per request, each at the position after the last."""
        batch_size = cad.batch_size()
        mode, num_input_tokens, across_dp = self._determine_batch_execution_and_padding(batch_size)
        rope_positions = self._get_positions(self.max_num_tokens)[..., last_rows]
        hidden = hidden[last_rows]
        req_indices = self.arange[:batch_size]
        cad = self._one_row_per_request(cad, num_rejected_tokens)
        for step in range(1, num_steps):
            seq_positions = cad.seq_lens  # of the row to come, whose index is the length before it
            cad = self._advance(cad)
            rope_positions = (rope_positions + 1).clamp(max=self.max_model_len - 1)
            self._get_positions(batch_size)[:] = rope_positions
            self.hidden_states[:batch_size] = hidden
            self.input_ids[:batch_size] = drafts[-1]
            inputs = self._step_inputs(batch_size, num_input_tokens)
            sample_hidden, hidden = self._run_step(
                step, cad, req_indices, seq_positions, inputs, mode, num_input_tokens, across_dp
            )
            hidden = hidden[:batch_size]
            self._sample_step(step, sample_hidden[:batch_size], sampling_metadata, drafts, probs)

    def _run_step(
        self,
        step: int,
        cad: CommonAttentionMetadata,
        req_indices: torch.Tensor,
        seq_positions: torch.Tensor,
        inputs: dict[str, Any],
        mode: CUDAGraphMode,
        num_input_tokens: int,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the step's module over the rows; returns the hidden states that its head and that the next step take."""
        module = self.plan.module_of_step(step)
        groups = self._bound_groups()
        write_slot_mappings(
            groups.groups_of(module), cad.num_reqs, req_indices, seq_positions, self.max_model_len, num_input_tokens
        )
        _, attn_metadata = self.build_per_group_and_layer_attn_metadata(cad, step)
        if self.eplb_state is not None:
            self.eplb_state.prepare_forward(self.draft_model_config, cad.num_actual_tokens)
        if self.plan.num_modules > 1:
            inputs["spec_step_idx"] = module
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_input_tokens,
            num_tokens_across_dp=num_tokens_across_dp,
            cudagraph_runtime_mode=mode,
            slot_mapping=groups.slot_mapping_by_layer(num_input_tokens),
        ):
            output = self.model(**inputs)
        return output if self.model_returns_tuple() else (output, output)

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        """Attention metadata of the groups that step `draft_index` uses, as a list and by layer name."""
        cad = common_attn_metadata
        per_group: list[object] = []
        per_layer: dict[str, object] = {}
        for group, attn in self._bound_groups().attn_groups_of(self.plan.module_of_step(draft_index)):
            metadata = attn.build_metadata_for_drafting(
                replace(
                    cad,
                    block_table_tensor=group.table(cad.num_reqs),
                    slot_mapping=group.slot_mapping[: cad.num_actual_tokens],
                ),
                draft_index,
            )
            if self.allowed_attn_types is not None and not isinstance(metadata, self.allowed_attn_types):
                raise ValueError(
                    f"The draft layers {attn.layer_names} use {type(metadata).__name__}, which this platform can't "
                    f"draft with; it can with {[t.__name__ for t in self.allowed_attn_types]}. Choose another "
                    "backend by attention_backend in the speculative config."
                )
            per_group.append(metadata)
            per_layer.update(dict.fromkeys(attn.layer_names, metadata))
        return per_group, per_layer

    # Inputs.

    def _correct_chunk_ends(self, next_token_ids: torch.Tensor, cad: CommonAttentionMetadata) -> torch.Tensor:
        """The token after a chunk that ends before its prompt does is the prompt's, and the host gives the last one.

        The prompt is followed by the output so far when a preempted request is computed again.
        """
        batch, self._input_batch = self._input_batch, None
        if batch is None or cad.seq_lens_cpu_upper_bound is None:
            return next_token_ids  # the host took them from the requests, one by one
        ends = cad.seq_lens_cpu_upper_bound[: cad.num_reqs].numpy()  # exact for rows that prefill
        rows = (ends < batch.num_tokens_no_spec[: cad.num_reqs]).nonzero()[0]
        if len(rows) == 0:
            return next_token_ids
        tokens = batch.token_ids_cpu[rows, ends[rows]]
        corrected = next_token_ids.clone()
        corrected[async_tensor_h2d(rows, device=self.device)] = async_tensor_h2d(tokens, device=self.device)
        return corrected

    def _step_inputs(self, batch_size: int, num_input_tokens: int) -> dict[str, Any]:
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids[:num_input_tokens],
            "positions": self._get_positions(num_input_tokens),
            "hidden_states": self.hidden_states[:num_input_tokens],
            "inputs_embeds": None,
        }
        if self.supports_mm_inputs:
            self.inputs_embeds[:batch_size] = self.model.embed_input_ids(self.input_ids[:batch_size])
            inputs |= {"input_ids": None, "inputs_embeds": self.inputs_embeds[:num_input_tokens]}
        return inputs

    def _one_row_per_request(
        self, cad: CommonAttentionMetadata, num_rejected_tokens: torch.Tensor | None
    ) -> CommonAttentionMetadata:
        """The batch as it stands before step 1: lengths up to each last valid row, one query a request."""
        batch_size = cad.batch_size()
        return replace(
            cad,
            num_actual_tokens=batch_size,
            max_query_len=1,
            query_start_loc=self.arange[: batch_size + 1],
            query_start_loc_cpu=self._decode_query_start_loc_cpu[: batch_size + 1],
            seq_lens=cad.seq_lens if num_rejected_tokens is None else cad.seq_lens - num_rejected_tokens,
            positions=None,
            is_prefilling=None,
            logits_indices_padded=None,
            num_logits_indices=None,
            max_logits_per_req=None,
        )

    def _advance(self, cad: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """One more row per request. A request at max_model_len stays there: its row is padding and its draft unused."""
        upper = cad.seq_lens_cpu_upper_bound
        return replace(
            cad,
            seq_lens=(cad.seq_lens + 1).clamp(max=self.max_model_len),
            seq_lens_cpu_upper_bound=None if upper is None else (upper + 1).clamp(max=self.max_model_len),
            max_seq_len=min(cad.max_seq_len + 1, self.max_model_len),
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )

    # Drafts.

    def _sample_step(
        self,
        step: int,
        hidden: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        drafts: list[torch.Tensor],
        probs: list[torch.Tensor],
    ) -> None:
        """Appends the step's draft `[batch_size]`, by its own module's head, and its distribution where one is kept."""
        module = self.plan.module_of_step(step)
        greedy = sampling_metadata.all_greedy or not self._enable_probabilistic_draft_probs
        if greedy and self.use_local_argmax_reduction:
            drafts.append(self.top_tokens(hidden, module))
            return
        selects = {"spec_step_idx": module} if self.plan.num_modules > 1 else {}
        logits = self.model.compute_logits(hidden, **selects)
        token_ids, distribution = self._sample_from_logits(logits, sampling_metadata)
        drafts.append(token_ids)
        if distribution is not None:
            probs.append(distribution)

    def top_tokens(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """Greedy tokens `[batch_size]` by the module's head, reduced over tensor-parallel ranks without its logits."""
        return self.model.get_top_tokens(hidden)

    def _collect(
        self, num_wanted: int, batch_size: int, drafts: list[torch.Tensor], probs: list[torch.Tensor]
    ) -> torch.Tensor:
        if num_wanted == 0:
            return torch.empty(batch_size, 0, dtype=torch.int64, device=self.device)
        if probs:
            self._last_draft_probs = torch.stack(probs[:num_wanted], dim=1)
        return torch.stack(drafts[:num_wanted], dim=1)

    # Set-up and warm-up.

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        if not self.descriptor.own_heads:
            super()._maybe_share_lm_head(target_language_model)

    def _get_slot_mapping(self, num_tokens: int, slot_mapping: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Per layer, its own group's buffer. The base class calls this in `dummy_run`, before real slots exist."""
        return self._bound_groups().slot_mapping_by_layer(num_tokens)

    def _bound_groups(self) -> DraftGroups:
        if self.groups is None:
            raise RuntimeError(
                "The draft's KV cache groups are not bound: initialize_attn_backend must be called before a draft."
            )
        return self.groups
