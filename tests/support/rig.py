"""A real proposer over real configs, KV cache specs and attention layers, with a model that is a spy.

Nothing of vLLM is replaced but the draft's weights: what the proposer hands to a forward pass is what is looked at.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from tests.support.children import TINY
from tests.support.observed_pass import Forward, ObservedPass, chain_length, selected_module

HEAD = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
WINDOW = 64
FIRST_LAYER = 6
MAX_NUM_SEQS = 8
CPU = torch.device("cpu")


def layer_name(module: int) -> str:
    return f"model.layers.{FIRST_LAYER + module}.mtp_block.self_attn.attn"


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **HEAD)


def sliding(block_size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=WINDOW, **HEAD)


def kv_cache(*groups: tuple[Sequence[str], Any], num_blocks: int = 1000) -> KVCacheConfig:
    """Of `(layer names, spec)`, one group each."""
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(names), spec) for names, spec in groups],
    )


def make_config(
    num_speculative_tokens: int = 3,
    max_model_len: int = 512,
    draft_max_model_len: int | None = None,
    **speculative: Any,
) -> VllmConfig:
    """The real config of the tiny model under `"method": "mtp"`."""
    if draft_max_model_len is not None:
        speculative["max_model_len"] = draft_max_model_len
    return EngineArgs(
        model=TINY,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_batched_tokens=256,
        max_num_seqs=MAX_NUM_SEQS,
        speculative_config={"method": "mtp", "num_speculative_tokens": num_speculative_tokens, **speculative},
    ).create_engine_config()


def add_layer(config: VllmConfig, name: str, spec: AttentionSpec, **more: Any) -> Attention:
    """A real attention layer, known to the config as layers of a loaded model are."""
    with set_current_vllm_config(config):
        return Attention(
            num_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            scale=1.0,
            num_kv_heads=spec.num_kv_heads,
            cache_config=config.cache_config,
            per_layer_sliding_window=getattr(spec, "sliding_window", None),
            prefix=name,
            **more,
        )


class SpyModel(nn.Module):
    """Writes down its forwards; module i's head always says `token(i)`."""

    def __init__(self, vocab_size: int, num_modules: int) -> None:
        super().__init__()
        self.vocab_size, self.num_modules = vocab_size, num_modules
        self.forwards: list[Forward] = []

    @staticmethod
    def token(module: int) -> int:
        return 100 + module

    def forward(self, **kwargs: Any) -> torch.Tensor:
        context = get_forward_context()
        module = selected_module(kwargs, self.num_modules)
        metadata = (context.attn_metadata or {}).get(layer_name(module))
        self.forwards.append(
            Forward(
                module,
                kwargs["input_ids"].tolist(),
                kwargs["positions"].clone(),
                [] if metadata is None else metadata.query_start_loc.tolist(),
                context.slot_mapping[layer_name(module)].tolist() if context.slot_mapping else [],
                metadata,
            )
        )
        return kwargs["hidden_states"].clone()

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        logits = torch.zeros(hidden_states.shape[0], self.vocab_size)
        logits[:, self.token(spec_step_idx % self.num_modules)] = 1.0
        return logits


@dataclass
class Batch:
    """What the host hands over in one step: for each request its length, and how many of its rows are new.

    Attributes:
        prompt_lens: None: no chunk ends before its prompt.
    """

    seq_lens: list[int]
    query_lens: list[int]
    rejected: list[int] | None = None
    rope_positions: torch.Tensor | None = None
    prompt_lens: list[int] | None = None

    def __len__(self) -> int:
        return len(self.seq_lens)

    @property
    def starts(self) -> list[int]:
        return [sum(self.query_lens[:i]) for i in range(len(self) + 1)]

    @property
    def firsts(self) -> list[int]:
        return [seq_len - query_len for seq_len, query_len in zip(self.seq_lens, self.query_lens, strict=True)]

    @property
    def lasts(self) -> list[int]:
        return [n - 1 - r for n, r in zip(self.seq_lens, self.rejected or [0] * len(self), strict=True)]

    @property
    def requests(self) -> list[int]:
        """The request of every row."""
        return [r for r, query_len in enumerate(self.query_lens) for _ in range(query_len)]

    @property
    def positions(self) -> list[int]:
        """The sequence position of every row."""
        return [
            first + row for first, length in zip(self.firsts, self.query_lens, strict=True) for row in range(length)
        ]


@dataclass
class Rig:
    """A proposer, its block tables, and the host's state of requests that have been running for long."""

    proposer: Any
    model: SpyModel
    kv_cache_config: KVCacheConfig
    num_modules: int
    tables: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[str, CachedRequestState] = field(default_factory=dict)
    last_pass: ObservedPass | None = None

    def bind(self) -> None:
        """Binds the groups, and gives each a block table: other blocks in every group and for every request."""
        self.proposer.initialize_attn_backend(self.kv_cache_config)
        for gid, group in enumerate(self.kv_cache_config.kv_cache_groups):
            width = -(-self.proposer.max_model_len // group.kv_cache_spec.block_size)
            first = 20 * (gid + 1) - 1
            blocks = torch.arange(first, first + MAX_NUM_SEQS * width, dtype=torch.int32)
            self.tables[gid] = blocks.view(MAX_NUM_SEQS, width).flip(0)

    @property
    def limit(self) -> int:
        """Of the draft's rows."""
        config = self.proposer.speculative_config.draft_model_config
        return min(self.proposer.max_model_len, config.max_model_len)

    @property
    def forwards(self) -> list[Forward]:
        return self.model.forwards

    def wrong_slots(self) -> list[str]:
        """Of the last pass."""
        assert self.last_pass is not None
        assert self.forwards
        return self.last_pass.wrong_slots()

    def propose(self, batch: Batch, num_speculative_tokens: int = 3, **more: Any) -> torch.Tensor:
        self.forwards.clear()
        self._hand_over(batch)
        starts = torch.tensor(batch.starts, dtype=torch.int32)
        seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32)
        rejected = None if batch.rejected is None else torch.tensor(batch.rejected, dtype=torch.int32)
        num_tokens, gid = len(batch.positions), self.proposer.kv_cache_gid
        self.last_pass = self._expect(batch)
        return self.proposer.propose(
            num_speculative_tokens=num_speculative_tokens,
            target_token_ids=torch.arange(num_tokens, dtype=torch.int32),
            target_positions=torch.tensor(batch.positions) if batch.rope_positions is None else batch.rope_positions,
            target_hidden_states=torch.zeros(num_tokens, self.proposer.hidden_size),
            next_token_ids=torch.full((len(batch),), 7, dtype=torch.int32),
            token_indices_to_sample=None if rejected is None else starts[1:] - 1 - rejected,
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts.clone(),
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens.clone(),
                num_reqs=len(batch),
                num_actual_tokens=num_tokens,
                max_query_len=max(batch.query_lens),
                max_seq_len=max(batch.seq_lens),
                block_table_tensor=self.tables[gid],
                slot_mapping=self._host_slots(gid, batch),
            ),
            sampling_metadata=greedy_sampling(),
            num_rejected_tokens_gpu=rejected,
            **more,
        )

    def _hand_over(self, batch: Batch) -> None:
        """What the runner tells a drafter before it asks for drafts."""
        for gid, table in self.tables.items():
            self.proposer.set_per_group_attn_metadata(gid, table, self._host_slots(gid, batch))
        host_batch = InputBatch(
            MAX_NUM_SEQS,
            self.proposer.max_model_len,
            256,
            CPU,
            self.model.vocab_size,
            [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups],
            [table.shape[1] for table in self.tables.values()],
        )
        for request, last in enumerate(batch.lasts):
            # All tokens up to the one after the last valid row are known, so no chunk ends here.
            num_tokens = last + 2 if batch.prompt_lens is None else batch.prompt_lens[request]
            tokens = list(range(min(num_tokens, self.proposer.max_model_len)))
            state = self.states.get(str(request))
            if state is None:
                blocks = tuple(table[request].tolist() for table in self.tables.values())
                sampling = SamplingParams(temperature=0)
                state = CachedRequestState(str(request), tokens, [], sampling, None, blocks, 0, [])
                self.states[str(request)] = state
            state.prompt_token_ids, state.num_prompt_tokens = tokens, len(tokens)
            host_batch.add_request(state)
        sampled = torch.full((len(batch), 1), 7, dtype=torch.int32)
        known = batch.prompt_lens or [0] * len(batch)
        is_discarded = torch.tensor([end < length for end, length in zip(batch.seq_lens, known, strict=True)])
        self.proposer.prepare_next_token_ids_padded(sampled, self.states, host_batch, is_discarded)

    def _expect(self, batch: Batch) -> ObservedPass:
        gids = [
            next(
                g for g, group in enumerate(self.kv_cache_config.kv_cache_groups) if layer_name(m) in group.layer_names
            )
            for m in range(self.num_modules)
        ]
        return ObservedPass(
            req_ids=[str(request) for request in range(len(batch))],
            firsts=batch.firsts,
            lasts=batch.lasts,
            chunk_ends=[False] * len(batch),
            chain_length=chain_length(self.proposer),
            tables=[self.tables[gid] for gid in gids],
            block_sizes=[self.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size for gid in gids],
            max_model_len=self.limit,
            forwards=self.forwards,
        )

    def _host_slots(self, gid: int, batch: Batch) -> torch.Tensor:
        size, table = self.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size, self.tables[gid]
        rows = zip(batch.requests, batch.positions, strict=True)
        return torch.tensor([int(table[r, p // size]) * size + p % size for r, p in rows])


@functools.cache
def _use_cpu_kernels() -> None:
    """As vLLM's worker does: the host's own proposer needs them."""
    current_platform.register_triton_kernel_overrides()


def make_rig(
    proposer_class: type,
    config: VllmConfig,
    specs: Sequence[AttentionSpec],
    *,
    bind: bool = True,
    data_parallel_size: int = 1,
) -> Rig:
    """A proposer whose module i has its layer in a group of its own, of `specs[i]`."""
    _use_cpu_kernels()
    for module, spec in enumerate(specs):
        add_layer(config, layer_name(module), spec)
    # The config alone says so: no other rank is started.
    config.parallel_config.data_parallel_size = data_parallel_size
    with set_current_vllm_config(config):
        proposer: Any = proposer_class(config, CPU)
    proposer.model = SpyModel(config.model_config.get_vocab_size(), len(specs))
    proposer._draft_attn_layer_names = {layer_name(module) for module in range(len(specs))}
    groups = kv_cache(*(([layer_name(module)], spec) for module, spec in enumerate(specs)))
    rig = Rig(proposer, proposer.model, groups, len(specs))
    if bind:
        rig.bind()
    return rig


def greedy_sampling() -> SamplingMetadata:
    empty = torch.empty(0)
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=empty,
        presence_penalties=empty,
        repetition_penalties=empty,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
