"""Whether the host's forward is the one that a fused forward was written for."""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class KnownForwards:
    """The modules of the host whose forwards one of ours stands in for, and what their text was when it was written.

    Attributes:
        modules: classes, in a fixed order.
        digest: of the text of their forwards (`source_digest`).
    """

    modules: tuple[type[nn.Module], ...]
    digest: str

    def holds(self) -> bool:
        """Whether they are those of the host now: of another release, or changed by somebody, they are not."""
        return source_digest(*(module.forward for module in self.modules)) == self.digest


def source_digest(*functions: Callable[..., Any]) -> str:
    """Names the text of functions of the host.

    Empty where there is none to be read, or where somebody has put another function before one of them.
    """
    try:
        text = "".join(inspect.getsource(function) for function in functions)
    except (OSError, TypeError):
        return ""
    if any(hasattr(function, "__wrapped__") for function in functions):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
