"""The installed package works without a checkout: a wheel in a virtual environment of its own, beside vLLM."""

import json
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.processes import child_environment
from tests.support.children import ROOT, TIME_LIMIT_S, TINY
from tests.support.oracle_children import assert_clean

PACKAGES = ("mtp", "proposers", "bench")
OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check")


@dataclass(frozen=True)
class Installation:
    """A virtual environment with this package in it, and a folder outside the checkout to run commands in."""

    environment: Path
    folder: Path

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run([str(self.environment / "bin" / "python"), *arguments], self.folder)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("installation")
    found = Installation(folder / "venv", folder)
    venv.create(found.environment, symlinks=True)
    python = found.environment / "bin" / "python"
    pip("--python", str(python), "install", *OFFLINE, str(build_wheel(folder)), folder=folder)
    # vLLM and the other dependencies are found by one more entry of sys.path. Unlike in a real site folder, .pth files
    # in there are not read, so that an editable installation of this project stays unknown.
    (site_packages,) = found.environment.glob("lib/python*/site-packages")
    beside = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site_packages / "beside.pth").write_text("\n".join(sorted(beside)))
    return found


def build_wheel(folder: Path) -> Path:
    """Builds what is packaged, by links to it: setuptools leaves folders beside its sources."""
    source, wheels = folder / "source", folder / "wheels"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    pip("wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(wheels), str(source), folder=folder)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def pip(*arguments: str, folder: Path) -> None:
    done = run([sys.executable, "-m", "pip", *arguments], folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = child_environment(MTP_PROPOSERS="on", PYTHONPATH="")
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )


def test_every_package_is_the_installed_one_and_vllm_finds_its_plugin(installation: Installation) -> None:
    code = (
        f"import json, {', '.join(PACKAGES)}; from importlib.metadata import entry_points; "
        "plugin, = entry_points(group='vllm.general_plugins', name='mtp_proposers'); register = plugin.load(); "
        f"print(json.dumps([module.__file__ for module in ({', '.join(PACKAGES)})] + [register.__code__.co_filename]))"
    )
    done = installation.python("-c", code)
    assert done.returncode == 0, done.stderr[-4000:]
    for path in json.loads(done.stdout):
        assert Path(path).is_relative_to(installation.environment)


def test_the_commands_are_there(installation: Installation) -> None:
    done = installation.python("-m", "bench", "--help")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "{compare,cost,demo,extract,gpu,oracle,prefix,serve}" in done.stdout


def test_a_draft_under_the_oracle_is_right(installation: Installation) -> None:
    schedule = ["--schedules", "1", "--setup", "chunks", "--seed", "1"]
    done = installation.python("-m", "bench", "oracle", *schedule, "--model", TINY, "--json", "report.json")
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((installation.folder / "report.json").read_text())
    assert report["schedules"] == 1
    assert_clean(report)


def test_without_a_model_the_oracle_says_to_give_one(installation: Installation) -> None:
    done = installation.python("-m", "bench", "oracle", "--schedules", "1")
    assert done.returncode == 2
    assert "give --model" in done.stderr
