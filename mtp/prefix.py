"""Prefix-cache keys for blocks whose rows look ahead.

Row p of module i depends on token p + 1 + i, so the last rows of a block depend on the tokens after it. vLLM keys a
block by the tokens up to its end. Two requests that part right after a block then share a copy whose last rows suit
only one of them; dropping the last block that matches, as vLLM does for drafters, guards the request that parts there
and not one that comes later and matches further. Here the key has the tokens that follow, which also means that a
block is keyed, and cached, only once they are known.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, get_request_block_hasher
from vllm.v1.request import Request


def make_block_hasher(
    hash_block_size: int, hash_function: Callable[[Any], bytes], lookahead: int
) -> Callable[[Request], list[BlockHash]]:
    """The host's hasher with the `lookahead` tokens after a block in its key.

    Returns:
        A function that gives the keys of the request's blocks that have none yet and are followed by enough tokens.
    """
    following: deque[tuple[Any, ...]] = deque()
    # The host calls the hash function once per block, in order.
    hash_blocks = get_request_block_hasher(
        hash_block_size, lambda content: hash_function((*content, following.popleft()))
    )

    def request_block_hasher(request: Request) -> list[BlockHash]:
        first = len(request.block_hashes)
        count = max(0, (request.num_tokens - lookahead) // hash_block_size - first)
        if count == 0:
            return []
        ends = range((first + 1) * hash_block_size, request.num_tokens + 1, hash_block_size)
        following.extend(_what_follows(request, end, end + lookahead) for end in ends)
        hashes: list[BlockHash] = hash_blocks(request)
        following.clear()
        return hashes[:count]

    return request_block_hasher


def _what_follows(request: Request, start: int, end: int) -> tuple[Any, ...]:
    """The tokens of `[start, end)`, and of images and prompt embeddings there what the host's keys have of them."""
    tokens = tuple(request.all_token_ids[start:end])
    if not request.mm_features and request.prompt_embeds is None:
        return tokens
    extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    return (*tokens, extra_keys)


def look_ahead_in_prefix_cache(coordinator: Any, lookahead: int) -> None:
    """Has the host's `KVCacheCoordinator` cache no block before it has a key, and look no further than there are keys.

    A block that is followed by `lookahead` computed tokens is also final: every pass that writes it is over.

    Of a sliding window the host keeps only what lies before a position at which a later request can resume: it is told
    of the one that these keys let the same prompt resume at, or the longest hit of all groups would be none.
    """
    hash_block_size = coordinator.block_pool.hash_block_size
    count_cacheable = coordinator.get_num_cacheable_tokens

    def get_num_cacheable_tokens(num_computed_tokens: int, kv_cache_group_id: int) -> int:
        count: int = count_cacheable(max(0, num_computed_tokens - lookahead), kv_cache_group_id)
        return count

    coordinator.num_reprefillable_tokens = 0  # the host's own margin, which it applies only where it drops blocks
    coordinator.get_num_cacheable_tokens = get_num_cacheable_tokens
    for manager in coordinator.single_type_managers:
        cache_blocks = manager.cache_blocks

        def cache_blocks_to_resume_at(
            request: Request,
            num_tokens: int,
            *args: Any,
            replay_boundaries: Sequence[int],
            cache_blocks: Any = cache_blocks,
            **kwargs: Any,
        ) -> None:
            # In any order: this is called for every request and group of every step.
            boundaries = (*replay_boundaries, max(request.num_prompt_tokens - lookahead, 0))
            cache_blocks(request, num_tokens, *args, replay_boundaries=boundaries, **kwargs)

        manager.cache_blocks = cache_blocks_to_resume_at
    for name in ("find_longest_cache_hit", "find_longest_cache_hit_per_group"):
        find = getattr(coordinator, name, None)
        if find is None:
            continue  # a coordinator of one group has no look-up per group

        def find_in_keys(block_hashes: list[BlockHash], max_cache_hit_length: int, find: Any = find) -> Any:
            return find(block_hashes, min(max_cache_hit_length, len(block_hashes) * hash_block_size))

        setattr(coordinator, name, find_in_keys)
    _cache_no_part_without_a_key(coordinator, lookahead)


def _cache_no_part_without_a_key(coordinator: Any, lookahead: int) -> None:
    """Where a hit may end inside a block of a recurrent layer: the part that a prompt's chunk ends with."""
    pool = coordinator.block_pool
    cache_partial_block = pool.cache_partial_block

    def cache_keyed_block(request: Request, block: Any, num_tokens: int, **kwargs: Any) -> Any:
        if num_tokens // pool.hash_block_size > len(request.block_hashes):
            return None
        return cache_partial_block(request=request, block=block, num_tokens=num_tokens, **kwargs)

    pool.cache_partial_block = cache_keyed_block
    if not coordinator.enable_partial_hash_hits:
        return
    for manager in coordinator.single_type_managers:
        if (cache_tail := getattr(manager, "_cache_partial_tail_block", None)) is None:
            continue

        def cache_computed_tail(
            request: Request, num_tokens: int, retention_interval: int | None, cache_tail: Any = cache_tail
        ) -> Any:
            # The state is that of the chunk's end, which `get_num_cacheable_tokens` has moved.
            return cache_tail(request, num_tokens + lookahead, retention_interval=retention_interval)

        manager._cache_partial_tail_block = cache_computed_tail


def keep_states_to_resume_at(scheduler: Any, lookahead: int) -> None:
    """Has the host's `Scheduler` end chunks of prompts where a recurrent layer's state can be resumed from.

    A state is kept where a chunk ends, and the host ends one at the last block end that is followed by a token, to be
    resumed from when the prompt is sent again. By these keys that is the last one followed by `lookahead` tokens. A
    chunk that ends later also leaves fewer tokens than a draft of several modules reads, so the host takes tokens back,
    and comes to the same end again and again: such a chunk goes on to the prompt's end.
    """
    split = scheduler._mamba_block_aligned_split
    block_size: int = scheduler.cache_config.block_size

    def split_where_it_resumes(
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        count: int = split(request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens)
        start: int = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        resumes_at: int = (request.num_tokens - lookahead) // block_size * block_size
        hosts = (request.num_tokens - 1) // block_size * block_size
        if resumes_at == hosts:
            return count
        if start < resumes_at < start + count:
            return resumes_at - start
        reaches_the_end = start + num_new_tokens >= request.num_tokens
        if start + count == hosts and reaches_the_end:
            return num_new_tokens
        return count

    scheduler._mamba_block_aligned_split = split_where_it_resumes


def forget_keys_of_replaced_tokens(scheduler: Any, lookahead: int) -> None:
    """Has a streaming session whose last tokens are replaced lose the keys of all blocks that looked at them."""
    update = scheduler._update_request_as_session

    def update_request_as_session(session: Request, *args: Any, **kwargs: Any) -> None:
        kept = max(0, session.num_computed_tokens - lookahead) // scheduler.hash_block_size
        del session.block_hashes[kept:]
        update(session, *args, **kwargs)

    scheduler._update_request_as_session = update_request_as_session
