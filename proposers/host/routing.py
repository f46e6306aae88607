"""Routing: which of vLLM's model runners a configuration goes to."""

from typing import Any

from proposers.architecture import architecture_of, why_not_on_v2
from proposers.hidden_states.plan import ExtractionPlan, asks_for_hidden_states
from proposers.host.patching import patch


@patch(
    "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
    ("self",),
    why="on CUDA the V2 runner is the default; what this package does on V1 alone goes there, and extraction, "
    "until V2 has been measured not to be the slower for it.",
    upstream="none yet",
    until="this package does all on V2",
)
def route_to_v1(original: Any) -> Any:
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
    if asks_for_hidden_states(vllm_config.speculative_config) and ExtractionPlan.of(vllm_config) is not None:
        return "extraction by vllm-mtp-proposers by default (VLLM_USE_V2_MODEL_RUNNER=1 keeps V2)"
    architecture = architecture_of(vllm_config.speculative_config)
    if architecture is not None and (reason := why_not_on_v2(vllm_config, architecture)):
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


PATCHES = (route_to_v1,)
