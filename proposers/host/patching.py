"""What ties the package to a vLLM release: the version guard and the machinery of host patches.

A patch replaces one attribute of the host. All targets are checked before the first is touched: one that is missing
or that has another signature leaves the host as it was and raises. The patches themselves stand in one ledger,
`proposers/plugin.py`.
"""

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.34", prereleases=True)


class HostMismatchError(RuntimeError):
    """The installed vLLM is not the one that this package was written for."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One entry of the ledger.

    Attributes:
        target: `module:attribute` or `module:Class.attribute`.
        parameters: names of the target's parameters, in order, which the guard compares; `...` stands for any others.
        replace: takes the original attribute and returns its replacement.
        why: what the patch is for.
        upstream: the upstream issue or pull request.
        until: when it can go.
        versions: vLLM releases that need it.
    """

    target: str
    parameters: tuple[str | EllipsisType, ...]
    replace: Callable[[Any], Any]
    why: str
    upstream: str
    until: str
    versions: SpecifierSet = SUPPORTED_VLLM

    def is_for(self, vllm_version: str) -> bool:
        return Version(vllm_version).base_version in self.versions


def check_vllm_version(version: str) -> None:
    """Raises `HostMismatchError` for a vLLM release outside `SUPPORTED_VLLM`."""
    if Version(version).base_version not in SUPPORTED_VLLM:
        raise HostMismatchError(
            f"vllm-mtp-proposers supports vLLM {SUPPORTED_VLLM} and found {version}. "
            "Install a supported vLLM, or set MTP_PROPOSERS=off to run this one without the plugin."
        )


def apply_patches(patches: Sequence[Patch], vllm_version: str) -> None:
    """Installs the patches that this release needs and that are not installed yet.

    Raises:
        HostMismatchError: a target is missing or has other parameters; nothing was changed.
    """
    pending = [p for p in patches if p.is_for(vllm_version) and p.target not in _originals]
    resolved = [(patch, *_resolve(patch)) for patch in pending]
    for patch, owner, name, original in resolved:
        _originals[patch.target] = original
        replacement = patch.replace(_unwrap(original))
        if inspect.isfunction(replacement):
            # Under the original's name: vLLM's configs hold such functions, and are pickled on their way to workers.
            functools.update_wrapper(replacement, _unwrap(original))
        setattr(owner, name, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)


def source_digest(*functions: Callable[..., Any]) -> str:
    """Names the text of functions of the host which something here stands in for.

    Empty where there is none to be read, or where somebody has put another function before one of them.
    """
    try:
        text = "".join(inspect.getsource(function) for function in functions)
    except (OSError, TypeError):
        return ""
    if any(hasattr(function, "__wrapped__") for function in functions):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def remove_patches() -> None:
    """Puts the host back as it was found; for tests."""
    while _originals:
        target, original = _originals.popitem()
        owner, name = _owner(target)
        setattr(owner, name, original)


def installed_patches() -> tuple[str, ...]:
    """The targets that are patched in this process."""
    return tuple(_originals)


_originals: dict[str, Any] = {}


def _owner(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def _unwrap(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod) else attribute


def _matches(parameters: Sequence[str], expected: Sequence[str | EllipsisType]) -> bool:
    if not expected:
        return not parameters
    if expected[0] is not ...:
        return bool(parameters) and parameters[0] == expected[0] and _matches(parameters[1:], expected[1:])
    return any(_matches(parameters[skipped:], expected[1:]) for skipped in range(len(parameters) + 1))


def _resolve(patch: Patch) -> tuple[Any, str, Any]:
    remedy = "Install a vLLM release that this package supports, or set MTP_PROPOSERS=off."
    try:
        owner, name = _owner(patch.target)
        original = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        message = f"vLLM has no {patch.target} ({error}), needed because: {patch.why} {remedy}"
        raise HostMismatchError(message) from error
    parameters = tuple(inspect.signature(_unwrap(original)).parameters)
    if not _matches(parameters, patch.parameters):
        raise HostMismatchError(
            f"{patch.target} takes {parameters} in this vLLM, and {patch.parameters} was expected. {remedy}"
        )
    return owner, name, original
