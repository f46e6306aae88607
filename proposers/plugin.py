"""The vLLM plugin: the entry point and the ledger of host patches.

vLLM calls `register` in every process, sometimes twice. It imports nothing heavy until it has to, changes nothing
until everything that it is going to change has been checked, and raises where it finds another host than it knows.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from packaging.specifiers import SpecifierSet

from proposers.hidden_states.plan import ExtractionPlan, check_and_draft_nothing, extracts
from proposers.host.patching import Patch, apply_patches, check_vllm_version
from proposers.host.start_up import START_UP_CHECKS
from proposers.models import (
    SPECULATORS,
    Mode,
    is_known,
    known_architecture,
    load_proposer,
    load_speculator,
    why_left_to_the_host,
)

logger = logging.getLogger("vllm.proposers")

CONNECTOR = "HiddenStatesConnector"

# Of several patches.
_NO_REGISTRY = "none yet: the runner has no registry of proposers"
_PLUGIN_PROPOSERS = "vLLM lets a plugin name the proposer of a method"


def register() -> None:
    """Entry point in the group `vllm.general_plugins`.

    Raises:
        proposers.host.patching.HostMismatchError: this vLLM is not supported.
        ValueError: `MTP_PROPOSERS` holds an unknown word.
    """
    mode = Mode.from_env()
    if mode is Mode.OFF:
        return
    import vllm

    check_vllm_version(vllm.__version__)
    apply_patches(START_UP_FIXES + (DRAFTING + EXTRACTION if mode is Mode.ON else ()), vllm.__version__)
    if mode is Mode.ON:
        _register_connector()


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "proposers.hidden_states.connector", CONNECTOR)


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


def _heads_of_the_targets_layers(original: Any) -> Any:
    def _get_num_attention_heads(config: Any, layer_idx: int, layer_type: str) -> int:
        if layer_idx >= config.num_hidden_layers and layer_type in config.layer_types:
            layer_idx = config.layer_types.index(layer_type)
        heads: int = original(config, layer_idx, layer_type)
        return heads

    return _get_num_attention_heads


START_UP_FIXES = (
    *START_UP_CHECKS,
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
    Patch(
        target="vllm.model_executor.models.step3p5:_get_num_attention_heads",
        parameters=("config", "layer_idx", "layer_type"),
        replace=_heads_of_the_targets_layers,
        why="heads of layers with full attention are looked up in the target's list, which the MTP layers lie past: a "
        "draft with such a layer fails to start (IndexError). A layer of the target of the same type has as many.",
        upstream="none yet",
        until="vLLM looks up the heads of MTP layers",
        versions=SpecifierSet(">=0.33"),
    ),
)


# The architectures that a proposer of ours was built for in this process. Where there is none, the patches of code that
# other methods run too must leave it as it is.
_built: list[str] = []


# Drafting: the V1 runner asks `use_step3p5_mtp()` whether to take its multi-group branch, builds what the name
# `Step3p5MTPProposer` stands for in its module, and hands block tables per group to instances of that name.


def _is_multi_group(original: Any) -> Any:
    def use_step3p5_mtp(self: Any) -> bool:
        _say_why_not(self)
        return is_known(self) or original(self)

    return use_step3p5_mtp


def _say_why_not(config: Any) -> None:
    if reason := why_left_to_the_host(config):
        logger.info("vLLM's own proposer drafts: vllm-mtp-proposers %s.", reason)


def _say_who_drafts(drafter: type, architecture: str, runner: str, num_speculative_tokens: int) -> None:
    logger.info(
        "%s.%s drafts for %s on the %s model runner, %d tokens a step, instead of vLLM's own "
        "(MTP_PROPOSERS=upstream switches back).",
        drafter.__module__,
        drafter.__name__,
        architecture,
        runner,
        num_speculative_tokens,
    )


def _build_known(original: type) -> type:
    class KnownProposer(type):
        """Stands for all our proposers under one name of the host: a call builds, `isinstance` recognises."""

        def __call__(cls, vllm_config: Any, device: Any, runner: Any = None) -> Any:
            config = vllm_config.speculative_config
            architecture = known_architecture(config)
            if architecture is None:
                return original(vllm_config, device, runner)
            proposer = load_proposer(architecture)
            _built.append(architecture)
            _say_who_drafts(proposer, architecture, "V1", config.num_speculative_tokens)
            return proposer(vllm_config, device, runner)

        def __instancecheck__(cls, instance: object) -> bool:
            from proposers.v1 import MultiGroupProposer

            return isinstance(instance, MultiGroupProposer | original)

    return KnownProposer("Step3p5MTPProposer", (), {})


def _route_to_v1(original: Any) -> Any:
    def _get_v2_model_runner_unsupported_features(self: Any) -> list[str]:
        import vllm.envs as envs

        features: list[str] = original(self)
        if envs.VLLM_USE_V2_MODEL_RUNNER:
            return features
        reason = _why_on_v1(self)
        return features if reason is None or not _fits_on_v1(self) else [*features, reason]

    return _get_v2_model_runner_unsupported_features


def _why_on_v1(vllm_config: Any) -> str | None:
    """Why this package wants the V1 runner, where it does."""
    if extracts(vllm_config.speculative_config):
        return "extraction by vllm-mtp-proposers by default (VLLM_USE_V2_MODEL_RUNNER=1 keeps V2)"
    architecture = known_architecture(vllm_config.speculative_config)
    if architecture is not None and (reason := _why_not_on_v2(vllm_config, architecture)):
        kept = "VLLM_USE_V2_MODEL_RUNNER=1 keeps V2 and its speculator"
        return f"drafting by vllm-mtp-proposers here: {reason} ({kept})"
    return None


def _fits_on_v1(vllm_config: Any) -> bool:
    """Whether the V1 runner takes the configuration; there are features that only V2 has, and some that ask for it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    only_on_v2 = (
        getattr(vllm_config, "watermark_config", None),
        getattr(vllm_config.attention_config, "hisparse_config", None),
        getattr(model, "enable_trace_replay", False),
        getattr(model, "return_sampling_mask", False),
        parallel.pipeline_parallel_size > 1,  # with asynchronous scheduling, which may be decided on later
    )
    return not any(only_on_v2) and not vllm_config._get_v1_model_runner_unsupported_features()


def _build_speculator(original: Any) -> Any:
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        config = vllm_config.speculative_config
        if extracts(config):
            return _new_extractor(vllm_config, device)
        architecture = known_architecture(config)
        if architecture is None:
            _say_why_not(config)
            return original(vllm_config, device, req_states)
        if reason := _why_not_on_v2(vllm_config, architecture):
            logger.warning("vLLM's own speculator drafts for %s on the V2 model runner: %s.", architecture, reason)
            return original(vllm_config, device, req_states)
        speculator = load_speculator(architecture)
        _say_who_drafts(speculator, architecture, "V2", config.num_speculative_tokens)
        return speculator(vllm_config, device)

    return init_speculator


def _why_not_on_v2(vllm_config: Any, architecture: str) -> str | None:
    """Why this package doesn't draft on the V2 runner, where it doesn't."""
    parallel = vllm_config.parallel_config
    reasons = {
        "models of one module are left to vLLM's there": architecture not in SPECULATORS,
        "vllm-mtp-proposers has no data parallelism there": parallel.data_parallel_size > 1,
        "vllm-mtp-proposers has no adaptive verification": vllm_config.speculative_config.enable_adaptive_verification,
        "vllm-mtp-proposers has no watermarking": getattr(vllm_config, "watermark_config", None) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _drafts_up_to_the_limit(original: Any) -> Any:
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        from proposers.v1 import MultiGroupProposer

        # A draft that is limited to shorter sequences than its target can't run past its own limit.
        limited = self.effective_drafter_max_model_len < self.max_model_len
        if limited or not isinstance(self.drafter, MultiGroupProposer):
            return original(self, common_attn_metadata)
        return common_attn_metadata is not None

    return _input_fits_in_drafter


def _key_blocks_by_what_follows(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        config = vllm_config.speculative_config
        architecture = _keyed_for(vllm_config)
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


def _keyed_for(vllm_config: Any) -> str | None:
    """The architecture whose draft rows the prefix cache's keys must know of; None where vLLM's keys stay."""
    architecture = known_architecture(vllm_config.speculative_config)
    if architecture is None or (vllm_config.use_v2_model_runner and _why_not_on_v2(vllm_config, architecture)):
        return None
    events = vllm_config.kv_events_config
    if vllm_config.kv_transfer_config is not None or (events is not None and events.enable_kv_cache_events):
        logger.warning(
            "A KV connector, or who listens to KV cache events, counts on vLLM's keys of the prefix cache, which don't "
            "know the tokens after a block: the first drafts after a prefix hit may rest on another request's tokens. "
            "Outputs are not affected."
        )
        return None
    return architecture


def _drop_graphs_first(original: Any) -> Any:
    def shutdown(self: Any) -> None:
        # By its name: this is called while the interpreter ends, too, and nothing can be imported then.
        runner = getattr(self, "model_runner", None)
        for drafter in (getattr(runner, "drafter", None), getattr(runner, "speculator", None)):
            if drop_graphs := getattr(drafter, "drop_graphs", None):
                drop_graphs()
        original(self)

    return shutdown


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
        upstream=_NO_REGISTRY,
        until=_PLUGIN_PROPOSERS,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:Step3p5MTPProposer",
        parameters=("vllm_config", "device", "runner"),
        replace=_build_known,
        why="the runner builds its multi-group proposer, and recognises it later, by this name.",
        upstream=_NO_REGISTRY,
        until=_PLUGIN_PROPOSERS,
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
        target="vllm.v1.worker.gpu_worker:Worker.shutdown",
        parameters=("self",),
        replace=_drop_graphs_first,
        why="a recorded pass of tensor-parallel ranks gathers logits by NCCL, which is not destroyed before the graph "
        "is: the process would not end. V1 leaves its drafter alone at shutdown, V2 only lets go of it.",
        upstream="none yet",
        until="both runners tell their drafters to shut down",
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
        why="on CUDA the V2 runner is the default; what this package does on V1 alone goes there, and extraction, "
        "until V2 has been measured not to be the slower for it.",
        upstream="none yet",
        until="this package does all on V2",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:init_speculator",
        parameters=("vllm_config", "device", "req_states"),
        replace=_build_speculator,
        why="the V2 runner builds its speculator by this name, which its module has imported.",
        upstream=_NO_REGISTRY,
        until=_PLUGIN_PROPOSERS,
    ),
)


# Hidden-state extraction: the method is vLLM's, and so are its config keys; the runner builds and recognises its
# proposer by the name `ExtractHiddenStatesProposer` in its module. These patches touch code that every engine runs, and
# act only where the method is `extract_hidden_states`.


def _draft_nothing(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        if extracts(self.speculative_config):
            check_and_draft_nothing(self)
        original(self)

    return __post_init__


def _copy_as_given(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("speculative_config")
        if extracts(config):
            config.num_speculative_tokens = config.num_speculative_tokens or 1
        original(self, *args, **kwargs)

    return __init__


def _other_graph(original: Any) -> Any:
    def compute_hash(self: Any) -> str:
        digest: str = original(self)
        return f"{digest}-captured" if extracts(self) else digest

    return compute_hash


def _build_extractor(original: type) -> type:
    class Extractor(type):
        """Stands for our proposer under the host's name, as `KnownProposer` does."""

        def __call__(cls, vllm_config: Any, device: Any) -> Any:
            return _new_extractor(vllm_config, device)

        def __instancecheck__(cls, instance: object) -> bool:
            return _is_extractor(instance) or isinstance(instance, original)

    return Extractor("ExtractHiddenStatesProposer", (), {})


def _new_extractor(vllm_config: Any, device: Any) -> Any:
    from proposers.hidden_states.extractor import ExtractHiddenStatesProposer

    proposer = ExtractHiddenStatesProposer(vllm_config, device)
    logger.info(
        "%s.%s keeps the hidden states %s of every token, instead of vLLM's own proposer "
        "(MTP_PROPOSERS=upstream switches back).",
        type(proposer).__module__,
        type(proposer).__name__,
        list(proposer.plan.layer_ids),
    )
    return proposer


def _is_extractor(drafter: object) -> bool:
    from proposers.hidden_states.extractor import ExtractHiddenStatesProposer

    return isinstance(drafter, ExtractHiddenStatesProposer)


def _extractor_of(runner: Any) -> Any:
    drafter = getattr(runner, "drafter", None)
    return drafter if _is_extractor(drafter) else None


def _run_as_without_drafts(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, device: Any) -> None:
        original(self, vllm_config, device)
        if _is_extractor(getattr(self, "speculator", None)):  # on V2, which would ask it for drafts
            self.drafter, self.speculator = self.speculator, None
        if _extractor_of(self) is not None:
            self.speculative_config = None
            self.use_aux_hidden_state_outputs = False

    return __init__


def _hook_model(original: Any) -> Any:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if extractor := _extractor_of(self):
            extractor.load_model(self.model)

    return load_model


def _allocate_rows_too(original: Any) -> Any:
    def initialize_kv_cache_tensors(
        self: Any, kv_cache_config: Any, kernel_block_sizes: Any, kv_cache_allocation_context: Any = None
    ) -> Any:
        def allocate(context: Any) -> Any:
            return original(self, kv_cache_config, kernel_block_sizes, context)

        return _with_rows(self, kv_cache_config, kv_cache_allocation_context, allocate)

    return initialize_kv_cache_tensors


def _allocate_rows_too_on_v2(original: Any) -> Any:
    def initialize_kv_cache(
        self: Any, kv_cache_config: Any, is_profiling: bool = False, kv_cache_allocation_context: Any = None
    ) -> None:
        def allocate(context: Any) -> None:
            original(self, kv_cache_config, is_profiling, context)

        _with_rows(self, kv_cache_config, kv_cache_allocation_context, allocate)

    return initialize_kv_cache


def _with_rows(runner: Any, kv_cache_config: Any, context: Any, allocate: Callable[[Any], Any]) -> Any:
    """The host's allocation of its KV cache, in its context, and ours after it in the same."""
    extractor = _extractor_of(runner)
    if extractor is None:
        return allocate(context)
    rows: list[Any] = []

    @contextmanager
    def with_rows() -> Iterator[None]:
        with context or nullcontext():
            yield
            rows.append(extractor.allocate(kv_cache_config))

    result = allocate(with_rows())
    # Where the host copies blocks, it copies every tensor of this list.
    runner.kv_caches += [tensor for tensor in rows if tensor is not None]
    return result


def _bill_rows(original: Any) -> Any:
    def pool_bytes_per_block(*arguments: Any) -> int:
        *_, vllm_config, kv_cache_groups = arguments  # after the builder, where there is one
        bytes_per_block: int = original(*arguments)
        return bytes_per_block + _row_bytes_per_block(vllm_config, kv_cache_groups)

    return pool_bytes_per_block


def _leave_room_for_rows(original: Any) -> Any:
    def get_kv_cache_config_from_groups(vllm_config: Any, kv_cache_groups: Any, available_memory: int) -> Any:
        if row_bytes := _row_bytes_per_block(vllm_config, kv_cache_groups):
            from vllm.v1.core.kv_cache_utils import _pool_bytes_per_block

            billed = _pool_bytes_per_block(vllm_config, kv_cache_groups)
            available_memory = available_memory // billed * (billed - row_bytes)
        return original(vllm_config, kv_cache_groups, available_memory)

    return get_kv_cache_config_from_groups


def _row_bytes_per_block(vllm_config: Any, kv_cache_groups: Any) -> int:
    if not extracts(vllm_config.speculative_config):
        return 0
    from mtp.store import supplementary_bytes_per_block

    return supplementary_bytes_per_block(kv_cache_groups, ExtractionPlan.of(vllm_config).row_bytes)


def _hold_back_until_written(original: Any) -> Any:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = original(self, scheduler_output, model_runner_output)
        hold_back = getattr(self.connector, "hold_back", None)
        return outputs if hold_back is None else hold_back(outputs)

    return update_from_output


EXTRACTION = (
    Patch(
        target="vllm.config.vllm:VllmConfig.__post_init__",
        parameters=("self",),
        replace=_draft_nothing,
        why="vLLM drafts the token it has just sampled, which is never right, and verifies two positions a step; with "
        "no drafts at all it verifies one. Layer ids and configurations are checked here, before a process starts.",
        upstream="none yet",
        until="vLLM's extraction drafts nothing and checks its layer ids",
    ),
    Patch(
        target="vllm.config.vllm:VllmConfig.__init__",
        parameters=("__dataclass_self__", "args", "kwargs"),
        replace=_copy_as_given,
        why="a copy of a config is validated like a new one, and no drafts would be refused.",
        upstream="none yet",
        until="vLLM's extraction drafts nothing",
    ),
    Patch(
        target="vllm.config.speculative:SpeculativeConfig.compute_hash",
        parameters=("self",),
        replace=_other_graph,
        why="the compiled graph has the captures in it, so it must not be taken for vLLM's, nor vLLM's for it.",
        upstream="none yet",
        until="never: it goes with the captures",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:ExtractHiddenStatesProposer",
        parameters=("vllm_config", "device"),
        replace=_build_extractor,
        why="the runner builds its proposer, and recognises it later, by this name.",
        upstream=_NO_REGISTRY,
        until=_PLUGIN_PROPOSERS,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__",
        parameters=("self", "vllm_config", "device"),
        replace=_run_as_without_drafts,
        why="with a speculative config the runner wants the EAGLE3 interface of the model, a draft per request, the "
        "rejection sampler in every step, and recurrent states by accepted drafts. The captures are hooks of the "
        "model, so its steps can be those of an engine without speculation.",
        upstream=_NO_REGISTRY,
        until=_PLUGIN_PROPOSERS,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache_tensors",
        parameters=("self", "kv_cache_config", "kernel_block_sizes", "kv_cache_allocation_context"),
        replace=_allocate_rows_too,
        why="the rows are allocated after the KV cache and in its memory pool, so that sleep mode releases them too.",
        upstream="none yet",
        until="a KVCacheConfig can hold supplementary tensors",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__",
        parameters=("self", "vllm_config", "device"),
        replace=_run_as_without_drafts,
        why="as on the V1 runner: its steps are those of an engine without speculation, and our proposer stands aside.",
        upstream=_NO_REGISTRY,
        until=_PLUGIN_PROPOSERS,
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
        parameters=("self", ...),
        replace=_hook_model,
        why="the V2 runner shows its model to nobody but a speculator of its own kind.",
        upstream=_NO_REGISTRY,
        until=_PLUGIN_PROPOSERS,
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
        parameters=("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        replace=_allocate_rows_too_on_v2,
        why="as on the V1 runner: the rows are allocated after the KV cache and in its memory pool.",
        upstream="none yet",
        until="a KVCacheConfig can hold supplementary tensors",
    ),
    Patch(
        target="vllm.v1.core.kv_cache_utils:_pool_bytes_per_block",
        parameters=("vllm_config", "kv_cache_groups"),
        replace=_bill_rows,
        why="a block of the pool costs its rows too, wherever the host checks that memory suffices.",
        upstream="none yet",
        until="a KVCacheConfig can hold supplementary tensors",
        versions=SpecifierSet("<0.33"),
    ),
    Patch(
        target="vllm.v1.core.kv_cache_planning:_pool_bytes_per_block_from_builder",
        parameters=("builder", "vllm_config", "kv_cache_groups"),
        replace=_bill_rows,
        why="a block of the pool costs its rows too: both what memory suffices for and the number of blocks are by it.",
        upstream="none yet",
        until="a KVCacheConfig can hold supplementary tensors",
        versions=SpecifierSet(">=0.33"),
    ),
    Patch(
        target="vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups",
        parameters=("vllm_config", "kv_cache_groups", "available_memory"),
        replace=_leave_room_for_rows,
        why="the number of blocks is what remains after the rows have had their share.",
        upstream="none yet",
        until="a KVCacheConfig can hold supplementary tensors",
        versions=SpecifierSet("<0.33"),
    ),
    Patch(
        target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        parameters=("self", "scheduler_output", "model_runner_output"),
        replace=_hold_back_until_written,
        why="a finished output leaves in the step in which the request ends, and a connector's transfers begin in the "
        "next: the path in it would be that of a file which doesn't exist yet, or never will.",
        upstream="none yet",
        until="a connector can hold back the outputs of requests whose transfer is not done",
    ),
)
