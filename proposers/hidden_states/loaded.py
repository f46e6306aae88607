"""Blocks whose keys and values another KV connector brought in: they come without hidden states.

Within vLLM's `MultiConnector` an offloading connector may load the beginning of a prompt. Its rows were not computed,
so the store has none beside those keys, and whoever finds these blocks in the prefix cache later has none either.
"""

from typing import Any


class LoadedBlocks:
    """Knows, in the scheduler, which requests and blocks have no rows.

    A block is known by its id and its key in the prefix cache: under another key it was computed anew.
    """

    def __init__(self, anchor: int, block_size: int) -> None:
        self._anchor, self._block_size = anchor, block_size
        self._pool: Any = None
        self._found_here: dict[str, int] = {}
        self._requests: set[str] = set()
        self._keys: dict[int, Any] = {}

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool

    def note_hit(self, request_id: str, num_tokens: int) -> None:
        """Takes note of how many tokens the engine's own prefix cache has for a request that is to start."""
        self._found_here[request_id] = num_tokens

    def note_step(self, scheduler_output: Any) -> None:
        """Takes note of requests that start, or start again, behind more tokens than were found here."""
        for new in scheduler_output.scheduled_new_reqs:
            self._note_start(new.req_id, new.num_computed_tokens, new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if request_id in cached.resumed_req_ids:
                self._note_start(request_id, cached.num_computed_tokens[i], cached.new_block_ids[i])

    def _note_start(self, request_id: str, num_computed: int, block_ids: Any) -> None:
        found = self._found_here.pop(request_id, num_computed)
        if num_computed <= found:
            return
        self._requests.add(request_id)
        for block_id in block_ids[self._anchor][found // self._block_size : -(-num_computed // self._block_size)]:
            self._keys[block_id] = self._key(block_id)

    def is_in(self, request_id: str, block_ids: list[int]) -> bool:
        """Whether a request that ends, with these blocks of the anchor, lacks rows. To be asked once."""
        self._found_here.pop(request_id, None)
        itself = request_id in self._requests
        self._requests.discard(request_id)
        known = self._keys.keys() & block_ids if self._keys else ()
        lacking = [block_id for block_id in known if self._lacks_rows(block_id)]
        return itself or bool(lacking)

    def _lacks_rows(self, block_id: int) -> bool:
        key = self._key(block_id)
        if self._keys[block_id] is None:  # it was not full when it was loaded
            self._keys[block_id] = key
        if key is None or key != self._keys[block_id]:
            del self._keys[block_id]
            return False
        return True

    def _key(self, block_id: int) -> Any:
        return self._pool.blocks[block_id].block_hash
