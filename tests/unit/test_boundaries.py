"""Which part of the tree may import which, in the sources and in what a process has loaded."""

import ast
import json
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.children import ROOT, run_python

RUNNERS = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_input_batch",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu",
    "vllm.v1.worker.gpu",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.spec_decode.llm_base_proposer",
)
"""The model runners of vLLM and what belongs to one of them: their batches, and the base classes of their drafters."""

MAY_NOT = {
    "mtp": (*RUNNERS, "proposers", "bench", "tests", "tools"),
    "proposers": ("bench", "tests", "tools"),
    "bench": ("tests", "tools"),
}


def modules(package: str) -> dict[str, Path]:
    """The package's modules by name."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return dict(zip(names, files, strict=True))


def imported(file: Path, everywhere: bool = True) -> set[str]:
    """The dotted names that a module imports; without `everywhere` only when it is itself imported."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree)) if everywhere else list(tree.body)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def lies_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("package", MAY_NOT)
def test_no_module_imports_what_its_package_may_not_know(package: str) -> None:
    found = modules(package)
    assert found
    wrong = {(name, x) for name, file in found.items() for x in imported(file) if lies_in(x, MAY_NOT[package])}
    assert wrong == set()


def test_the_framework_loads_no_runner_even_by_what_it_imports() -> None:
    code = f"import sys, json, {', '.join(modules('mtp'))}; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run_python(code).splitlines()[-1])
    assert "mtp.passes" in loaded
    assert [name for name in loaded if lies_in(name, MAY_NOT["mtp"])] == []


@pytest.mark.parametrize("package", MAY_NOT)
def test_no_two_modules_import_each_other(package: str) -> None:
    found = modules(package)

    def inside(name: str) -> str:
        """The module of the package that a dotted name is of, or lies in."""
        while name not in found and "." in name:
            name = name.rpartition(".")[0]
        return name

    graph = {name: {inside(x) for x in imported(file, everywhere=False)} - {name} for name, file in found.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
