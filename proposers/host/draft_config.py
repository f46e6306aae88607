"""A draft's config: what a user overrides in the target's config holds for the MTP modules of the same checkpoint."""

import copy
import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, get_args

from proposers.host.patching import patch

_OF_THE_SAME_CHECKPOINT: ContextVar[bool] = ContextVar("draft_of_the_same_checkpoint", default=False)
"""While a speculative config is made: the target's own modules will draft."""


@patch(
    "vllm.config.speculative:SpeculativeConfig.__post_init__",
    ("self",),
    why="where a draft's config is composed nothing tells modules of the target's checkpoint from another draft model.",
    upstream="vllm-project/vllm#58080",
    until="vLLM hands a target's overrides on to the MTP modules of its checkpoint",
)
def know_whose_modules_draft(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        token = _OF_THE_SAME_CHECKPOINT.set(drafts_with_its_own_modules(self))
        try:
            original(self)
        finally:
            _OF_THE_SAME_CHECKPOINT.reset(token)

    return __post_init__


def drafts_with_its_own_modules(speculative_config: Any) -> bool:
    """As the user wrote it: `mtp`, or an older name of it, and no model."""
    from vllm.config.speculative import MTPModelTypes

    return speculative_config.model is None and speculative_config.method in ("mtp", *get_args(MTPModelTypes))


@patch(
    "vllm.config.speculative:SpeculativeConfig.compose_draft_hf_overrides",
    ("target_hf_overrides", ...),
    why="a dictionary of hf_overrides is left out of the draft's config, so modules of a model that was lengthened "
    "have the checkpoint's limit and rope, and the whole batch drafts nothing while one request is past that limit.",
    upstream="vllm-project/vllm#58080",
    until="vLLM hands a target's overrides on to the MTP modules of its checkpoint",
)
def hand_overrides_on(original: Any) -> Any:
    def compose_draft_hf_overrides(target_hf_overrides: Any, *args: Any, **kwargs: Any) -> Any:
        of_the_draft = original(target_hf_overrides, *args, **kwargs)
        if not _OF_THE_SAME_CHECKPOINT.get() or not target_hf_overrides or callable(target_hf_overrides):
            return of_the_draft
        # No closure: the draft's config is pickled on its way to the engine's process.
        return functools.partial(_override_as_the_target, dict(target_hf_overrides), of_the_draft)

    return compose_draft_hf_overrides


def _override_as_the_target(values: Mapping[str, Any], of_the_draft: Callable[[Any], Any], hf_config: Any) -> Any:
    """The target's overrides first, since what counts the modules may be among them."""
    from proposers.architecture import known_architectures

    overridden = copy.deepcopy(hf_config)
    override_values(overridden, values)
    config = of_the_draft(overridden)
    architectures = getattr(config, "architectures", None) or [None]
    return config if architectures[0] in known_architectures() else of_the_draft(hf_config)


def override_values(config: Any, values: Mapping[str, Any]) -> None:
    """As vLLM overrides a target's config: a part that is a config itself changes in part, all else is replaced."""
    from transformers import PreTrainedConfig

    for name, value in values.items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            _update_part(part, value)
        else:
            setattr(config, name, value)


def _update_part(part: Any, values: Mapping[str, Any]) -> None:
    inside = part if isinstance(part, dict) else vars(part)
    for name, value in values.items():
        if isinstance(value, Mapping) and (isinstance(inside.get(name), dict) or hasattr(inside.get(name), "__dict__")):
            _update_part(inside[name], value)
        elif isinstance(part, dict):
            part[name] = value
        else:
            setattr(part, name, value)


PATCHES = (know_whose_modules_draft, hand_overrides_on)
