"""Dense models in plain float32 PyTorch, one sequence at a time, by the architecture of a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.reference.dense import DenseModel

Build = Callable[[Path], "DenseModel"]


def _step3p5(folder: Path) -> "DenseModel":
    from bench.reference.dense import DenseModel

    return DenseModel(folder)


def _mimo(folder: Path) -> "DenseModel":
    from bench.reference.mimo import DenseMiMo

    return DenseMiMo(folder)


def _mimo_v2(folder: Path) -> "DenseModel":
    from bench.reference.mimo_v2 import DenseMiMoV2

    return DenseMiMoV2(folder)


_references: dict[str, Build] = {
    "Step3p5ForCausalLM": _step3p5,
    "MiMoForCausalLM": _mimo,
    "MiMoV2FlashForCausalLM": _mimo_v2,
    "MiMoV2ForCausalLM": _mimo_v2,
}


def register_reference(architecture: str, build: Build) -> None:
    """Has a checkpoint of this architecture held against the model that `build` makes of its folder."""
    _references[architecture] = build


def has_reference(folder: Path) -> bool:
    """Whether there is one for the checkpoint's architecture."""
    return architecture_of(folder) in _references


def dense_model(folder: Path) -> "DenseModel":
    """The reference of a checkpoint.

    Raises:
        ValueError: there is none for its architecture.
    """
    architecture = architecture_of(folder)
    if architecture not in _references:
        raise ValueError(
            f"{folder} is a checkpoint of {architecture}, and there are references of {', '.join(_references)}: "
            "register one with bench.reference.register_reference (docs/adding_an_architecture.md)."
        )
    return _references[architecture](folder)


def architecture_of(folder: Path) -> str | None:
    """The target's, as its `config.json` names it."""
    architectures = json.loads((folder / "config.json").read_text()).get("architectures") or [None]
    name: str | None = architectures[0]
    return name
