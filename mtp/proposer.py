"""`MultiGroupProposer`: drafts with modules whose layers may lie in several KV cache groups.

Who owns what. The host owns block tables, the target's hidden states and the metadata of its step; nothing of it is
changed here. The proposer owns one slot-mapping buffer per group (`mtp/groups.py`), the history (`mtp/window.py`) and
the input buffers. `initialize_attn_backend` binds the groups, `set_per_group_attn_metadata` hands over their block
tables in every step, `propose` uses both.

What is written when. Every module runs over the same window of rows: the step's valid ones and, before them, those
that the last pass had to compute from drafts. After the pass every row up to the last valid one holds what a run from
scratch over the verified tokens, and this pass's drafts after them, would hold. Steps beyond the chain write past the
last valid row, where the next window writes again.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
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

from mtp.graphs import PassGraphs
from mtp.groups import DraftGroup, DraftGroups, build_draft_groups
from mtp.slots import write_slot_mappings
from mtp.steps import DraftDescriptor, DraftPlan
from mtp.window import History, PassInputs, StepRows, Window, build_window, chunk_ends, for_other_rows
from mtp.window_kernels import shift_rows

logger = init_logger(f"vllm.{__name__}")


class DraftBatch(NamedTuple):
    """The host's view of the requests that are drafted for.

    Attributes:
        num_sampled: `[num_reqs]`, how many tokens of this step `input_batch` counts in already.
    """

    requests: dict[str, CachedRequestState]
    input_batch: InputBatch
    num_sampled: np.ndarray


class Execution(NamedTuple):
    """How a pass of some number of rows is run: the host's graph mode, the padded number, that of other ranks."""

    mode: CUDAGraphMode
    num_input_tokens: int
    num_tokens_across_dp: torch.Tensor | None


class Layers(NamedTuple):
    """What the draft's attention layers need for some rows, by layer name.

    Attributes:
        slot_mapping: views of the groups' buffers.
    """

    attn_metadata: dict[str, object]
    slot_mapping: dict[str, torch.Tensor]


@dataclass(slots=True)
class Drafts:
    """The drafts of one pass, as they are made.

    Attributes:
        num_steps: how many to make.
        sampling_metadata: None: all requests take the likeliest token.
        recorded: into a graph of the whole pass, which has no room for the host's graphs.
        token_ids: `[num_reqs]` int64 each.
        probs: `[num_reqs, vocab_size]` float32 each, where the rejection sampler wants distributions.
    """

    num_steps: int
    sampling_metadata: SamplingMetadata | None
    recorded: bool = False
    token_ids: list[torch.Tensor] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)


class MultiGroupProposer(EagleProposer):
    """A drafter over several KV cache groups with per-step choice of module, groups and head.

    Subclasses name their `descriptor` and add what is truly their own.

    Raises:
        ValueError: at construction, when the model can't make the number of drafts asked for.
    """

    descriptor: ClassVar[DraftDescriptor]

    # The base class's input buffers, which `_add_history` replaces.
    max_num_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    mrope_positions: torch.Tensor
    hidden_states: torch.Tensor
    inputs_embeds: torch.Tensor
    arange: torch.Tensor

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.plan = self.make_plan(vllm_config)
        self.groups: DraftGroups | None = None
        self.history: History | None = None
        self._batch: DraftBatch | None = None
        self._decode_query_start_loc_cpu = torch.arange(self.max_batch_size + 1, dtype=torch.int32)
        self.graphs: PassGraphs | None = None
        self._may_record = False
        self._fixed_forwards = vllm_config.parallel_config.data_parallel_size > 1
        if self.plan.chain_length > 1:
            self._add_history(self.plan.chain_length - 1)

    @classmethod
    def make_plan(cls, vllm_config: VllmConfig) -> DraftPlan:
        """Raises `ValueError` when the model can't make the number of drafts asked for."""
        config = vllm_config.speculative_config
        return DraftPlan.make(
            cls.descriptor,
            config.draft_model_config.hf_config,
            config.num_speculative_tokens,
            vllm_config.model_config.max_model_len,
        )

    def _add_history(self, depth: int) -> None:
        """Room for `depth` more rows per request in every input buffer, and the rows themselves between the passes."""
        rows = self.max_num_tokens + depth * self.max_batch_size
        self.max_num_tokens = self.max_query_tokens = self.max_positions = rows
        self.input_ids = self.input_ids.new_zeros(rows)
        self.hidden_states = self.hidden_states.new_zeros(rows, self.hidden_size)
        self.inputs_embeds = self.inputs_embeds.new_zeros(rows, self.inputs_embeds_size)
        self.arange = torch.arange(rows + 1, dtype=self.arange.dtype, device=self.device)
        rope_dims: tuple[int, ...] = ()
        if self.uses_mrope:
            rope_dims = self.mrope_positions.shape[:1]
            self.mrope_positions = self.mrope_positions.new_zeros(*rope_dims, rows + 1)
        else:
            self.positions = self.positions.new_zeros(rows)
        # Twice the running requests: those that wait to be resumed must not push out one that runs.
        self.history = History(depth, 2 * self.max_batch_size, self.hidden_size, self.dtype, rope_dims, self.device)

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
        self.graphs = None  # they hold the addresses of another KV cache
        # Names under which the host finds them.
        self.draft_attn_groups = [attn for group in self.groups.all for attn in group.attn_groups]
        self.kv_cache_gid = self.groups.primary.kv_cache_group_id
        self.block_size = self.groups.primary.block_size

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode) -> None:
        """The host's graphs know a number of rows and no module: with several modules they would replay the first.

        Whole passes are recorded where the host records whole decode steps.
        """
        self._may_record = (
            cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
            and not self.speculative_config.enforce_eager
            and not self._fixed_forwards
            and not self.uses_mrope
            and not self.supports_mm_inputs
        )
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
        # The host books sampled tokens after the pass.
        self._batch = DraftBatch(requests, gpu_input_batch, np.zeros(gpu_input_batch.num_reqs, dtype=np.int32))
        return super().prepare_next_token_ids_padded(sampled_token_ids, requests, gpu_input_batch, discard_request_mask)

    def prepare_next_token_ids_cpu(
        self,
        sampled_token_ids: list[list[int]],
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        num_scheduled_tokens: dict[str, int],
    ) -> torch.Tensor:
        # Without padding the host books them before it.
        num_sampled = np.array([len(token_ids) for token_ids in sampled_token_ids], dtype=np.int32)
        self._batch = DraftBatch(requests, gpu_input_batch, num_sampled)
        return super().prepare_next_token_ids_cpu(sampled_token_ids, requests, gpu_input_batch, num_scheduled_tokens)

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
        self._last_draft_probs: torch.Tensor | None = None
        cad = common_attn_metadata
        last_rows = cad.query_start_loc[1:] - 1 if token_indices_to_sample is None else token_indices_to_sample
        if target_positions.dim() > 1 and not self.uses_mrope:
            target_positions = target_positions[0]  # the target's rotary positions have more dimensions than ours
        rows = StepRows(target_token_ids, target_positions, target_hidden_states, last_rows)
        batch, self._batch = self._batch, None
        slots = [] if self.history is None else self._assign_history(batch)
        if sampling_metadata.all_greedy or not self._enable_probabilistic_draft_probs:
            sampling_metadata = None
        if self.graphs and sampling_metadata is None and (size := self.graphs.size_for(cad)):
            return self.graphs.replay(size, rows, next_token_ids, slots, cad)[:, :num_speculative_tokens]
        history_slots = None if self.history is None else async_tensor_h2d(np.array(slots), device=self.device)
        chain_length = self.plan.chain_length
        goes_on = None if batch is None else chunk_ends(batch.input_batch, batch.num_sampled, cad, chain_length)
        # Ranks of a data-parallel group meet in every forward, so none may run fewer than the others.
        num_steps = self.plan.num_speculative_tokens if self._fixed_forwards else num_speculative_tokens
        drafts = Drafts(num_steps, sampling_metadata)
        self._run_pass(PassInputs(rows, next_token_ids, history_slots), cad, goes_on, mm_embed_inputs, drafts)
        return self._collect(num_speculative_tokens, cad.batch_size(), drafts)

    def _run_pass(
        self,
        inputs: PassInputs,
        cad: CommonAttentionMetadata,
        goes_on: tuple[np.ndarray, np.ndarray] | None,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
        drafts: Drafts,
    ) -> None:
        """Makes the drafts of a batch, and keeps what the next pass needs.

        Args:
            goes_on: of `chunk_ends`.
        """
        window = build_window(inputs.rows, cad, self.history, inputs.history_slots)
        hidden = self._run_chain(window, inputs.next_token_ids, goes_on, mm_embed_inputs, drafts)
        if self.history is not None and inputs.history_slots is not None:
            self.history.store(inputs.history_slots, window)
        if drafts.num_steps > self.plan.chain_length:
            self._slide(window, cad, hidden, drafts)

    def _run_chain(
        self,
        window: Window,
        next_token_ids: torch.Tensor,
        goes_on: tuple[np.ndarray, np.ndarray] | None,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
        drafts: Drafts,
    ) -> torch.Tensor:
        """Runs every module over the window; module i makes draft i at each request's last valid row.

        All of them run even where fewer drafts are wanted: a row that is left out would be a hole in the cache.

        Returns:
            `[num_reqs, hidden_size]`, module 0's hidden states at the last valid rows.
        """
        modules = range(self.plan.chain_length)
        execution = self._execution(window.num_rows, drafts)
        layers = self._prepare_layers(window.cad, window.req_indices, window.seq_positions, execution, step=0)
        self._get_positions(window.num_rows)[:] = window.positions
        partial = goes_on and tuple(async_tensor_h2d(x, device=self.device) for x in goes_on)
        token_ids, hidden = window.token_ids, window.hidden_states
        for module in modules:
            # Each module reads one token further than the one before it.
            made = [next_token_ids, *drafts.token_ids]
            follows = made[module] if module < len(made) else None
            token_ids = self._shift(token_ids, window, follows)
            if partial is not None:
                reqs, tokens = partial
                token_ids[window.last_rows[reqs]] = tokens[:, module].to(token_ids.dtype)
            self.input_ids[: window.num_rows] = token_ids
            self.hidden_states[: window.num_rows] = hidden
            inputs = self._model_inputs(module, window.num_rows, execution.num_input_tokens, mm_embed_inputs)
            for_head, for_next = self._forward(inputs, layers, window.num_rows, execution)
            if self.descriptor.hidden_states_flow:
                hidden = for_next[: window.num_rows]
            if module == 0:
                first_hidden = for_next[window.last_rows]
            if module < drafts.num_steps:
                self._sample_step(module, for_head[window.last_rows], drafts)
        return first_hidden

    @staticmethod
    def _shift(token_ids: torch.Tensor, window: Window, follows: torch.Tensor | None) -> torch.Tensor:
        """Every row's next token, and `follows` `[num_reqs]` after the last valid one.

        Rows past the last valid one get whatever comes: they are padding. So does the last one itself where no draft
        was made for it to consume: it isn't final, and the next pass writes it again.
        """
        if follows is not None and token_ids.is_cuda:
            return shift_rows(token_ids, window.req_indices, window.last_rows, follows)
        shifted = token_ids.roll(-1)
        if follows is not None:
            shifted[window.last_rows] = follows.to(shifted.dtype)
        return shifted

    def _slide(self, window: Window, target_cad: CommonAttentionMetadata, hidden: torch.Tensor, drafts: Drafts) -> None:
        """The drafts after the chain's: it slides on, one row per request further for each.

        The target has no hidden state for such a row; module 0's at the row before it stands in, since that is what
        the token there was drafted from. With one module this is the ordinary rollout of EAGLE (arXiv 2401.15077).
        The next window begins before those rows and writes them again, so what stands there harms nothing.

        Args:
            hidden: `[num_reqs, hidden_size]`, module 0's at the last valid rows.
        """
        num_reqs, modules = target_cad.batch_size(), range(self.plan.chain_length)
        execution = self._execution(num_reqs, drafts)
        rope_positions = window.positions[..., window.last_rows]
        req_indices = self.arange[:num_reqs]
        for step in range(len(modules), drafts.num_steps):
            ahead = step - modules[-1]
            seq_positions = window.last_positions + ahead
            cad = self._one_row_per_request(target_cad, seq_positions, ahead)
            layers = self._prepare_layers(cad, req_indices, seq_positions, execution, step)
            self._get_positions(num_reqs)[:] = (rope_positions + ahead).clamp(max=self.max_model_len - 1)
            flowing = stand_in = hidden
            for module in modules:
                self.input_ids[:num_reqs] = drafts.token_ids[ahead - 1 + module]
                self.hidden_states[:num_reqs] = flowing
                inputs = self._model_inputs(module, num_reqs, execution.num_input_tokens, None)
                for_head, for_next = self._forward(inputs, layers, num_reqs, execution)
                if module == 0:
                    hidden = for_next[:num_reqs]
                flowing = for_next[:num_reqs] if self.descriptor.hidden_states_flow else stand_in
            self._sample_step(step, for_head[:num_reqs], drafts)

    def _one_row_per_request(
        self, cad: CommonAttentionMetadata, seq_positions: torch.Tensor, ahead: int
    ) -> CommonAttentionMetadata:
        """A request at max_model_len stays there: its row is padding and its draft is not used."""
        batch_size, limit = cad.batch_size(), self.max_model_len
        upper = cad.seq_lens_cpu_upper_bound
        return for_other_rows(
            cad,
            num_actual_tokens=batch_size,
            max_query_len=1,
            query_start_loc=self.arange[: batch_size + 1],
            query_start_loc_cpu=self._decode_query_start_loc_cpu[: batch_size + 1],
            seq_lens=(seq_positions + 1).clamp(max=limit).to(cad.seq_lens.dtype),
            seq_lens_cpu_upper_bound=None if upper is None else (upper + ahead).clamp(max=limit),
            max_seq_len=min(cad.max_seq_len + ahead, limit),
            is_prefilling=None,
        )

    def _execution(self, num_rows: int, drafts: Drafts) -> Execution:
        if drafts.recorded:
            return Execution(CUDAGraphMode.NONE, num_rows, None)
        return Execution(*self._determine_batch_execution_and_padding(num_rows))

    def _forward(
        self, inputs: dict[str, Any], layers: Layers, num_rows: int, execution: Execution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one module; returns the hidden states that its head and that the next step take."""
        if self.eplb_state is not None:
            self.eplb_state.prepare_forward(self.draft_model_config, num_rows)
        with set_forward_context(
            layers.attn_metadata,
            self.vllm_config,
            num_tokens=execution.num_input_tokens,
            num_tokens_across_dp=execution.num_tokens_across_dp,
            cudagraph_runtime_mode=execution.mode,
            slot_mapping=layers.slot_mapping,
        ):
            output = self.model(**inputs)
        return output if self.model_returns_tuple() else (output, output)

    def _prepare_layers(
        self,
        cad: CommonAttentionMetadata,
        req_indices: torch.Tensor,
        seq_positions: torch.Tensor,
        execution: Execution,
        step: int,
    ) -> Layers:
        """Writes the rows' slots in every group that the chain uses, and builds its metadata, once for all modules."""
        groups, modules = self._bound_groups(), range(self.plan.chain_length)
        write_slot_mappings(
            groups.groups_of(modules),
            cad.num_reqs,
            req_indices,
            seq_positions,
            self.max_model_len,
            execution.num_input_tokens,
        )
        per_layer: dict[str, object] = {}
        for group, attn in groups.attn_groups_of(modules):
            metadata = attn.build_metadata_for_drafting(
                cad.replace(
                    block_table_tensor=group.table(cad.num_reqs),
                    slot_mapping=group.slot_mapping[: cad.num_actual_tokens],
                ),
                step,
            )
            if self.allowed_attn_types is not None and not isinstance(metadata, self.allowed_attn_types):
                raise ValueError(
                    f"The draft layers {attn.layer_names} use {type(metadata).__name__}, which this platform can't "
                    f"draft with; it can with {[t.__name__ for t in self.allowed_attn_types]}. Choose another "
                    "backend by attention_backend in the speculative config."
                )
            per_layer.update(dict.fromkeys(attn.layer_names, metadata))
        return Layers(per_layer, groups.slot_mapping_by_layer(execution.num_input_tokens))

    # Inputs.

    def _assign_history(self, batch: DraftBatch | None) -> list[int]:
        assert self.history is not None
        if batch is None:
            raise RuntimeError(
                "propose was called without one of the prepare_next_token_ids methods before it, so the rows belong "
                "to no known request."
            )
        return self.history.assign(batch.input_batch.req_ids, batch.requests)

    def _model_inputs(
        self,
        module: int,
        num_rows: int,
        num_input_tokens: int,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
    ) -> dict[str, Any]:
        """The model's arguments, out of the input buffers.

        Embeddings of images belong to this step's rows, and only a window of one module has just those.
        """
        if self.plan.num_modules > 1:
            mm_embed_inputs = None
        inputs, _ = self.build_model_inputs_first_pass(num_rows, num_input_tokens, mm_embed_inputs)
        return inputs | self._selection(module)

    def _selection(self, module: int) -> dict[str, int]:
        """What names the module to the model; a model of one is not asked."""
        return {"spec_step_idx": module} if self.plan.num_modules > 1 else {}

    # Drafts.

    def _sample_step(self, step: int, hidden: torch.Tensor, drafts: Drafts) -> None:
        """Adds the step's draft, by its own module's head, and its distribution where one is kept."""
        module = self.plan.module_of_step(step)
        if drafts.sampling_metadata is None and self.use_local_argmax_reduction:
            drafts.token_ids.append(self.top_tokens(hidden, module))
            return
        logits = self.model.compute_logits(hidden, **self._selection(module))
        if drafts.sampling_metadata is None:
            drafts.token_ids.append(logits.argmax(dim=-1))
            return
        token_ids, probs = self._sample_from_logits(logits, drafts.sampling_metadata)
        drafts.token_ids.append(token_ids)
        if probs is not None:
            drafts.probs.append(probs)

    def top_tokens(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """Greedy tokens `[batch_size]` by the module's head, reduced over tensor-parallel ranks without its logits."""
        return self.model.get_top_tokens(hidden)

    def _collect(self, num_wanted: int, num_reqs: int, drafts: Drafts) -> torch.Tensor:
        if num_wanted == 0:
            return torch.empty(num_reqs, 0, dtype=torch.int64, device=self.device)
        if drafts.probs:
            self._last_draft_probs = torch.stack(drafts.probs[:num_wanted], dim=1)
        return torch.stack(drafts.token_ids[:num_wanted], dim=1)

    # Set-up and warm-up.

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Runs as many forwards as a pass of the configured length, so that data-parallel ranks agree on collectives.

        The host calls it to profile, to warm up, to capture, and on a rank that has nothing to draft.
        """
        if is_graph_capturing:
            self._record_pass(num_tokens)
        chain = list(range(self.plan.chain_length))
        beyond = chain * (self.plan.num_speculative_tokens - len(chain))
        for modules in (chain[:1],) if is_graph_capturing else (chain, beyond):
            if not modules:
                continue
            mode, num_input_tokens, across_dp = self._determine_batch_execution_and_padding(num_tokens, use_cudagraphs)
            bound = slot_mappings and self.groups is not None
            slots = self._bound_groups().slot_mapping_by_layer(num_input_tokens) if bound else slot_mappings or {}
            for module in modules:
                with set_forward_context(
                    None,
                    self.vllm_config,
                    num_tokens=num_input_tokens,
                    num_tokens_across_dp=across_dp,
                    cudagraph_runtime_mode=mode,
                    slot_mapping=slots,
                ):
                    self.model(**self._model_inputs(module, num_tokens, num_input_tokens, None))

    def _record_pass(self, num_tokens: int) -> None:
        """Records the pass of a decode step of so many rows, while the host records the step itself.

        Only a host that records whole decode steps hands over their block tables meanwhile.
        """
        query_len = 1 + self.plan.num_speculative_tokens
        num_reqs, remainder = divmod(num_tokens, query_len)
        if remainder or num_reqs > self.max_batch_size or not self._may_record or self.groups is None:
            return
        groups = self.groups.groups_of(range(self.plan.chain_length))
        if any(group.block_table is None for group in groups) or not self.groups.recordable:
            return
        if self.graphs is None:
            self.graphs = self._make_graphs(groups)
        if num_reqs not in self.graphs:
            self.graphs.capture(num_reqs)

    def _make_graphs(self, groups: list[DraftGroup]) -> PassGraphs:
        """Room for recorded passes; the groups' tables must be bound, since theirs are as wide."""
        return PassGraphs(
            self._run_recorded,
            groups,
            1 + self.plan.num_speculative_tokens,
            self.max_batch_size,
            self.max_model_len,
            0 if self.history is None else self.history.padding_slot,
            self.hidden_size,
            self.dtype,
            self.device,
        )

    def _run_recorded(self, inputs: PassInputs, cad: CommonAttentionMetadata) -> torch.Tensor:
        drafts = Drafts(self.plan.num_speculative_tokens, sampling_metadata=None, recorded=True)
        self._run_pass(inputs, cad, None, None, drafts)
        return torch.stack(drafts.token_ids, dim=1)

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        if not self.descriptor.own_heads:
            super()._maybe_share_lm_head(target_language_model)

    def _bound_groups(self) -> DraftGroups:
        if self.groups is None:
            raise RuntimeError(
                "The draft's KV cache groups are not bound: initialize_attn_backend must be called before a draft."
            )
        return self.groups
