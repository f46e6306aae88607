"""How far a draft's rows look ahead, whoever drafts, and why the prefix cache's keys may stay vLLM's all the same.

A row of EAGLE's, of EAGLE-3's and of an MTP module's cache holds what was made of the token after it; module i's takes
the token 1 + i further on. Rows of a draft model, of DFlash and of DSpark, and extracted hidden states, depend on no
later token; Gemma 4's module has no rows of its own, and n-grams, suffixes and Medusa's heads have none at all.
"""

from typing import Any

from mtp.plan import DraftPlan
from proposers.architecture import architecture_of, why_not_on_v2
from proposers.hidden_states.plan import CONNECTOR
from proposers.options import Options

LOOK_AHEAD = ("eagle", "eagle3", "mtp")
"""vLLM's speculative methods whose draft has rows that look ahead."""


def lookahead_of(vllm_config: Any) -> int:
    """The most tokens after its own that a draft row depends on; 0: no row looks ahead.

    Raises:
        ValueError: this package drafts, and the model can't make the number of drafts asked for.
    """
    config = vllm_config.speculative_config
    if config is None or config.method not in LOOK_AHEAD or config.use_gemma4_mtp():
        return 0
    if drafts_here(vllm_config):
        architecture = architecture_of(config)
        assert architecture is not None
        return DraftPlan.of(architecture.descriptor, vllm_config).chain_length
    if not _runs_all_modules(vllm_config):
        return 1
    modules: int = config.draft_model_config.hf_config.num_nextn_predict_layers
    return min(modules, config.num_speculative_tokens)


def drafts_here(vllm_config: Any) -> bool:
    """Whether this package drafts."""
    architecture = architecture_of(vllm_config.speculative_config)
    return architecture is not None and not (
        vllm_config.use_v2_model_runner and why_not_on_v2(vllm_config, architecture)
    )


def why_the_hosts_keys(vllm_config: Any) -> str | None:
    """Why keys that look ahead can't be had where rows do, as the end of a sentence; None where they can."""
    if not Options.of(vllm_config).prefix_keys:
        return "additional_config turns them off"
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        return "who listens to KV cache events counts on vLLM's keys"
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != CONNECTOR:
        return f"{transfer.kv_connector} may count on vLLM's keys"
    return None if drafts_here(vllm_config) else _why_rows_are_missing(vllm_config)


def keyed_lookahead(vllm_config: Any) -> int:
    """The tokens after a block that its key has; 0 where the keys are vLLM's."""
    lookahead = lookahead_of(vllm_config)
    return lookahead if lookahead and why_the_hosts_keys(vllm_config) is None else 0


def _runs_all_modules(vllm_config: Any) -> bool:
    """Whether vLLM's own drafter runs more modules than the first."""
    config = vllm_config.speculative_config
    return config.use_multi_module_mtp() and (vllm_config.use_v2_model_runner or config.use_step3p5_mtp())


def _why_rows_are_missing(vllm_config: Any) -> str | None:
    """Which rows vLLM's own drafter leaves out or wrong, so that no key can vouch for them; None: none."""
    config = vllm_config.speculative_config
    if vllm_config.use_v2_model_runner:
        if not _runs_all_modules(vllm_config):
            return None
        modules = config.draft_model_config.hf_config.num_nextn_predict_layers
        if config.num_speculative_tokens > modules or config.uses_dynamic_speculative_decoding():
            return "vLLM's speculator overwrites rows of several modules where it drafts another number than there are"
        return None
    if _runs_all_modules(vllm_config):
        return "vLLM's proposer on V1 runs the first module alone over a prompt"
    if config.draft_model_config.max_model_len < vllm_config.model_config.max_model_len or config.parallel_drafting:
        return "vLLM's proposer on V1 leaves whole batches out near the end of the draft's context"
    return None
