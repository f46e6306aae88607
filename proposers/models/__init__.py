"""From a draft architecture to its proposer. Import-light: front ends ask it too."""

import importlib
import os
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

    from proposers.v1 import MultiGroupProposer
    from proposers.v2 import MultiGroupSpeculator

PROPOSERS = {
    "Step3p5MTP": "proposers.models.step3p5:Step3p5Proposer",
    "MiMoMTPModel": "proposers.models.mimo:MiMoProposer",
}
"""What drafts for an architecture on vLLM's V1 model runner."""

SPECULATORS = {
    "Step3p5MTP": "proposers.v2:Step3p5Speculator",
}
"""And on V2. Models of one module stay with the host's speculator there, which makes the same drafts."""


class Mode(StrEnum):
    """What `MTP_PROPOSERS` asks for."""

    ON = "on"
    """Known architectures are drafted for by this package."""
    UPSTREAM = "upstream"
    """vLLM's own proposers, with the start-up fixes only."""
    OFF = "off"
    """Nothing is installed."""

    @classmethod
    def from_env(cls) -> "Mode":
        """Raises `ValueError` for a word that it doesn't know."""
        word = os.environ.get("MTP_PROPOSERS", cls.ON)
        if word not in list(cls):
            raise ValueError(f"MTP_PROPOSERS={word!r} is not a mode: set it to one of {', '.join(cls)}, or unset it.")
        return cls(word)


def draft_architecture(config: "SpeculativeConfig") -> str | None:
    """The architecture that drafts under `"method": "mtp"`, else None."""
    if config.method != "mtp" or config.draft_model_config is None:
        return None
    architectures = getattr(config.draft_model_config.hf_config, "architectures", None)
    return architectures[0] if architectures else None


def why_left_to_the_host(config: "SpeculativeConfig") -> str | None:
    """Why this package doesn't draft though the method is `mtp`; None where it does, and for other methods."""
    architecture = draft_architecture(config)
    if architecture is None:
        return None
    if architecture not in PROPOSERS:
        return f"knows {', '.join(PROPOSERS)} and not {architecture}"
    parallel = config.target_parallel_config
    reasons = {
        "has no pipeline parallelism": "pipeline_parallel_size",
        "has no context parallelism": "decode_context_parallel_size",
        "has no context parallelism for prompts": "prefill_context_parallel_size",
    }
    return next((reason for reason, size in reasons.items() if getattr(parallel, size, 1) > 1), None)


def known_architecture(config: "SpeculativeConfig | None") -> str | None:
    """The architecture that drafts if this package drafts for it, else None."""
    if config is None or why_left_to_the_host(config) is not None:
        return None
    return draft_architecture(config)


def is_known(config: "SpeculativeConfig | None") -> bool:
    """Whether this package drafts for the model."""
    return known_architecture(config) is not None


def load_proposer(architecture: str) -> "type[MultiGroupProposer]":
    proposer: Any = _load(PROPOSERS[architecture])
    return proposer


def load_speculator(architecture: str) -> "type[MultiGroupSpeculator]":
    speculator: Any = _load(SPECULATORS[architecture])
    return speculator


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
