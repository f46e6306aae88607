"""The version guard, the guards of every patch, and the ledger against the installed vLLM."""

import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import vllm
from vllm.config.speculative import SpeculativeConfig

from proposers.host import LEDGER, ON, START_UP
from proposers.host import patching as compat
from proposers.host.patching import (
    HostMismatchError,
    Patch,
    apply_patches,
    check_vllm_version,
    installed_patches,
    remove_patches,
)
from proposers.plugin import register

# What the installed release needs. The rest is there for another one, on which these tests run as well.
NEEDED = [entry for entry in LEDGER if entry.is_for(vllm.__version__)]
HOST = "host_of_compat_tests"


@pytest.fixture
def host(unpatched: None) -> Iterator[ModuleType]:
    """A module that stands for the host: two functions, and a class with a method and a static method."""
    module = ModuleType(HOST)

    class Thing:
        def method(self, a: int) -> int:
            return a

        @staticmethod
        def static(a: int, b: int = 2) -> int:
            return a * b

    def first(a: int) -> int:
        return a

    def second(a: int) -> int:
        return -a

    module.Thing, module.first, module.second = Thing, first, second
    sys.modules[HOST] = module
    yield module
    remove_patches()
    del sys.modules[HOST]


def patch(target: str, *parameters: str, **fields: Any) -> Patch:
    """A patch that makes the target return a hundred more."""

    def replace(original: Any) -> Any:
        return lambda *args: original(*args) + 100

    entry = {"replace": replace, "why": "a test.", "upstream": "none", "until": "never"} | fields
    return Patch(target=f"{HOST}:{target}", parameters=parameters, **entry)


def attributes(module: ModuleType) -> list[Any]:
    static = inspect.getattr_static
    return [module.first, module.second, static(module.Thing, "method"), static(module.Thing, "static")]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0rc1", "0.32.0+cpu", "0.33.1.dev5"])
def test_a_supported_version_passes(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "0.9.2"])
def test_an_unsupported_version_is_refused_with_both_versions_and_a_remedy(version: str) -> None:
    with pytest.raises(
        HostMismatchError, match=f"supports vLLM .*0.32.* and found {re.escape(version)}.*MTP_PROPOSERS=off"
    ):
        check_vllm_version(version)


@pytest.mark.usefixtures("unpatched")
def test_an_unsupported_version_leaves_the_host_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    before = [found(entry) for entry in NEEDED]
    with pytest.raises(HostMismatchError):
        register()
    assert installed_patches() == ()
    assert [found(entry) for entry in NEEDED] == before


def test_functions_methods_and_static_methods_are_replaced_and_put_back(host: ModuleType) -> None:
    before = attributes(host)
    patches = [patch("first", "a"), patch("Thing.method", "self", "a"), patch("Thing.static", "a", "b")]
    apply_patches(patches, "0.32.0")
    assert (host.first(1), host.second(1), host.Thing().method(1)) == (101, -1, 101)
    assert (host.Thing.static(1, 2), host.Thing().static(3, 2)) == (102, 106)
    assert installed_patches() == tuple(p.target for p in patches)
    remove_patches()
    assert attributes(host) == before
    assert installed_patches() == ()


def test_a_patch_is_installed_once(host: ModuleType) -> None:
    for _ in range(3):
        apply_patches([patch("first", "a")], "0.32.0")
    assert host.first(1) == 101


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (("third", "a"), "vLLM has no host_of_compat_tests:third .*needed because: a test."),
        (("Other.method", "self"), "vLLM has no host_of_compat_tests:Other.method"),
        (("Thing.other", "self"), "vLLM has no host_of_compat_tests:Thing.other"),
        (("second", "a", "b"), r"second takes \('a',\) in this vLLM, and \('a', 'b'\) was expected"),
        (("second", "b"), r"second takes \('a',\) in this vLLM, and \('b',\) was expected"),
        (("Thing.static", "a"), r"static takes \('a', 'b'\) in this vLLM, and \('a',\) was expected"),
    ],
)
def test_a_target_that_is_missing_or_differs_leaves_the_host_untouched(
    host: ModuleType, bad: tuple[str, ...], message: str
) -> None:
    before = attributes(host)
    with pytest.raises(HostMismatchError, match=message) as failure:
        apply_patches([patch("first", "a"), patch(*bad), patch("Thing.method", "self", "a")], "0.32.0")
    assert "MTP_PROPOSERS=off" in str(failure.value)
    assert attributes(host) == before
    assert installed_patches() == ()


def test_a_module_that_is_missing_is_a_mismatch(host: ModuleType) -> None:
    missing = Patch("no_such_module:thing", ("a",), lambda original: original, "a test.", "none", "never")
    with pytest.raises(HostMismatchError, match="vLLM has no no_such_module:thing"):
        apply_patches([missing], "0.32.0")


def test_a_patch_stays_away_from_releases_that_do_not_need_it(host: ModuleType) -> None:
    before = attributes(host)
    old = patch("first", "a", versions=compat.SpecifierSet("<0.33"))
    apply_patches([old], "0.33.0")
    assert attributes(host) == before
    apply_patches([old], "0.32.1")
    assert host.first(1) == 101


def test_a_patched_function_can_be_pickled_by_the_originals_name() -> None:
    # The draft's config holds this function, and vLLM sends its config to spawned workers.
    register()
    assert SpeculativeConfig.hf_config_override is pickle.loads(pickle.dumps(SpeculativeConfig.hf_config_override))


def found(entry: Patch) -> Any:
    """The target's present value."""
    module, _, path = entry.target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return inspect.getattr_static(owner, name)


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("entry", NEEDED, ids=lambda entry: entry.target)
def test_every_entry_of_the_ledger_fits_the_installed_vllm(entry: Patch) -> None:
    original = found(entry)
    apply_patches([entry], vllm.__version__)
    assert installed_patches() == (entry.target,)
    assert found(entry) is not original
    remove_patches()
    assert found(entry) is original


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.target)
def test_every_entry_of_the_ledger_says_why_it_is_there_and_when_it_can_go(entry: Patch) -> None:
    assert len(entry.why) > 20
    assert entry.upstream.startswith(("vllm-project/vllm#", "none yet"))
    assert entry.until


def test_no_target_is_patched_twice() -> None:
    targets = [entry.target for entry in LEDGER]
    assert len(set(targets)) == len(targets)


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize(("mode", "ledger"), [("on", START_UP + ON), ("upstream", START_UP), ("off", ())])
def test_every_mode_installs_its_part_of_the_ledger(
    mode: str, ledger: tuple[Patch, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTP_PROPOSERS", mode)
    register()
    register()
    assert set(installed_patches()) == {entry.target for entry in ledger if entry in NEEDED}
