"""Prefix cache: keys of blocks that know the tokens which a draft's last rows depend on (`mtp/prefix.py`).

They are for whoever drafts with rows that look ahead (`proposers/lookahead.py`). Where that is vLLM's own proposer on
V1, patches see to it that a block's rows are what its key says: these, and `draft_up_to_the_limit` (`drafting.py`).
"""

import logging
from typing import Any

from proposers.hidden_states.plan import is_the_only_connector
from proposers.host.patching import patch
from proposers.lookahead import lookahead_of, why_the_hosts_keys

logger = logging.getLogger("vllm.proposers")


@patch(
    "vllm.v1.engine.core:EngineCore.__init__",
    ("self", "vllm_config", ...),
    why="a block's last draft rows depend on the tokens after it, which are not in the host's key of the block. And "
    "beside any KV connector the host makes keys without a prefix cache, too, which HiddenStatesConnector never reads.",
    upstream="none yet",
    until="vLLM keys a drafter's blocks by what their rows depend on, and asks a connector whether it reads keys",
)
def key_blocks_by_what_follows(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        lookahead = _decide(vllm_config)
        if lookahead:
            # It guards against what the keys below rule out.
            vllm_config.speculative_config.disable_eagle_block_drop = True
        original(self, vllm_config, *args, **kwargs)
        if _nobody_reads_keys(vllm_config):
            self.request_block_hasher = None
        if not lookahead or self.request_block_hasher is None:
            return
        from vllm.utils.hashing import get_hash_fn_by_name

        from mtp import prefix

        coordinator = self.scheduler.kv_cache_manager.coordinator
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        hash_block_size = coordinator.block_pool.hash_block_size
        self.request_block_hasher = prefix.make_block_hasher(hash_block_size, hash_function, lookahead)
        prefix.look_ahead_in_prefix_cache(coordinator, lookahead)
        prefix.forget_keys_of_replaced_tokens(self.scheduler, lookahead)
        if lookahead > 1:
            prefix.keep_states_to_resume_at(self.scheduler, lookahead)

    return __init__


def _nobody_reads_keys(vllm_config: Any) -> bool:
    return is_the_only_connector(vllm_config) and not vllm_config.cache_config.enable_prefix_caching


def _decide(vllm_config: Any) -> int:
    """The tokens after a block that its key is to have, or 0; says which, and what it costs where it is none."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return 0
    lookahead = lookahead_of(vllm_config)
    if lookahead == 0:
        return 0
    if reason := why_the_hosts_keys(vllm_config):
        logger.warning(
            "The prefix cache keeps vLLM's keys, which don't have the tokens after a block: %s. %s, and drafts after a "
            "hit may rest on another request's tokens. Outputs are not affected.",
            reason,
            "Every hit loses its last block"
            if vllm_config.speculative_config.use_eagle_block_drop()
            else "No block of a hit is dropped (disable_eagle_block_drop)",
        )
        return 0
    logger.info(
        "The prefix cache's keys have the tokens after a block that the draft's rows depend on (%d), so no block of a "
        "hit is dropped.",
        lookahead,
    )
    return lookahead


BASE_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
CHUNK_ENDS = "vLLM's V1 proposer gives a chunk's last row the token that follows"


@patch(
    f"{BASE_PROPOSER}.prepare_next_token_ids_padded",
    ("self", "sampled_token_ids", "requests", "gpu_input_batch", "discard_request_mask"),
    why="a pass has to know whose rows it has, to find the tokens after prompt chunks.",
    upstream="none yet",
    until=CHUNK_ENDS,
)
def note_the_batch(original: Any) -> Any:
    def prepare_next_token_ids_padded(
        self: Any, sampled_token_ids: Any, requests: Any, gpu_input_batch: Any, discard_request_mask: Any
    ) -> Any:
        self.input_batch_of_pass = gpu_input_batch
        return original(self, sampled_token_ids, requests, gpu_input_batch, discard_request_mask)

    return prepare_next_token_ids_padded


@patch(
    f"{BASE_PROPOSER}.propose",
    ("self", ..., "next_token_ids", "token_indices_to_sample", "common_attn_metadata", ...),
    why="the last row of a prompt chunk is fed the prompt's last token, and stays in the cache with it.",
    upstream="none yet",
    until=CHUNK_ENDS,
)
def follow_prompt_chunks(original: Any) -> Any:
    def propose(self: Any, *args: Any, next_token_ids: Any, common_attn_metadata: Any, **kwargs: Any) -> Any:
        from vllm.utils.torch_utils import async_tensor_h2d

        from proposers.v1 import chunk_ends

        batch, self.input_batch_of_pass = getattr(self, "input_batch_of_pass", None), None
        if batch is not None:
            num_tokens = batch.num_tokens_no_spec[: common_attn_metadata.num_reqs]
            ends = chunk_ends(batch, num_tokens, common_attn_metadata, 1)
            if ends is not None:
                follow = async_tensor_h2d(ends[:, 0], device=next_token_ids.device)
                next_token_ids = follow.where(follow >= 0, next_token_ids)
        return original(self, *args, next_token_ids=next_token_ids, common_attn_metadata=common_attn_metadata, **kwargs)

    return propose


PATCHES = (key_blocks_by_what_follows, note_the_batch, follow_prompt_chunks)
