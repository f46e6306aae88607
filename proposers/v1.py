"""`MultiGroupProposer`: drafting passes on vLLM's V1 model runner.

Who owns what. The host owns block tables, the target's hidden states and the metadata of its step; nothing of it is
changed here. The proposer owns one slot-mapping buffer per group (`mtp/groups.py`), the history (`mtp/window.py`) and
the input buffers. `initialize_attn_backend` binds the groups, `set_per_group_attn_metadata` hands over their block
tables in every step, `propose` uses both. What a pass does is in `mtp/passes.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config, replace
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from mtp.attention import can_be_captured
from mtp.chain import compile_chain
from mtp.groups import bind_kv_groups, layers_by_module, make_attn_groups
from mtp.passes import Drafts, Execution
from mtp.rows import Layers, PassInputs, StepRows
from mtp.window import History, Window
from proposers.architecture import Architecture
from proposers.drafter import ArchitecturePasses
from proposers.options import Options

logger = init_logger(f"vllm.{__name__}")


class DraftBatch(NamedTuple):
    """The host's view of the requests that are drafted for.

    Attributes:
        num_tokens: `[num_reqs]`, how many tokens were known before this step sampled: of a prompt, all of it.
        has_chunk_ends: a chunk may end before its prompt.
    """

    requests: dict[str, CachedRequestState]
    input_batch: InputBatch
    num_tokens: npt.NDArray[np.int32]
    has_chunk_ends: bool = True


@dataclass(slots=True)
class SampledDrafts(Drafts):
    """Drafts of which some may be drawn from a distribution.

    Attributes:
        sampling_metadata: None: all requests take the likeliest token.
        generators: of requests with a seed of their own, whose drafts must not depend on what runs beside them.
        probs: `[num_reqs, vocab_size]` float32 each, where the rejection sampler wants distributions.
    """

    sampling_metadata: SamplingMetadata | None = None
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    probs: list[torch.Tensor] = field(default_factory=list)


class MultiGroupProposer(ArchitecturePasses, EagleProposer):
    """A drafter over several KV cache groups with per-step choice of module, groups and head.

    Raises:
        ValueError: at construction, when the model can't make the number of drafts asked for.
    """

    # The base class's input buffers, which `_add_history` replaces.
    max_num_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    mrope_positions: torch.Tensor
    hidden_states: torch.Tensor
    inputs_embeds: torch.Tensor
    arange: torch.Tensor

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        runner: Any = None,
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.init_architecture(architecture, vllm_config, self.max_batch_size)
        self._batch: DraftBatch | None = None
        self._step_metadata: dict[str, object] | None = None
        self._may_capture = False
        # On a CPU no graph reads the buffers. A compiled model knows how M-RoPE's positions lie there.
        self._takes_rows = device.type == "cpu" and not self.uses_mrope and not self.supports_mm_inputs
        self._none_rejected = torch.zeros(self.max_batch_size, dtype=torch.int32, device=device)
        self._fixed_forwards = vllm_config.parallel_config.data_parallel_size > 1
        if self.plan.chain_length > 1:
            self._add_history(self.plan.chain_length - 1)
        self.max_captured_rows = min(Options.of(vllm_config).captured_rows, self.max_num_tokens)

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
            ValueError: a layer has no group, or the layers don't divide into the modules (`mtp.groups`).
        """
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        draft_layers = {name: layers[name] for name in self._draft_attn_layer_names}
        groups = bind_kv_groups(
            kv_cache_config,
            make_attn_groups(self.vllm_config, kv_cache_config, kernel_block_sizes, draft_layers, self.device),
            self.max_num_tokens,
            self.device,
            modules=layers_by_module(draft_layers, self.plan.num_modules),
        )
        self.bind_groups(groups)
        # Names under which the host finds them.
        self.draft_attn_groups = [attn for group in groups.all for attn in group.attn_groups]
        self.kv_cache_gid = groups.primary.kv_cache_group_id
        self.block_size = groups.primary.block_size

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode) -> None:
        """The host's graphs know a number of rows and no module: with several modules they would replay the first.

        Whole passes are captured where the host captures whole decode steps.
        """
        self._may_capture = (
            self._captures(cudagraph_mode)
            and not self._fixed_forwards
            and not self.uses_mrope
            and not self.supports_mm_inputs
        )
        super().initialize_cudagraph_keys(cudagraph_mode if self.plan.num_modules == 1 else CUDAGraphMode.NONE)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The host books sampled tokens after the pass.
        num_tokens = gpu_input_batch.num_tokens_no_spec[: gpu_input_batch.num_reqs]
        if self.device.type != "cpu":
            self._batch = DraftBatch(requests, gpu_input_batch, num_tokens)
            return super().prepare_next_token_ids_padded(
                sampled_token_ids, requests, gpu_input_batch, discard_request_mask
            )
        are_discarded = discard_request_mask[: len(num_tokens)].tolist()
        self._batch = DraftBatch(requests, gpu_input_batch, num_tokens, any(are_discarded))
        return take_sampled(sampled_token_ids.tolist(), are_discarded, gpu_input_batch.vocab_size)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, torch.Tensor | None, torch.Tensor | None]:
        if self.device.type != "cpu":
            return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count)
        # Without graphs nothing of the metadata is padding, and where nobody had drafts, nothing was rejected.
        if spec_decode_metadata.max_spec_len == 0:
            return common_attn_metadata, None, None
        sampled = zip(spec_decode_metadata.num_draft_tokens, valid_sampled_tokens_count.tolist(), strict=True)
        num_rejected = [num_drafts + 1 - count if num_drafts else 0 for num_drafts, count in sampled]
        ends = common_attn_metadata.query_start_loc.tolist()[1:]
        last_rows = [end - 1 - count for end, count in zip(ends, num_rejected, strict=True)]
        return common_attn_metadata, int32(last_rows), int32(num_rejected)

    def prepare_next_token_ids_cpu(
        self,
        sampled_token_ids: list[list[int]],
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        num_scheduled_tokens: dict[str, int],
    ) -> torch.Tensor:
        # Without padding the host books them before it, and leaves the rejected rows out.
        num_sampled = np.array([len(token_ids) for token_ids in sampled_token_ids], dtype=np.int32)
        num_tokens = gpu_input_batch.num_tokens_no_spec[: len(num_sampled)] - num_sampled
        self._batch, self._step_metadata = DraftBatch(requests, gpu_input_batch, num_tokens), None
        return super().prepare_next_token_ids_cpu(sampled_token_ids, requests, gpu_input_batch, num_scheduled_tokens)

    def take_step_metadata(self, attn_metadata: dict[str, object] | list[dict[str, object]]) -> None:
        """Takes the attention metadata that the host has built of its step for all layers, the draft's among them.

        On a CPU the pass of one module, whose rows are the step's, has no other. Elsewhere a backend may build it
        otherwise for drafts, and a graph of the step's pads it.
        """
        on_cpu = self.device.type == "cpu"
        self._step_metadata = attn_metadata if on_cpu and isinstance(attn_metadata, dict) else None

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
            token_indices_to_sample: `[batch_size]` integer, the last valid row of each request; None: to be worked out.
            common_attn_metadata: of the target's step, for the primary group; not changed.
            num_rejected_tokens_gpu: `[batch_size]`, how many of each request's last rows were rejected; None: none.

        Returns:
            `[batch_size, num_speculative_tokens]` int64 token ids.

        Raises:
            RuntimeError: the groups or their block tables were not handed over.
        """
        logger.info_once("First draft by %s.%s", type(self).__module__, type(self).__name__)
        self._last_draft_probs: torch.Tensor | None = None
        cad = common_attn_metadata
        num_rejected = num_rejected_tokens_gpu
        if num_rejected is None:
            num_rejected = self._none_rejected[: cad.num_reqs]
        if target_positions.dim() > 1 and not self.uses_mrope:
            target_positions = target_positions[0]  # the target's rotary positions have more dimensions than ours
        rows = StepRows(
            target_token_ids,
            target_positions,
            target_hidden_states,
            num_rejected,
            cad.query_start_loc,
            token_indices_to_sample,
        )
        batch, self._batch = self._batch, None
        history_slots = None if self.history is None else self._assign_history(batch)
        if sampling_metadata.all_greedy or not self._enable_probabilistic_draft_probs:
            sampling_metadata = None
        prompt = unread = None
        if batch is not None and batch.has_chunk_ends:
            prompt = chunk_ends(batch.input_batch, batch.num_tokens, cad, self.plan.chain_length)
        prompt_token_ids = None if prompt is None else async_tensor_h2d(prompt, device=self.device)
        graphs = self.graphs if sampling_metadata is None else None
        leaves_rows_out = batch is not None and self.prompt_reach is not None
        lens = lens_on_host(cad) if graphs or leaves_rows_out else None
        if lens and batch is not None:
            unread = self.unread_rows(*lens, batch.num_tokens)
        layers = self._layers_of_step(slot_mappings)
        inputs = PassInputs(rows, next_token_ids, history_slots, prompt_token_ids, unread, layers)
        if graphs and lens and (replay := graphs.plan(*lens, prompt is not None, num_unread=unread)):
            num_rows = int(cad.num_actual_tokens)  # NumPy's without padding, which Triton refuses
            made = graphs.replay(replay, inputs, num_rows, cad.seq_lens[: cad.num_reqs])
            return made[:, :num_speculative_tokens]
        # Ranks of a data-parallel group meet in every forward, so none may run fewer than the others.
        num_steps = self.plan.num_speculative_tokens if self._fixed_forwards else num_speculative_tokens
        drafts = SampledDrafts(num_steps, sampling_metadata=sampling_metadata)
        if sampling_metadata is not None:
            # What is drafted at the end of such a chunk is thrown away, and the chunks depend on the other requests.
            thrown_away = set() if prompt is None else set((prompt[:, 0] >= 0).nonzero()[0].tolist())
            drafts.generators = {i: g for i, g in sampling_metadata.generators.items() if i not in thrown_away}
        self._run_pass(inputs, cad, mm_embed_inputs, drafts)
        return self._collect(num_speculative_tokens, cad.batch_size(), drafts)

    # Inputs.

    def _assign_history(self, batch: DraftBatch | None) -> torch.Tensor:
        """`[num_reqs]` int64, the requests' slots."""
        assert self.history is not None
        if batch is None:
            raise RuntimeError(
                "propose was called without one of the prepare_next_token_ids methods before it, so the rows belong "
                "to no known request."
            )
        slots = self.history.assign(batch.input_batch.req_ids, batch.requests)
        return async_tensor_h2d(np.array(slots), device=self.device)

    def _layers_of_step(
        self, slot_mappings: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] | None
    ) -> Layers | None:
        metadata, self._step_metadata = self._step_metadata, None
        if metadata is None or not isinstance(slot_mappings, dict):
            return None
        return Layers(metadata, slot_mappings)

    def _model_inputs(
        self,
        module: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        num_input_tokens: int,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
    ) -> dict[str, Any]:
        num_rows = token_ids.shape[0]
        if self._takes_rows and num_input_tokens == num_rows:
            # A compiled model takes token ids of no other type than the buffer's.
            inputs = {"input_ids": token_ids.to(self.input_ids.dtype), "positions": positions, "inputs_embeds": None}
            return inputs | {"hidden_states": hidden_states} | self._selection(module)
        self.input_ids[:num_rows] = token_ids
        self.hidden_states[:num_rows] = hidden_states
        if module == 0:
            self._get_positions(num_rows)[:] = positions
        return self._buffered_inputs(module, num_rows, num_input_tokens, mm_embed_inputs)

    def _buffered_inputs(
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

    def _idle_inputs(self, module: int, num_rows: int, num_input_tokens: int) -> dict[str, Any]:
        return self._buffered_inputs(module, num_rows, num_input_tokens, None)

    def _plan_execution(self, num_rows: int) -> Execution:
        if self.device.type == "cpu" and not self._fixed_forwards:
            return Execution(CUDAGraphMode.NONE, num_rows, None)
        return Execution(*self._determine_batch_execution_and_padding(num_rows))

    def _step_slots(self, cad: CommonAttentionMetadata) -> torch.Tensor | None:
        # The host hands over the primary group's; without padded batches these are fewer than it ran.
        return cad.slot_mapping if len(self.bound_groups.all) == 1 else None

    def _prepare_eplb(self, num_rows: int) -> None:
        if self.eplb_state is not None:
            self.eplb_state.prepare_forward(self.draft_model_config, num_rows)

    def _check_metadata(self, layer_names: list[str], metadata: object) -> None:
        if self.allowed_attn_types is not None and not isinstance(metadata, self.allowed_attn_types):
            raise ValueError(
                f"The draft layers {layer_names} use {type(metadata).__name__}, which this platform can't draft with; "
                f"it can with {[t.__name__ for t in self.allowed_attn_types]}. Choose another backend by "
                "attention_backend in the speculative config."
            )

    # Drafts.

    def _sample_step(self, step: int, hidden: torch.Tensor, window: Window, drafts: Drafts) -> None:
        """Adds the step's draft, and its distribution where one is kept."""
        assert isinstance(drafts, SampledDrafts)
        module = self.plan.module_of_step(step)
        if drafts.sampling_metadata is None and self.use_local_argmax_reduction:
            drafts.token_ids.append(self.top_tokens(hidden, module))
            return
        if drafts.sampling_metadata is None:
            drafts.token_ids.append(self.likeliest(hidden, module))
            return
        logits = self.cheap.to_all(self.logits(hidden, module))
        token_ids, probs = self._sample_from_logits(logits, drafts.sampling_metadata)
        if probs is not None:
            drafts.probs.append(probs)
            # The host draws all of them from the process's generator.
            for request, generator in drafts.generators.items():
                noise = torch.empty_like(probs[request]).exponential_(generator=generator)
                token_ids[request] = (probs[request] / noise).argmax()
        drafts.token_ids.append(token_ids)

    def _collect(self, num_wanted: int, num_reqs: int, drafts: SampledDrafts) -> torch.Tensor:
        if num_wanted == 0:
            return torch.empty(num_reqs, 0, dtype=torch.int64, device=self.device)
        if drafts.probs:
            self._last_draft_probs = torch.stack(drafts.probs[:num_wanted], dim=1)
        if num_wanted == 1:
            return drafts.token_ids[0].view(num_reqs, 1)
        return torch.stack(drafts.token_ids[:num_wanted], dim=1)

    def _new_drafts(self, num_steps: int, captured: bool = False) -> Drafts:
        return SampledDrafts(num_steps, captured)

    # Set-up and warm-up.

    def load_model(self, target_model: torch.nn.Module) -> None:
        with self.cheap.while_loading():
            super().load_model(target_model)
        self.prepare_model()
        if self._compiles_chain():
            self.chain = compile_chain(
                self.vllm_config,
                run_module=self.model.forward,
                likeliest=self.likeliest,
                num_modules=self.plan.chain_length,
                hidden_states_flow=self.descriptor.hidden_states_flow,
                takes_wanted=self.takes_wanted,
            )

    def _compiles_chain(self) -> bool:
        """Whether the chain is of the kind that is compiled: on a CPU, in one process, of several modules for text."""
        return (
            self.device.type == "cpu"
            and self.plan.num_modules > 1
            and self.vllm_config.parallel_config.world_size_across_dp == 1
            and not (self.cheap.fp8 or self.uses_mrope or self.supports_mm_inputs or self.use_local_argmax_reduction)
        )

    def _can_be_compiled(self, drafts: Drafts, execution: Execution, num_rows: int) -> bool:
        assert isinstance(drafts, SampledDrafts)
        return drafts.sampling_metadata is None and super()._can_be_compiled(drafts, execution, num_rows)

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
            self._capture_pass(num_tokens)
        elif num_tokens == self.vllm_config.scheduler_config.max_num_batched_tokens:
            num_tokens = self.max_num_tokens  # the pass of the host's largest step has the history's rows too
        chain = list(range(self.plan.chain_length))
        beyond = chain * (self.plan.num_speculative_tokens - len(chain))
        for modules in (chain[:1],) if is_graph_capturing else (chain, beyond):
            if not modules:
                continue
            execution = Execution(*self._determine_batch_execution_and_padding(num_tokens, use_cudagraphs))
            if slot_mappings and self.groups is not None:
                slot_mappings = self.groups.slot_mapping_by_layer(execution.num_input_tokens)
            if self.chain is not None and modules is chain:
                self._warm_up_chain(self.chain, num_tokens, execution)
            else:
                self._run_idle(modules, num_tokens, execution, slot_mappings)

    def _capture_pass(self, num_tokens: int) -> None:
        """Captures the pass of a decode step of so many rows, while the host captures the step itself.

        Only a host that captures whole decode steps hands over their block tables meanwhile.
        """
        query_len = 1 + self.plan.num_speculative_tokens
        num_reqs, remainder = divmod(num_tokens, query_len)
        if remainder or num_reqs > self.max_batch_size or not self._may_capture or self.groups is None:
            return
        groups = self.groups.groups_of(range(self.plan.chain_length))
        if any(group.block_table is None for group in groups) or not can_be_captured(self.groups):
            return
        if self.graphs is None:
            self.graphs = self.make_graphs()
            self.capture_uneven()
        if self.graphs.even(num_reqs) not in self.graphs:
            self.graphs.capture(self.graphs.even(num_reqs))

    def _create_draft_vllm_config(self) -> VllmConfig:
        base = super()._create_draft_vllm_config()
        if not self.architecture.has_config_of_its_own:
            return base
        return replace(base, model_config=self.draft_model_config, quant_config=get_draft_quant_config(base))

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        if not self.descriptor.own_heads:
            super()._maybe_share_lm_head(target_language_model)


def take_sampled(
    sampled: Sequence[Sequence[int]], are_discarded: Sequence[bool], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last token that was sampled for each request, and how many were: `[num_reqs]` int32 each.

    Args:
        sampled: of each request, the drafts that were accepted and one token more, then -1.
        are_discarded: of each request, whether its chunk ends before its prompt. `chunk_ends` has the token that
            follows, and any is given here.
    """
    valid = [
        [] if is_discarded else [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
        for token_ids, is_discarded in zip(sampled, are_discarded, strict=True)
    ]
    return int32([token_ids[-1] if token_ids else 0 for token_ids in valid]), int32([*map(len, valid)])


def lens_on_host(cad: CommonAttentionMetadata) -> tuple[np.ndarray, np.ndarray | None]:
    """Of each request, how many rows it has, and a bound of its sequence's length, exact where it prefills."""
    upper = cad.seq_lens_cpu_upper_bound
    return np.diff(cad.query_start_loc_cpu.numpy()), None if upper is None else upper.numpy()


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def chunk_ends(
    batch: InputBatch, num_tokens: npt.NDArray[np.int32], cad: CommonAttentionMetadata, count: int
) -> np.ndarray | None:
    """The `count` tokens that follow each chunk which ends before its prompt does.

    The prompt is followed by the output so far when a preempted request is computed again. The host is not
    asked for the token: it answers with the prompt's last one (vLLM's `prepare_next_token_ids_padded`).

    Args:
        num_tokens: `[num_reqs]`, how many were known before this step sampled (`DraftBatch`).

    Returns:
        `[num_reqs, count]` int32 token ids, -1 where there is no such chunk; None when every prompt is complete.
    """
    upper = cad.seq_lens_cpu_upper_bound
    if upper is None:
        return None
    ends = upper[: cad.num_reqs].numpy()  # exact for requests that prefill
    partial = (ends < num_tokens).nonzero()[0]
    if len(partial) == 0:
        return None
    # The scheduler leaves as many tokens past a chunk as there are modules; the clamp keeps the look-up in bounds.
    columns = np.minimum(ends[partial, None] + np.arange(count), num_tokens[partial, None] - 1)
    follow = np.full((cad.num_reqs, count), -1, dtype=np.int32)
    follow[partial] = batch.token_ids_cpu[partial[:, None], columns]
    return follow
