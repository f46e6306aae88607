"""Prefix cache: keys of blocks that know the tokens which a draft's last rows depend on (`mtp/prefix.py`)."""

import logging
from typing import Any

from mtp.plan import DraftPlan
from proposers.architecture import Architecture, architecture_of, why_not_on_v2
from proposers.hidden_states.plan import CONNECTOR, connectors_of
from proposers.host.patching import patch

logger = logging.getLogger("vllm.proposers")


@patch(
    "vllm.v1.engine.core:EngineCore.__init__",
    ("self", "vllm_config", ...),
    why="a block's last draft rows depend on the tokens after it, which are not in the host's key of the block.",
    upstream="none yet",
    until="vLLM keys a drafter's blocks by what their rows depend on",
)
def key_blocks_by_what_follows(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        architecture = _keyed_for(vllm_config)
        if architecture is not None:
            # It guards against what the keys below rule out.
            vllm_config.speculative_config.disable_eagle_block_drop = True
        original(self, vllm_config, *args, **kwargs)
        if architecture is None or self.request_block_hasher is None:
            return
        from vllm.utils.hashing import get_hash_fn_by_name

        from mtp.prefix import look_ahead_in_prefix_cache, make_block_hasher

        plan = DraftPlan.of(architecture.descriptor, vllm_config)
        coordinator = self.scheduler.kv_cache_manager.coordinator
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        hash_block_size = coordinator.block_pool.hash_block_size
        self.request_block_hasher = make_block_hasher(hash_block_size, hash_function, plan.chain_length)
        look_ahead_in_prefix_cache(coordinator, plan.chain_length)

    return __init__


def _keyed_for(vllm_config: Any) -> Architecture | None:
    """The architecture whose draft rows the prefix cache's keys must know of; None where vLLM's keys stay."""
    architecture = architecture_of(vllm_config.speculative_config)
    if architecture is None or (vllm_config.use_v2_model_runner and why_not_on_v2(vllm_config, architecture)):
        return None
    events = vllm_config.kv_events_config
    if connectors_of(vllm_config).keys() - {CONNECTOR} or (events is not None and events.enable_kv_cache_events):
        logger.warning(
            "A KV connector, or who listens to KV cache events, counts on vLLM's keys of the prefix cache, which don't "
            "know the tokens after a block: the first drafts after a prefix hit may rest on another request's tokens. "
            "Outputs are not affected."
        )
        return None
    return architecture


PATCHES = (key_blocks_by_what_follows,)
