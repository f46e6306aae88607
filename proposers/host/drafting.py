"""Drafting: both model runners build our proposers in place of their own.

The V1 runner asks `use_step3p5_mtp()` whether to take its multi-group branch, builds what the name
`Step3p5MTPProposer` stands for in its module, and hands block tables per group to instances of that name. V2 builds its
speculator by `init_speculator`.
"""

import functools
import logging
from typing import Any

from proposers.architecture import Architecture, architecture_of, why_left_to_the_host, why_not_on_v2
from proposers.host import rejection_sampling
from proposers.host.patching import apply_patches, patch, stand_in
from proposers.lookahead import keyed_lookahead
from proposers.options import FROM_ENVIRONMENT, Options

logger = logging.getLogger("vllm.proposers")

# Of several patches.
NO_REGISTRY = "none yet: the runner has no registry of proposers"
PLUGIN_PROPOSERS = "vLLM lets a plugin name the proposer of a method"


@functools.cache
def _v1_proposer() -> type:
    """Imported once it is asked for: the runner asks in every step, and an import statement takes its time."""
    from proposers.v1 import MultiGroupProposer

    return MultiGroupProposer


def _drafts_on_v1(drafter: object) -> bool:
    return isinstance(drafter, _v1_proposer())


def _say_why_not(config: Any) -> None:
    if reason := why_left_to_the_host(config):
        logger.info("vLLM's own proposer drafts: vllm-mtp-proposers %s.", reason)


def _say_what_has_no_effect(vllm_config: Any) -> None:
    options = Options.of(vllm_config)
    unused = [name for name in FROM_ENVIRONMENT if getattr(options, name) is not None]
    if unused:
        logger.warning("%s: no effect on drafts of vLLM's own.", " and ".join(unused))


def _before_drafting(drafter: type, architecture: Architecture, runner: str, vllm_config: Any) -> None:
    """Says who drafts, and mends what the host's verification of drafts needs in this process."""
    import vllm

    apply_patches(rejection_sampling.PATCHES, vllm.__version__)
    logger.info(
        "%s.%s drafts for %s on the %s model runner, %d tokens a step, instead of vLLM's own "
        "(MTP_PROPOSERS=upstream switches back).",
        drafter.__module__,
        drafter.__name__,
        architecture.name,
        runner,
        vllm_config.speculative_config.num_speculative_tokens,
    )
    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    if draft.max_model_len < target.max_model_len:
        logger.warning(
            "Requests past %d tokens are not drafted for, since that is the draft's max_model_len; the model's is %d.",
            draft.max_model_len,
            target.max_model_len,
        )


@patch(
    "vllm.config.speculative:SpeculativeConfig.use_step3p5_mtp",
    ("self",),
    why="known architectures take the runner's multi-group branch.",
    upstream=NO_REGISTRY,
    until=PLUGIN_PROPOSERS,
)
def take_the_multi_group_branch(original: Any) -> Any:
    def use_step3p5_mtp(self: Any) -> bool:
        _say_why_not(self)
        return architecture_of(self) is not None or original(self)

    return use_step3p5_mtp


@patch(
    "vllm.v1.worker.gpu_model_runner:Step3p5MTPProposer",
    ("vllm_config", "device", "runner"),
    why="the runner builds its multi-group proposer, and recognises it later, by this name.",
    upstream=NO_REGISTRY,
    until=PLUGIN_PROPOSERS,
)
def build_proposer(original: type) -> type:
    def build(vllm_config: Any, device: Any, runner: Any = None) -> Any:
        config = vllm_config.speculative_config
        architecture = architecture_of(config)
        if architecture is None:
            return None
        proposer = architecture.load_proposer()
        _before_drafting(proposer, architecture, "V1", vllm_config)
        return proposer(vllm_config, device, runner)

    return stand_in(original, build, is_ours=_drafts_on_v1)


@patch(
    "vllm.v1.worker.gpu.model_runner:init_speculator",
    ("vllm_config", "device", "req_states"),
    why="the V2 runner builds its speculator by this name, which its module has imported.",
    upstream=NO_REGISTRY,
    until=PLUGIN_PROPOSERS,
)
def build_speculator(original: Any) -> Any:
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        config = vllm_config.speculative_config
        architecture = architecture_of(config)
        if architecture is None:
            _say_why_not(config)
            _say_what_has_no_effect(vllm_config)
            return original(vllm_config, device, req_states)
        if reason := why_not_on_v2(vllm_config, architecture):
            logger.warning("vLLM's own speculator drafts for %s on the V2 model runner: %s.", architecture.name, reason)
            _say_what_has_no_effect(vllm_config)
            return original(vllm_config, device, req_states)
        speculator = architecture.load_speculator()
        _before_drafting(speculator, architecture, "V2", vllm_config)
        return speculator(vllm_config, device)

    return init_speculator


@patch(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    ("self", "num_tokens", "num_reqs", ...),
    why="the host builds its step's metadata for the draft's layers, too, and gives its proposer what it builds it "
    "from. On a CPU building it again takes as long as a small layer.",
    upstream=NO_REGISTRY,
    until=PLUGIN_PROPOSERS,
)
def hand_over_metadata(original: Any) -> Any:
    def _build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        built = original(self, *args, **kwargs)
        take = getattr(getattr(self, "drafter", None), "take_step_metadata", None)
        if take is not None:
            take(built[0])
        return built

    return _build_attention_metadata


@patch(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter",
    ("self", "common_attn_metadata"),
    why="one request within K tokens of max_model_len, or of a draft's own shorter limit, makes the runner skip the "
    "pass for the whole batch, which leaves holes in everyone's draft cache; our passes pad what lies past the limit, "
    "and so do those of vLLM's own that write rows which the prefix cache's keys vouch for.",
    upstream="vllm-project/vllm#58080",
    until="the runner leaves positions past the limit to the drafter",
)
def draft_up_to_the_limit(original: Any) -> Any:
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        if common_attn_metadata is None:
            return False
        return (
            _drafts_on_v1(self.drafter) or original(self, common_attn_metadata) or keyed_lookahead(self.vllm_config) > 0
        )

    return _input_fits_in_drafter


@patch(
    "vllm.v1.worker.gpu_worker:Worker.shutdown",
    ("self",),
    why="a captured pass of tensor-parallel ranks gathers logits by NCCL, which is not destroyed before the graph "
    "is: the process would not end. V1 leaves its drafter alone at shutdown, V2 only lets go of it.",
    upstream="none yet",
    until="both runners tell their drafters to shut down",
)
def shut_down_proposers_first(original: Any) -> Any:
    # Imported now: this is called while the interpreter ends, too, and nothing can be imported then.
    from mtp.base import GroupProposer

    def shutdown(self: Any) -> None:
        runner = getattr(self, "model_runner", None)
        for name in ("drafter", "speculator", "hidden_states_extractor"):
            proposer = getattr(runner, name, None)
            if isinstance(proposer, GroupProposer):
                proposer.shutdown()
        original(self)

    return shutdown


PATCHES = (
    take_the_multi_group_branch,
    build_proposer,
    build_speculator,
    hand_over_metadata,
    draft_up_to_the_limit,
    shut_down_proposers_first,
)
