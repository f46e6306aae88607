"""`DraftPasses`: a drafting pass over several KV cache groups, whichever model runner asks for it.

What is written when. Every module writes keys and values of the same window of rows: the step's valid ones and, before
them, those that the last pass had to compute from drafts. After the pass every row up to the last valid one holds what
a run from scratch over the verified tokens, and this pass's drafts after them, would hold, but for rows of prompts that
no draft depends on. Steps beyond the chain write past the last valid row, where the next window writes again.

A draft may be limited to shorter sequences than its target. Rows past its limit are padding, and the drafts made from
them are anything; the rest of the batch doesn't notice.

Who owns what. An adapter of a runner translates the runner's step to `PassInputs` and attention metadata, feeds the
model and samples. The window, the order of modules, the slots and metadata of each group, and the capture of whole
passes are here.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from mtp.attention import can_capture_prompts, leave_sequences_whole, with_lengths_on_host
from mtp.base import GroupProposer
from mtp.chain import CompiledChain
from mtp.graphs import PassGraphs, PassShape, uneven_shapes
from mtp.groups import KVGroups
from mtp.kernels.window import shift_rows
from mtp.plan import DraftDescriptor, DraftPlan
from mtp.rows import Layers, PassInputs
from mtp.slots import write_slot_mappings
from mtp.window import History, Window, build_window, for_other_rows, prompt_reach, step_as_window

logger = init_logger(f"vllm.{__name__}")


class Execution(NamedTuple):
    """How a pass of some number of rows is run: the host's graph mode, the padded number, that of other ranks."""

    mode: CUDAGraphMode
    num_input_tokens: int
    num_tokens_across_dp: torch.Tensor | None


@dataclass(slots=True)
class Drafts:
    """The drafts of one pass, as they are made.

    Attributes:
        num_steps: how many to make.
        captured: into a graph of the whole pass, which has no room for the host's graphs.
        token_ids: `[num_reqs]` int64 each.
    """

    num_steps: int
    captured: bool = False
    token_ids: list[torch.Tensor] = field(default_factory=list)


class DraftPasses(GroupProposer, ABC):
    """The drafter's part of a proposer, for an adapter of a runner to inherit beside the runner's own base class.

    Attributes:
        descriptor: of the architecture that drafts.
        takes_wanted: the model has an argument `wanted`: the rows to compute to the end. The others end in the cache.
        history: None for a single module, which has nothing to repair.
        chain: None where it isn't compiled.
        graphs: None as long as no pass was captured.
        max_captured_rows: of passes with a prompt; larger ones are run eagerly. 0: all are.
        draft_max_model_len: the position of the first row that is not the draft's to write; at most `max_model_len`.
        prompt_reach: how many of a prompt's last rows drafts depend on; None: all.
    """

    tables_stay: ClassVar[bool] = False
    """The host fills its block tables in place (`PassGraphs`)."""

    descriptor: DraftDescriptor
    plan: DraftPlan
    takes_wanted: bool
    history: History | None
    chain: CompiledChain | None
    graphs: PassGraphs | None
    max_captured_rows: int
    draft_max_model_len: int
    prompt_reach: int | None

    # The runner's base class has these.
    vllm_config: VllmConfig
    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    max_model_len: int
    model: Any

    def init_passes(self, descriptor: DraftDescriptor, vllm_config: VllmConfig, max_num_reqs: int) -> None:
        """To be called by the adapter's constructor, after that of the runner's base class.

        Raises:
            ValueError: the model can't make the number of drafts asked for.
        """
        self.descriptor, self.plan = descriptor, DraftPlan.of(descriptor, vllm_config)
        self.takes_wanted = False
        self.groups = self.history = self.chain = self.graphs = self.prompt_reach = None
        self.max_captured_rows = 0
        self._max_num_reqs = max_num_reqs
        self._one_row_starts_cpu = torch.arange(max_num_reqs + 2, dtype=torch.int32)  # with one that is padding
        limit = vllm_config.speculative_config.draft_model_config.max_model_len
        self.draft_max_model_len = min(limit or self.max_model_len, self.max_model_len)
        self._one_row_starts = self._one_row_starts_cpu.to(self.device)
        shape = max(max_num_reqs, 2), self.plan.chain_length
        self._none_known = torch.full(shape, -1, dtype=torch.int64, device=self.device)

    # What an adapter has to know.

    @abstractmethod
    def _plan_execution(self, num_rows: int) -> Execution:
        """How the host would run so many rows outside of a captured pass."""

    @abstractmethod
    def _model_inputs(
        self,
        module: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        num_input_tokens: int,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
    ) -> dict[str, Any]:
        """The model's arguments for rows of one module; positions are the same for all modules of a chain."""

    @abstractmethod
    def _idle_inputs(self, module: int, num_rows: int, num_input_tokens: int) -> dict[str, Any]:
        """The model's arguments for rows of nobody."""

    @abstractmethod
    def _sample_step(self, step: int, hidden: torch.Tensor, window: Window, drafts: Drafts) -> None:
        """Adds the step's draft, by the head of `plan.module_of_step(step)`.

        Args:
            hidden: `[num_reqs, hidden_size]`.
        """

    def _step_slots(self, cad: CommonAttentionMetadata) -> torch.Tensor | None:
        """The host's slots `[num_tokens]` of the step's rows, where they are those of all the draft's layers."""
        return None

    def _prepare_eplb(self, num_rows: int) -> None:
        """Called before each forward."""

    def _check_metadata(self, layer_names: list[str], metadata: object) -> None:
        """Raises `ValueError` for metadata that the platform can't draft with."""

    @abstractmethod
    def top_tokens(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """Greedy tokens `[num_reqs]` by the module's head, reduced over tensor-parallel ranks without its logits."""

    # Warm-up.

    def warm_up(self, num_rows: int) -> None:
        self._run_idle(range(self.plan.chain_length), num_rows, self._plan_execution(num_rows))

    def _run_idle(
        self,
        modules: Iterable[int],
        num_rows: int,
        execution: Execution,
        slot_mapping: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Runs these modules over rows of nobody."""
        for module in modules:
            with self._forward_context(Layers({}, slot_mapping or {}), execution):
                self.model(**self._idle_inputs(module, num_rows, execution.num_input_tokens))

    # Rows of prompts that are left out.

    def bind_groups(self, groups: KVGroups) -> None:
        super().bind_groups(groups)
        self.prompt_reach = self._find_prompt_reach(groups)
        if self.prompt_reach is not None:
            logger.info_once("Modules run over no more than the last %d rows of a prompt.", self.prompt_reach)

    def _find_prompt_reach(self, groups: KVGroups) -> int | None:
        """All rows count where others than this engine's passes may read them, and where ranks meet in each pass."""
        config = self.vllm_config
        has_readers = config.cache_config.enable_prefix_caching or config.kv_transfer_config is not None
        if self.history is None or has_readers or config.parallel_config.data_parallel_size > 1:
            return None
        layers = config.compilation_config.static_forward_context
        windows = [
            [getattr(layers[name], "sliding_window", None) for name in names]
            for names in groups.layers_by_module[: self.plan.chain_length]
        ]
        return prompt_reach(windows, self.descriptor.hidden_states_flow, self.history.depth)

    def unread_rows(
        self, query_lens: np.ndarray, upper: np.ndarray | None, num_tokens: npt.NDArray[np.int32]
    ) -> np.ndarray | None:
        """How many of each request's first rows in this step no draft will depend on; None: none of any request.

        Args:
            query_lens: `[num_reqs]` integer.
            upper: `[num_reqs]` integer or more, bounds of the sequence lengths, exact where requests prefill.
            num_tokens: `[num_reqs]`, how many tokens are known of each request before this step samples.
        """
        longest_decode = 1 + self.plan.num_speculative_tokens  # of which the host knows bounds alone
        if self.prompt_reach is None or upper is None or query_lens.max() <= longest_decode:
            return None
        first_positions = upper[: len(query_lens)] - query_lens
        unread = np.clip(num_tokens - self.prompt_reach - first_positions, 0, query_lens)
        unread[query_lens <= longest_decode] = 0
        return unread if unread.any() else None

    # A drafting pass.

    def _run_pass(
        self,
        inputs: PassInputs,
        cad: CommonAttentionMetadata,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
        drafts: Drafts,
    ) -> None:
        """Makes the drafts of a batch, and keeps what the next pass needs.

        Args:
            cad: of the target's step, for any KV cache group; not changed.
        """
        window = self._window(inputs, cad, drafts)
        if self.history is not None:
            assert inputs.history_slots is not None
            self.history.store(inputs.history_slots, window)
        unread = inputs.num_unread
        if unread is not None and np.array_equal(unread, np.diff(cad.query_start_loc_cpu.numpy())):
            # Every chunk ends before its prompt, so nobody asks what was drafted there either.
            drafts.token_ids += [torch.zeros_like(window.last_rows)] * drafts.num_steps
            return
        if self._is_limited:
            window = replace(window, positions=self._in_rotary_table(window.positions))
        hidden = self._run_chain(window, inputs, mm_embed_inputs, drafts)
        if hidden is not None:
            self._slide(window, cad, hidden, drafts)

    def _window(self, inputs: PassInputs, cad: CommonAttentionMetadata, drafts: Drafts) -> Window:
        as_it_is = self.history is None and not drafts.captured and not self._is_limited
        slot_mapping = self._step_slots(cad) if as_it_is else None
        if slot_mapping is not None:
            return step_as_window(inputs.rows, cad, slot_mapping, drafts.num_steps > self.plan.chain_length)
        return build_window(inputs.rows, cad, self.history, inputs.history_slots, drafts.captured, inputs.num_unread)

    def _run_chain(
        self,
        window: Window,
        inputs: PassInputs,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
        drafts: Drafts,
    ) -> torch.Tensor | None:
        """Runs every module over the window; module i makes draft i at each request's last valid row.

        All of them run even where fewer drafts are wanted: a row that is left out would be a hole in the cache.

        Returns:
            `[num_reqs, hidden_size]`, module 0's hidden states at the last valid rows, where there are drafts to make
            after the chain's; else None.
        """
        execution = self._execution(window.num_rows, drafts)
        layers = self._window_layers(window, inputs, execution, drafts)
        if self.chain is not None and self._can_be_compiled(drafts, execution, window.num_rows):
            return self._run_compiled(self.chain, window, inputs, layers, execution, drafts)
        token_ids, hidden = window.token_ids, window.hidden_states
        first_hidden = None
        for module in range(self.plan.chain_length):
            # Each module reads one token further than the one before it. Where no draft was made for the last row to
            # consume, any token does: the row isn't final, and the next pass writes it again.
            made = [inputs.next_token_ids, *drafts.token_ids]
            follows = made[module] if module < len(made) else inputs.next_token_ids
            if inputs.prompt_token_ids is not None:
                known = inputs.prompt_token_ids[:, module]
                follows = torch.where(known >= 0, known, follows.to(known.dtype))
            token_ids = shift_rows(token_ids, window.req_indices, window.last_rows, follows)
            arguments = self._model_inputs(
                module, token_ids, window.positions, hidden, execution.num_input_tokens, mm_embed_inputs
            )
            feeds_next = self.descriptor.hidden_states_flow and module + 1 < self.plan.chain_length
            wanted = None if feeds_next else window.last_rows
            for_head, for_next = self._forward(arguments, layers, window.num_rows, execution, wanted)
            if feeds_next:
                hidden = for_next[: window.num_rows]
            if module == 0 and drafts.num_steps > self.plan.chain_length:
                first_hidden = for_next if wanted is not None else for_next[window.last_rows]
            if module < drafts.num_steps:
                at_last = for_head if wanted is not None else for_head[window.last_rows]
                self._sample(module, at_last, window.last_positions, window, drafts)
        return first_hidden

    def _window_layers(self, window: Window, inputs: PassInputs, execution: Execution, drafts: Drafts) -> Layers:
        is_step = window.slot_mapping is not None and execution.num_input_tokens == window.num_rows
        if is_step and inputs.layers is not None:
            return inputs.layers
        self._write_slots(window, execution.num_input_tokens)
        return self._prepare_layers(
            window.cad,
            execution,
            step=0,
            fills_device=drafts.captured and window.cad.max_query_len > 1 + self.plan.num_speculative_tokens,
        )

    # The chain, compiled.

    def _can_be_compiled(self, drafts: Drafts, execution: Execution, num_rows: int) -> bool:
        """Whether these drafts are what `CompiledChain` makes of a window without padding."""
        return not self._is_limited and execution.num_input_tokens == num_rows

    def _run_compiled(
        self,
        chain: CompiledChain,
        window: Window,
        inputs: PassInputs,
        layers: Layers,
        execution: Execution,
        drafts: Drafts,
    ) -> torch.Tensor | None:
        """What `_run_chain` does, in one call."""
        next_token_ids, known = inputs.next_token_ids.long(), inputs.prompt_token_ids
        if known is None:
            known = self._none_known[: len(next_token_ids)]
        with self._forward_context(layers, execution):
            first_hidden, *made = chain(
                window.token_ids.long(),
                window.positions,
                window.hidden_states,
                window.last_rows,
                next_token_ids,
                known.long(),
            )
        drafts.token_ids += made[: drafts.num_steps]
        return first_hidden if drafts.num_steps > len(made) else None

    def _warm_up_chain(self, chain: CompiledChain, num_rows: int, execution: Execution) -> None:
        """Compiles it, if it wasn't yet, and runs it over rows of nobody."""
        rows = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        # Of several requests, since a compiler takes one for a number that it knows.
        requests = torch.zeros(2, dtype=torch.int64, device=self.device)
        hidden = torch.zeros(num_rows, self.hidden_size, dtype=self.dtype, device=self.device)
        with self._forward_context(Layers({}, {}), execution):
            chain(rows, rows.clone(), hidden, requests, requests.clone(), self._none_known[:2])

    def _forward_context(self, layers: Layers, execution: Execution) -> AbstractContextManager[Any]:
        """Of a forward over these layers; without metadata it attends to nothing."""
        context: AbstractContextManager[Any] = set_forward_context(
            layers.attn_metadata or None,
            self.vllm_config,
            num_tokens=execution.num_input_tokens,
            num_tokens_across_dp=execution.num_tokens_across_dp,
            cudagraph_runtime_mode=execution.mode,
            slot_mapping=layers.slot_mapping,
        )
        return context

    def _slide(self, window: Window, target_cad: CommonAttentionMetadata, hidden: torch.Tensor, drafts: Drafts) -> None:
        """The drafts after the chain's: it slides on, one row per request further for each.

        The target has no hidden state for such a row; module 0's at the row before it stands in, since that is what
        the token there was drafted from. With one module this is the ordinary rollout of EAGLE (arXiv 2401.15077).
        The next window begins before those rows and writes them again, so what stands there harms nothing.

        Args:
            hidden: `[num_reqs, hidden_size]`, module 0's at the last valid rows.
        """
        num_reqs, modules = target_cad.batch_size(), range(self.plan.chain_length)
        assert window.last_positions is not None
        execution = self._execution(num_reqs, drafts)
        rope_positions = window.positions[..., window.last_rows]
        req_indices = self._one_row_starts[:num_reqs]
        for step in range(len(modules), drafts.num_steps):
            ahead = step - modules[-1]
            seq_positions = window.last_positions + ahead
            cad = self._one_row_per_request(target_cad, seq_positions, ahead)
            self._make_slots(num_reqs, req_indices, seq_positions, execution.num_input_tokens)
            layers = self._prepare_layers(cad, execution, step)
            positions = self._in_rotary_table(rope_positions + ahead)
            flowing = stand_in = hidden
            for module in modules:
                token_ids = drafts.token_ids[ahead - 1 + module]
                inputs = self._model_inputs(module, token_ids, positions, flowing, execution.num_input_tokens, None)
                for_head, for_next = self._forward(inputs, layers, num_reqs, execution)
                if module == 0:
                    hidden = for_next[:num_reqs]
                flowing = for_next[:num_reqs] if self.descriptor.hidden_states_flow else stand_in
            self._sample(step, for_head[:num_reqs], seq_positions, window, drafts)

    @property
    def _is_limited(self) -> bool:
        return self.draft_max_model_len < self.max_model_len

    def _in_rotary_table(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotary positions of rows, of which those of padding may lie past the end of the model's table."""
        return positions.clamp(max=self.draft_max_model_len - 1)

    def _sample(
        self, step: int, hidden: torch.Tensor, seq_positions: torch.Tensor | None, window: Window, drafts: Drafts
    ) -> None:
        """Adds the step's draft. From a row past the draft's limit it is what the head makes of nothing: such a row
        attends to rows that nobody wrote.

        Args:
            hidden: `[num_reqs, hidden_size]`.
            seq_positions: `[num_reqs]`, of these rows.
        """
        if self._is_limited:
            assert seq_positions is not None
            hidden = hidden.masked_fill((seq_positions >= self.draft_max_model_len)[:, None], 0)
        self._sample_step(step, hidden, window, drafts)

    def _one_row_per_request(
        self, cad: CommonAttentionMetadata, seq_positions: torch.Tensor, ahead: int
    ) -> CommonAttentionMetadata:
        """A request at max_model_len stays there: its row is padding and its draft is not used. So is one that pads a
        captured batch, which ends before position 0.
        """
        num_reqs, limit = cad.batch_size(), self.max_model_len
        upper = cad.seq_lens_cpu_upper_bound
        return for_other_rows(
            cad,
            num_actual_tokens=num_reqs,
            max_query_len=1,
            query_start_loc=self._one_row_starts[: num_reqs + 1],
            query_start_loc_cpu=self._one_row_starts_cpu[: num_reqs + 1],
            seq_lens=(seq_positions + 1).clamp(1, limit).to(cad.seq_lens.dtype),
            seq_lens_cpu_upper_bound=None if upper is None else (upper + ahead).clamp(max=limit),
            max_seq_len=min(cad.max_seq_len + ahead, limit),
            is_prefilling=None,
        )

    def _execution(self, num_rows: int, drafts: Drafts) -> Execution:
        if drafts.captured:
            return Execution(CUDAGraphMode.NONE, num_rows, None)
        return self._plan_execution(num_rows)

    def _forward(
        self,
        inputs: dict[str, Any],
        layers: Layers,
        num_rows: int,
        execution: Execution,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one module; returns the hidden states that its head and that the next step take.

        Args:
            wanted: `[num_wanted]` int64, the rows of `inputs` to return; None: all, and padding after them.
        """
        # A graph of the host's is captured for all rows, whatever is wanted of them later.
        ends_early = wanted is not None and self.takes_wanted and execution.mode == CUDAGraphMode.NONE
        if ends_early:
            inputs = inputs | {"wanted": wanted}
        self._prepare_eplb(num_rows)
        with self._forward_context(layers, execution):
            output = self.model(**inputs)
        if wanted is not None and not ends_early:
            output = tuple(x[wanted] for x in output) if isinstance(output, tuple) else output[wanted]
        return output if isinstance(output, tuple) else (output, output)

    def _write_slots(self, window: Window, num_input_tokens: int) -> None:
        """Writes the slots of a window's rows in every group that the chain uses."""
        if window.slot_mapping is not None:
            self.bound_groups.primary.take_slots(window.slot_mapping, num_input_tokens)
            return
        assert window.req_indices is not None
        assert window.seq_positions is not None
        self._make_slots(window.cad.num_reqs, window.req_indices, window.seq_positions, num_input_tokens)

    def _make_slots(
        self, num_reqs: int, req_indices: torch.Tensor, seq_positions: torch.Tensor, num_input_tokens: int
    ) -> None:
        groups = self.bound_groups.groups_of(range(self.plan.chain_length))
        limit = self.draft_max_model_len
        write_slot_mappings(groups, num_reqs, req_indices, seq_positions, limit, num_input_tokens)

    def _prepare_layers(
        self, cad: CommonAttentionMetadata, execution: Execution, step: int, fills_device: bool = False
    ) -> Layers:
        """Builds the metadata of every group that the chain uses, once for all modules; their slots are written."""
        groups, modules = self.bound_groups, range(self.plan.chain_length)
        per_layer: dict[str, object] = {}
        for group, attn in groups.attn_groups_of(modules):
            metadata = attn.build_metadata_for_drafting(
                with_lengths_on_host(attn, cad).replace(
                    block_table_tensor=group.table(cad.num_reqs),
                    slot_mapping=group.slot_mapping[: cad.num_actual_tokens],
                ),
                step,
            )
            leave_sequences_whole(metadata, self._windows_of(attn), attn.kv_cache_spec, cad.num_reqs, fills_device)
            self._check_metadata(attn.layer_names, metadata)
            per_layer.update(dict.fromkeys(attn.layer_names, metadata))
        return Layers(per_layer, groups.slot_mapping_by_layer(execution.num_input_tokens))

    def _windows_of(self, attn: AttentionGroup) -> list[int | None]:
        """Of its layers. Where all layers are in one KV cache group its spec has the window of some."""
        layers = self.vllm_config.compilation_config.static_forward_context
        return [getattr(layers[name], "sliding_window", None) for name in attn.layer_names]

    def _selection(self, module: int) -> dict[str, int]:
        """What names the module to the model; a model of one is not asked."""
        return {"spec_step_idx": module} if self.plan.num_modules > 1 else {}

    # Captured passes.

    def _captures(self, cudagraph_mode: CUDAGraphMode) -> bool:
        """Whole passes are captured where the host captures whole decode steps."""
        config = self.vllm_config.speculative_config
        return cudagraph_mode.decode_mode() == CUDAGraphMode.FULL and not config.enforce_eager

    def make_graphs(self) -> PassGraphs:
        """Room for captured passes. The groups' block tables must be bound, since the graphs' are as wide."""
        return PassGraphs(
            self.vllm_config,
            self._run_captured,
            self.bound_groups.groups_of(range(self.plan.chain_length)),
            1 + self.plan.num_speculative_tokens,
            self.plan.chain_length,
            0 if self.history is None else self.history.depth,
            self._max_num_reqs,
            self.max_captured_rows,
            self.max_model_len,
            0 if self.history is None else self.history.padding_slot,
            self.hidden_size,
            self.dtype,
            self.device,
            self.tables_stay,
        )

    def fewer_drafts(self) -> list[int]:
        """The numbers of drafts below the configured one that a step may ask for: a pass then leaves heads out."""
        config = self.vllm_config.speculative_config
        assert config is not None
        table = config.num_speculative_tokens_per_batch_size or []
        return sorted({num_drafts for *_, num_drafts in table} - {self.plan.num_speculative_tokens})

    def uneven_shapes(self) -> list[PassShape]:
        """What passes of steps that carry a prompt are captured for, the smallest first."""
        max_num_rows = self.max_captured_rows if can_capture_prompts(self.bound_groups) else 0
        return uneven_shapes(self._max_num_reqs, max_num_rows, self.max_model_len)

    def capture_uneven(self) -> None:
        """Captures passes of steps that carry a prompt, as many of them as were asked for."""
        assert self.graphs is not None
        shapes = self.uneven_shapes()
        if not shapes:
            return
        before, started = torch.cuda.mem_get_info()[0], time.monotonic()
        for shape in reversed(shapes):  # the largest first: the others find room in what it leaves
            self.graphs.capture(shape)
        logger.info(
            "Captured %d draft passes of steps that carry a prompt, of up to %d rows, in %.1f s and %.0f MiB.",
            len(shapes),
            shapes[-1].num_rows,
            time.monotonic() - started,
            (before - torch.cuda.mem_get_info()[0]) / 2**20,
        )

    def release_captured(self) -> None:
        self.graphs = None

    def _run_captured(
        self, inputs: PassInputs, cad: CommonAttentionMetadata, num_drafts: int | None = None
    ) -> torch.Tensor:
        """`[num_reqs, configured number]` int64; drafts past `num_drafts` are 0."""
        configured = self.plan.num_speculative_tokens
        drafts = self._new_drafts(configured if num_drafts is None else num_drafts, captured=True)
        self._run_pass(inputs, cad, None, drafts)
        found = drafts.token_ids
        if missing := configured - len(found):
            found += [torch.zeros(cad.num_reqs, dtype=torch.int64, device=self.device)] * missing
        return torch.stack(found, dim=1)

    def _new_drafts(self, num_steps: int, captured: bool = False) -> Drafts:
        return Drafts(num_steps, captured)
