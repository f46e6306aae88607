"""The vLLM plugin: the entry point and the ledger of host patches.

vLLM calls `register` in every process, sometimes twice. It imports nothing heavy until it has to, changes nothing
until everything that it is going to change has been checked, and raises where it finds another host than it knows.
"""

import logging
from typing import Any

from packaging.specifiers import SpecifierSet

from mtp.compat import Patch, apply_patches, check_vllm_version
from proposers.registry import PROPOSERS, Mode, draft_architecture, is_known, known_architecture, load_proposer

logger = logging.getLogger("vllm.proposers")


def register() -> None:
    """Entry point in the group `vllm.general_plugins`.

    Raises:
        mtp.compat.HostMismatchError: this vLLM is not supported.
        ValueError: `MTP_PROPOSERS` holds an unknown word.
    """
    mode = Mode.from_env()
    if mode is Mode.OFF:
        return
    import vllm

    check_vllm_version(vllm.__version__)
    apply_patches(START_UP_FIXES + (DRAFTING if mode is Mode.ON else ()), vllm.__version__)


# Start-up fixes: for models that vLLM itself can't start.


def _keep_layer_types(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        layer_types = kwargs.get("layer_types")
        if layer_types is not None and len(layer_types) > self.num_hidden_layers:
            self.mtp_layer_types = list(layer_types[self.num_hidden_layers :])

    return __init__


def _restore_layer_types(original: Any) -> Any:
    def hf_config_override(hf_config: Any) -> Any:
        config = original(hf_config)
        extra = getattr(config, "mtp_layer_types", None)
        if config.model_type == "step3p5_mtp" and extra and len(config.layer_types) == config.num_hidden_layers:
            config.layer_types = [*config.layer_types, *extra]
        return config

    return hf_config_override


START_UP_FIXES = (
    Patch(
        target="vllm.transformers_utils.configs.step3p5:Step3p5Config.__init__",
        parameters=("self", ..., "num_hidden_layers", ..., "layer_types", ...),
        replace=_keep_layer_types,
        why="the config forgets the attention types of the MTP layers, which lie past num_hidden_layers; the target's "
        "own list must stay short, or strict validation refuses it under extract_hidden_states.",
        upstream="vllm-project/vllm#40000",
        until="vLLM 0.32 is no longer supported",
        versions=SpecifierSet("<0.33"),
    ),
    Patch(
        target="vllm.config.speculative:SpeculativeConfig.hf_config_override",
        parameters=("hf_config",),
        replace=_restore_layer_types,
        why="the draft's layers index past the target's list and fail to start without it.",
        upstream="vllm-project/vllm#40000",
        until="vLLM 0.32 is no longer supported",
        versions=SpecifierSet("<0.33"),
    ),
)


# The architectures that a proposer of ours was built for in this process. Where there is none, the patches of code that
# other methods run too must leave it as it is.
_built: list[str] = []


# Drafting: the V1 runner asks `use_step3p5_mtp()` whether to take its multi-group branch, builds what the name
# `Step3p5MTPProposer` stands for in its module, and hands block tables per group to instances of that name.


def _is_multi_group(original: Any) -> Any:
    def use_step3p5_mtp(self: Any) -> bool:
        architecture = draft_architecture(self)
        if architecture is not None and architecture not in PROPOSERS:
            logger.info(
                "vLLM's own proposer drafts: vllm-mtp-proposers knows %s and not %s.",
                ", ".join(PROPOSERS),
                architecture,
            )
        return is_known(self) or original(self)

    return use_step3p5_mtp


def _build_known(original: type) -> type:
    class KnownProposer(type):
        """Stands for all our proposers under one name of the host: a call builds, `isinstance` recognises."""

        def __call__(cls, vllm_config: Any, device: Any, runner: Any = None) -> Any:
            config = vllm_config.speculative_config
            architecture = known_architecture(config)
            assert architecture is not None
            proposer = load_proposer(architecture)
            _built.append(architecture)
            logger.info(
                "%s.%s drafts for %s on the V1 model runner, %d tokens a step, instead of vLLM's own proposer "
                "(MTP_PROPOSERS=upstream switches back).",
                proposer.__module__,
                proposer.__name__,
                architecture,
                config.num_speculative_tokens,
            )
            return proposer(vllm_config, device, runner)

        def __instancecheck__(cls, instance: object) -> bool:
            from mtp.proposer import MultiGroupProposer

            return isinstance(instance, MultiGroupProposer | original)

    return KnownProposer("Step3p5MTPProposer", (), {})


def _route_to_v1(original: Any) -> Any:
    def _get_v2_model_runner_unsupported_features(self: Any) -> list[str]:
        import vllm.envs as envs

        features = original(self)
        if not is_known(self.speculative_config):
            return features
        if envs.VLLM_USE_V2_MODEL_RUNNER:
            logger.warning(
                "VLLM_USE_V2_MODEL_RUNNER=1 asks for the V2 model runner, on which vLLM's own speculator drafts and "
                "not vllm-mtp-proposers. Unset it to draft with this package."
            )
            return features
        return [*features, "drafting by vllm-mtp-proposers (VLLM_USE_V2_MODEL_RUNNER=1 keeps V2 and its own drafter)"]

    return _get_v2_model_runner_unsupported_features


def _drafts_up_to_the_limit(original: Any) -> Any:
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        from mtp.proposer import MultiGroupProposer

        # A draft that is limited to shorter sequences than its target can't run past its own limit.
        limited = self.effective_drafter_max_model_len < self.max_model_len
        if limited or not isinstance(self.drafter, MultiGroupProposer):
            return original(self, common_attn_metadata)
        return common_attn_metadata is not None

    return _input_fits_in_drafter


def _key_blocks_by_what_follows(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        config = vllm_config.speculative_config
        architecture = known_architecture(config)
        if architecture is not None:
            config.disable_eagle_block_drop = True  # it guards against what the keys below rule out
        original(self, vllm_config, *args, **kwargs)
        if architecture is None or self.request_block_hasher is None:
            return
        from vllm.utils.hashing import get_hash_fn_by_name

        from mtp.prefix import look_ahead_in_prefix_cache, make_block_hasher

        plan = load_proposer(architecture).make_plan(vllm_config)
        coordinator = self.scheduler.kv_cache_manager.coordinator
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        hash_block_size = coordinator.block_pool.hash_block_size
        self.request_block_hasher = make_block_hasher(hash_block_size, hash_function, plan.chain_length)
        look_ahead_in_prefix_cache(coordinator, plan.chain_length)

    return __init__


def _expand_on_cpu(original: Any) -> Any:
    def expand_batch_to_tokens(
        x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        if x.device.type != "cpu" or not _built:
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

    return expand_batch_to_tokens


def _constrain_nothing(original: Any) -> Any:
    def apply_sampling_constraints(logits: Any, cu_num_draft_tokens: Any, sampling_metadata: Any) -> Any:
        if logits.shape[0] == 0 and _built:
            return logits
        return original(logits, cu_num_draft_tokens, sampling_metadata)

    return apply_sampling_constraints


DRAFTING = (
    Patch(
        target="vllm.config.speculative:SpeculativeConfig.use_step3p5_mtp",
        parameters=("self",),
        replace=_is_multi_group,
        why="known architectures take the runner's multi-group branch.",
        upstream="none yet: the runner has no registry of proposers",
        until="vLLM lets a plugin name the proposer of a method",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:Step3p5MTPProposer",
        parameters=("vllm_config", "device", "runner"),
        replace=_build_known,
        why="the runner builds its multi-group proposer, and recognises it later, by this name.",
        upstream="none yet: the runner has no registry of proposers",
        until="vLLM lets a plugin name the proposer of a method",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter",
        parameters=("self", "common_attn_metadata"),
        replace=_drafts_up_to_the_limit,
        why="one request within K tokens of max_model_len makes the runner skip the pass for the whole batch, which "
        "leaves holes in everyone's draft cache; our passes pad what lies past the limit.",
        upstream="none yet",
        until="the runner leaves positions past max_model_len to the drafter",
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCore.__init__",
        parameters=("self", "vllm_config", ...),
        replace=_key_blocks_by_what_follows,
        why="a block's last draft rows depend on the tokens after it, which are not in the host's key of the block "
        "(mtp/prefix.py).",
        upstream="none yet",
        until="vLLM keys a drafter's blocks by what their rows depend on",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        parameters=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        replace=_expand_on_cpu,
        why="on the CPU the host writes the result to a temporary and returns memory that it never set, so drafts are "
        "verified at a random temperature, top-k and top-p.",
        upstream="vllm-project/vllm#55005",
        until="vllm-project/vllm#55006 or its like is in every supported release",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
        parameters=("logits", "cu_num_draft_tokens", "sampling_metadata"),
        replace=_constrain_nothing,
        why="on the CPU a step without drafts in which every request has a top-k takes the maximum of nothing, and the "
        "engine dies.",
        upstream="none yet",
        until="apply_top_k_only in vLLM's CPU path takes an empty batch",
    ),
    Patch(
        target="vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
        parameters=("self",),
        replace=_route_to_v1,
        why="on CUDA the V2 runner is the default and would pass us by without a word.",
        upstream="none yet",
        until="the proposers run on the V2 runner",
    ),
)
