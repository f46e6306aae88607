"""What ties the package to a vLLM release: the version guard and the machinery of host patches.

A patch replaces one attribute of the host, and stands beside its reason in one of the files of this folder, by subject.
All targets are checked before the first is touched: one that is missing or that has another signature leaves the host
as it was and raises. `proposers/host/__init__.py` is the ledger that lists them all.
"""

import functools
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


Replace = Callable[[Any], Any]


def patch(
    target: str,
    parameters: tuple[str | EllipsisType, ...],
    *,
    why: str,
    upstream: str,
    until: str,
    versions: SpecifierSet = SUPPORTED_VLLM,
) -> Callable[[Replace], Patch]:
    """Makes a patch of the function below it, which takes the original attribute and returns its replacement."""
    return lambda replace: Patch(target, parameters, replace, why, upstream, until, versions)


def stand_in(original: type, build: Callable[..., Any | None], is_ours: Callable[[object], bool]) -> type:
    """What takes the place of a class that the host builds, and recognises later, by its name.

    Args:
        build: from the host's arguments to ours in its place; None: the host's own.
        is_ours: whether `isinstance` is to take an object for one of that class though it is not.
    """

    class StandIn(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            built = build(*args, **kwargs)
            return original(*args, **kwargs) if built is None else built

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original) or is_ours(instance)

    return StandIn(original.__name__, (), {})


def check_vllm_version(version: str) -> None:
    """Raises `HostMismatchError` for a vLLM release outside `SUPPORTED_VLLM`."""
    if Version(version).base_version not in SUPPORTED_VLLM:
        raise HostMismatchError(
            f"vllm-mtp-proposers supports vLLM {SUPPORTED_VLLM} and found {version}. "
            "Install a supported vLLM, or set MTP_PROPOSERS=off to run this one without the plugin."
        )


def check_patches(patches: Sequence[Patch], vllm_version: str) -> None:
    """Raises `HostMismatchError` where a target that this release needs is missing or has other parameters."""
    for patch in patches:
        if patch.is_for(vllm_version) and patch.target not in _originals:
            _resolve(patch)


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


def remove_patches() -> None:
    """Puts the host back as it was found; for tests."""
    while _originals:
        target, original = _originals.popitem()
        owner, name = _owner(target)
        setattr(owner, name, original)


def installed_patches() -> tuple[str, ...]:
    """The targets that are patched in this process."""
    return tuple(_originals)


# What this process's host was like, by target.
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
