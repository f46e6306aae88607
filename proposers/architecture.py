"""`Architecture`: all that this package knows of one draft architecture, and the table of those that it knows.

Import-light, as front ends ask it too: an entry names classes by their path, and what it calls is imported on the first
call. A plugin of one's own adds an entry with `register` (docs/adding_an_architecture.md).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp.plan import DraftDescriptor

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig, VllmConfig


def _top_tokens_of_the_model(model: Any, hidden: "torch.Tensor", module: int) -> "torch.Tensor":
    tokens: torch.Tensor = model.get_top_tokens(hidden)
    return tokens


@dataclass(frozen=True, slots=True)
class Architecture:
    """One draft architecture. For most a descriptor is all there is to say.

    Attributes:
        descriptor: its modules, and what they take.
        proposer: path (`module:Class`) of what drafts on vLLM's V1 model runner.
        speculator: path of what drafts on V2; None where vLLM's own speculator is left to it, and then `why_not_on_v2`.
        why_not_on_v2: the reason, as the end of a sentence that begins with "vLLM's own speculator drafts: ".
        model_class: path of the draft's model class, where it is not vLLM's own.
        override_config: changes the draft's Hugging Face config after vLLM's own override of it.
        module_weights: how the names of a module's tensors begin, as `model.layers.{layer}.`, counted on from the
            target's, or `model.mtp.layers.{module}.`, counted from 0. With it a config is held against its checkpoint.
        counted_by: the key by which a checkpoint's config counts its modules, where that is not the descriptor's.
        fuse: has a loaded draft model run in fewer launches, and says whether its forward then takes `wanted`, the rows
            to compute to the end (`mtp.passes`).
        top_tokens: greedy tokens `[num_rows]` of hidden states `[num_rows, hidden_size]` by a module's head, reduced
            over tensor-parallel ranks without the logits.
        leaves: why a draft of this Hugging Face config is left to vLLM, as the end of a sentence that begins with the
            name of this package; None where it isn't.
        has_config_of_its_own: on V1, the draft's layers are built from the draft's config, which counts the modules in,
            and not from the target's.
    """

    descriptor: DraftDescriptor
    proposer: str = "proposers.v1:MultiGroupProposer"
    speculator: str | None = "proposers.v2:MultiGroupSpeculator"
    why_not_on_v2: str = ""
    model_class: str | None = None
    override_config: Callable[[Any], None] | None = None
    module_weights: str | None = None
    counted_by: str | None = None
    fuse: Callable[[Any], bool] | None = None
    top_tokens: Callable[[Any, "torch.Tensor", int], "torch.Tensor"] = _top_tokens_of_the_model
    leaves: Callable[[Any], str | None] | None = None
    has_config_of_its_own: bool = False

    def __post_init__(self) -> None:
        if (self.speculator is None) != bool(self.why_not_on_v2):
            raise ValueError(
                f"The entry of {self.name} has speculator={self.speculator!r} and why_not_on_v2="
                f"{self.why_not_on_v2!r}: give the path of a speculator, or None and the reason why there is none."
            )

    @property
    def name(self) -> str:
        return self.descriptor.architecture

    def load_proposer(self) -> type:
        return load_class(self.proposer)

    def load_speculator(self) -> type:
        assert self.speculator is not None, self.why_not_on_v2
        return load_class(self.speculator)


_registered: dict[str, Architecture] = {}


def register(architecture: Architecture) -> None:
    """Has this package draft for an architecture; one that is known already is replaced.

    To be called in every process of an engine, from a plugin in vLLM's group `vllm.general_plugins`, or, for an engine
    that stays in its process, before it is started.
    """
    _registered[architecture.name] = architecture
    register_model_class(architecture)


def register_model_class(architecture: Architecture) -> None:
    """Tells vLLM of the entry's model class, where it has one."""
    if architecture.model_class is not None:
        from vllm import ModelRegistry

        ModelRegistry.register_model(architecture.name, architecture.model_class)


def known_architectures() -> dict[str, Architecture]:
    """All entries, by the name of the draft's architecture."""
    from proposers import models

    return {architecture.name: architecture for architecture in models.ALL} | _registered


def load_class(path: str) -> Any:
    """What `module:name` stands for."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def draft_architecture(config: "SpeculativeConfig") -> str | None:
    """The architecture that drafts under `"method": "mtp"`, else None."""
    if config.method != "mtp" or config.draft_model_config is None:
        return None
    architectures = getattr(config.draft_model_config.hf_config, "architectures", None)
    return architectures[0] if architectures else None


def why_left_to_the_host(config: "SpeculativeConfig") -> str | None:
    """Why this package doesn't draft though the method is `mtp`; None where it does, and for other methods."""
    name = draft_architecture(config)
    if name is None:
        return None
    known = known_architectures()
    if name not in known:
        return f"knows {', '.join(known)} and not {name}"
    leaves = known[name].leaves
    if leaves is not None and (reason := leaves(config.draft_model_config.hf_config)):
        return reason
    parallel = config.target_parallel_config
    reasons = {
        "has no pipeline parallelism": "pipeline_parallel_size",
        "has no context parallelism": "decode_context_parallel_size",
        "has no context parallelism for prompts": "prefill_context_parallel_size",
    }
    return next((reason for reason, size in reasons.items() if getattr(parallel, size, 1) > 1), None)


def architecture_of(config: "SpeculativeConfig | None") -> Architecture | None:
    """The entry of the architecture that drafts if this package drafts for it, else None."""
    if config is None or why_left_to_the_host(config) is not None:
        return None
    name = draft_architecture(config)
    return None if name is None else known_architectures()[name]


def why_not_on_v2(vllm_config: "VllmConfig", architecture: Architecture) -> str | None:
    """Why this package doesn't draft on the V2 runner, where it doesn't."""
    reasons = {
        architecture.why_not_on_v2: architecture.speculator is None,
        "vllm-mtp-proposers has no data parallelism there": vllm_config.parallel_config.data_parallel_size > 1,
        "vllm-mtp-proposers has no adaptive verification": vllm_config.speculative_config.enable_adaptive_verification,
        "vllm-mtp-proposers has no watermarking": getattr(vllm_config, "watermark_config", None) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
