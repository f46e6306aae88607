"""A real proposer over real configs, KV cache specs and attention layers, with a model that only writes down.

Nothing of vLLM is replaced but the draft's weights: what the proposer hands to a forward pass is what is looked at.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
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

from tests.engine import TINY

HEAD = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
WINDOW = 64
MODULES = 3
FIRST_LAYER = 6
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


def make_config(num_speculative_tokens: int = 3, max_model_len: int = 512, **speculative: Any) -> VllmConfig:
    """The real config of the tiny model under `"method": "mtp"`."""
    return EngineArgs(
        model=TINY,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_batched_tokens=256,
        max_num_seqs=8,
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


@dataclass(frozen=True)
class Forward:
    """One call of the draft model."""

    input_ids: list[int]
    positions: torch.Tensor
    module: int
    slots: Mapping[str, list[int]]
    metadata: Mapping[str, Any]
    dp_tokens: list[int] | None


class RecordingModel(nn.Module):
    """Writes down its forwards; module i's head always says `token(i)`."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.forwards: list[Forward] = []

    @staticmethod
    def token(module: int) -> int:
        return 100 + module

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        context = get_forward_context()
        self.forwards.append(
            Forward(
                input_ids.tolist(),
                positions.clone(),
                spec_step_idx % MODULES,
                {name: slots.tolist() for name, slots in (context.slot_mapping or {}).items()},
                dict(context.attn_metadata or {}),
                None if context.dp_metadata is None else context.dp_metadata.num_tokens_across_dp_cpu.tolist(),
            )
        )
        return hidden_states.clone()

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        logits = torch.zeros(hidden_states.shape[0], self.vocab_size)
        logits[:, self.token(spec_step_idx % MODULES)] = 1.0
        return logits


@dataclass
class Batch:
    """What the host hands over in one step: for each request its length so far and how many of its rows are new."""

    seq_lens: list[int]
    query_lens: list[int]
    rejected: list[int] | None = None
    rope_positions: torch.Tensor | None = None

    @property
    def starts(self) -> list[int]:
        return [sum(self.query_lens[:i]) for i in range(len(self.query_lens) + 1)]

    @property
    def positions(self) -> list[int]:
        """The sequence position of every row."""
        return [
            seq_len - query_len + row
            for seq_len, query_len in zip(self.seq_lens, self.query_lens, strict=True)
            for row in range(query_len)
        ]


@dataclass
class Rig:
    """A bound proposer and its block tables."""

    proposer: Any
    model: RecordingModel
    kv_cache_config: KVCacheConfig
    tables: dict[int, torch.Tensor] = field(default_factory=dict)

    def bind(self) -> None:
        """Binds the groups, and gives each a block table: other blocks in every group and for every request."""
        self.proposer.initialize_attn_backend(self.kv_cache_config)
        for gid, group in enumerate(self.kv_cache_config.kv_cache_groups):
            width = -(-self.proposer.max_model_len // group.kv_cache_spec.block_size)
            first = 20 * (gid + 1) - 1
            self.tables[gid] = torch.arange(first, first + 8 * width, dtype=torch.int32).view(8, width).flip(0)

    @property
    def forwards(self) -> list[Forward]:
        return self.model.forwards

    def module_slots(self, forward: Forward) -> list[int]:
        """Where the module that ran was told to write."""
        return forward.slots[layer_name(forward.module)]

    def expected_slots(self, module: int, requests: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Where its keys and values belong, by a scalar loop."""
        for gid, group in enumerate(self.kv_cache_config.kv_cache_groups):
            if layer_name(module) in group.layer_names:
                table, size = self.tables[gid], group.kv_cache_spec.block_size
        return [
            int(table[r, p // size]) * size + p % size if 0 <= p < self.proposer.max_model_len else -1
            for r, p in zip(requests, positions, strict=True)
        ]

    def propose(self, batch: Batch, num_speculative_tokens: int = 3) -> torch.Tensor:
        self.forwards.clear()
        for gid, table in self.tables.items():
            self.proposer.set_per_group_attn_metadata(gid, table, self._host_slots(gid, batch))
        starts = torch.tensor(batch.starts, dtype=torch.int32)
        positions = torch.tensor(batch.positions)
        seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32)
        rejected = None if batch.rejected is None else torch.tensor(batch.rejected, dtype=torch.int32)
        gid = self.proposer.kv_cache_gid
        metadata = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            num_reqs=len(batch.seq_lens),
            num_actual_tokens=len(positions),
            max_query_len=max(batch.query_lens),
            max_seq_len=max(batch.seq_lens),
            block_table_tensor=self.tables[gid],
            slot_mapping=self._host_slots(gid, batch),
        )
        return self.proposer.propose(
            num_speculative_tokens=num_speculative_tokens,
            target_token_ids=torch.arange(len(positions), dtype=torch.int32),
            target_positions=positions if batch.rope_positions is None else batch.rope_positions,
            target_hidden_states=torch.zeros(len(positions), self.proposer.hidden_size),
            next_token_ids=torch.full((len(batch.seq_lens),), 7, dtype=torch.int32),
            token_indices_to_sample=None if rejected is None else starts[1:] - 1 - rejected,
            common_attn_metadata=metadata,
            sampling_metadata=greedy_sampling(),
            num_rejected_tokens_gpu=rejected,
        )

    def _host_slots(self, gid: int, batch: Batch) -> torch.Tensor:
        size = self.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
        requests = [r for r, length in enumerate(batch.query_lens) for _ in range(length)]
        table = self.tables[gid]
        return torch.tensor(
            [int(table[r, p // size]) * size + p % size for r, p in zip(requests, batch.positions, strict=True)]
        )


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
    # Of the config alone: no other rank is started.
    config.parallel_config.data_parallel_size = data_parallel_size
    with set_current_vllm_config(config):
        proposer: Any = proposer_class(config, CPU)
    proposer.model = RecordingModel(config.model_config.get_vocab_size())
    proposer._draft_attn_layer_names = {layer_name(module) for module in range(len(specs))}
    rig = Rig(proposer, proposer.model, kv_cache(*(([layer_name(module)], spec) for module, spec in enumerate(specs))))
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
