"""DeepSeek-V3: one module with latent attention."""

from typing import Any

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture


def _sparse(config: Any) -> str | None:
    """DeepSeek-V3.2's keys are chosen by an indexer, which has rows and a cache of its own."""
    return "doesn't know sparse attention (index_topk)" if hasattr(config, "index_topk") else None


ARCHITECTURE = Architecture(DraftDescriptor("DeepSeekMTPModel"), module_weights="model.layers.{layer}.", leaves=_sparse)
