"""Dense models in plain float32 PyTorch, one sequence at a time, by the architecture of a checkpoint."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.reference.dense import DenseModel

Build = Callable[[Path], "DenseModel"]


def _from(path: str) -> Callable[[Path], Any]:
    """The callable `module:name` of this package, which is imported on the first call."""
    module, _, name = path.partition(":")

    def call(folder: Path) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)(folder)

    return call


_references: dict[str, Build] = {
    "Step3p5ForCausalLM": _from("dense:DenseModel"),
    "MiMoForCausalLM": _from("mimo:DenseMiMo"),
    "MiMoV2FlashForCausalLM": _from("mimo_v2:DenseMiMoV2"),
    "MiMoV2ForCausalLM": _from("mimo_v2:DenseMiMoV2"),
    "Glm4MoeForCausalLM": _from("glm4_moe:DenseGlm4Moe"),
    "ExaoneMoeForCausalLM": _from("exaone_moe:DenseExaoneMoe"),
    "Ernie4_5_MoeForCausalLM": _from("ernie4_5_moe:DenseErnie4_5Moe"),
    "DeepseekV3ForCausalLM": _from("deepseek_v3:DenseDeepseekV3"),
    "Qwen3_5ForCausalLM": _from("qwen3_5:DenseQwen3_5"),
}


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A checkpoint, most with random weights, that is written where it is wanted.

    Attributes:
        write: into a folder, which need not be there.
        dtype: of the oracle's engines.
        setup: fields of the oracle's setups that its engines need (`bench.oracle.schedules.Setup`).
        recurrent: its target has layers with states: they are in no KV cache group with others, and see `HYBRID`.
        cached: its states can be in the prefix cache: `bench.interpreter.run_recurrent_states` comes first.
        latent: its attention is latent, which vLLM's CPU build computes wrongly.
        blocks: how many KV cache blocks engines get that are to run out of them, of those of the tiny Step-3.5, whose
            layers lie in three groups.
    """

    write: Callable[[Path], Any]
    dtype: str = "float32"
    setup: dict[str, Any] = field(default_factory=dict)
    recurrent: bool = False
    cached: bool = False
    latent: bool = False
    blocks: float = 0.55


# Delta nets are bfloat16's alone. On vLLM's CPU build their states have no prefix cache, and go wrong in a step of
# fewer drafts than are configured, as there are where requests reach the end of the context.
HYBRID: dict[str, Any] = {"dtype": "bfloat16", "setup": {"prefix_caching": False, "spare": 16}, "recurrent": True}

# With blocks that are short enough for some in a prompt; a step takes more than one.
CACHED: dict[str, Any] = {
    **HYBRID,
    "setup": {"spare": 16, "block_size": 128, "max_model_len": 480, "max_batched_tokens": 288, "chunk": 0},
    "cached": True,
}

TINY_CHECKPOINTS = {
    "mimo": TinyCheckpoint(_from("mimo_checkpoint:write_checkpoint")),
    "mimo-v2": TinyCheckpoint(_from("mimo_v2:copy_trained"), blocks=2.2),
    "glm4-moe": TinyCheckpoint(_from("glm4_moe_checkpoint:write_checkpoint")),
    "exaone-moe": TinyCheckpoint(_from("exaone_moe_checkpoint:write_checkpoint"), blocks=1.0),
    "exaone-moe-two-modules": TinyCheckpoint(_from("exaone_moe_checkpoint:write_two_sliding_modules"), blocks=1.0),
    "ernie4.5-moe": TinyCheckpoint(_from("ernie4_5_moe_checkpoint:write_checkpoint")),
    "deepseek-v3": TinyCheckpoint(_from("deepseek_v3_checkpoint:write_dense_target"), dtype="bfloat16", latent=True),
    "qwen3.5": TinyCheckpoint(_from("qwen3_5_checkpoint:write_checkpoint"), **HYBRID),
    "qwen3.5-two-modules": TinyCheckpoint(_from("qwen3_5_checkpoint:write_two_modules"), **HYBRID),
    "qwen3.5-cached": TinyCheckpoint(_from("qwen3_5_checkpoint:write_short_blocks"), **CACHED),
    "qwen3.5-cached-two-modules": TinyCheckpoint(_from("qwen3_5_checkpoint:write_short_blocks_of_two"), **CACHED),
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


def count_modules(folder: Path) -> int:
    """How many modules a checkpoint has. Raises what `dense_model` does."""
    return dense_model(folder).num_modules
