"""What is installed: every package, and nothing that needs the rest of a checkout."""

import re
import tomllib

from tests.support.children import ROOT

PARTS = ("mtp", "proposers", "bench")


def test_every_package_is_built_and_no_other() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [path.parent.relative_to(ROOT) for part in PARTS for path in (ROOT / part).rglob("__init__.py")]
    assert sorted(built) == sorted(".".join(path.parts) for path in found)


def test_every_folder_with_modules_is_a_package() -> None:
    # A folder without an __init__.py can be imported all the same in a checkout, and is missing from what is installed.
    modules = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    assert [str(path) for path in modules if not path.with_name("__init__.py").exists()] == []


def test_nothing_that_is_installed_needs_what_is_not() -> None:
    needs = re.compile(r"""^\s*(from|import) (tests|tools)\b|["'](tests|tools)\.""", re.MULTILINE)
    modules = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    assert [str(path) for path in modules if needs.search(path.read_text())] == []
