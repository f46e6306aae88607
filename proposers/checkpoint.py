"""Which tensors a checkpoint has: what its config doesn't say of its modules, or says wrongly.

vLLM takes the number of modules from the config alone. Modules that the checkpoint lacks are drafted with all the same,
or end in an `IndexError`; modules that only the files tell of are left out.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proposers.architecture import Architecture

SAFETENSORS = "*.safetensors"
INDEX = "model.safetensors.index.json"
_MTP = re.compile(r"(^|\.)mtp[._]")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FLOATS = ("F64", "F32", "F16", "BF16")
_QUANTISED = re.compile(r"scale|zero_point|qweight|qzeros|g_idx|packed|quant")
"""In the last part of a tensor's name."""


def tensor_files(model: str, revision: str | None = None) -> dict[str, str] | None:
    """The file that holds each tensor, by the tensor's name, without reading a weight.

    Args:
        model: a folder, or a repository of the hub.

    Returns:
        None where there are no safetensors to ask: weights that are made up (`--load-format dummy`), or in another
        format.
    """
    from vllm.transformers_utils.config import try_get_safetensors_metadata
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    index = get_hf_file_to_dict(INDEX, model, revision)
    if index is not None:
        return dict(index["weight_map"])
    if Path(model).is_dir():
        return _in_folder(Path(model))
    metadata = try_get_safetensors_metadata(model, revision=revision)
    return None if metadata is None else dict(metadata.weight_map)


def _in_folder(folder: Path) -> dict[str, str] | None:
    from safetensors import safe_open

    found: dict[str, str] = {}
    for path in sorted(folder.glob(SAFETENSORS)):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    return found or None


def count_modules(names: Iterable[str], template: str, num_layers: int) -> int:
    """How many modules there are tensors of, from the first one on.

    Args:
        names: of all tensors.
        template: how a module's tensors begin, possibly after the name of a part: `model.layers.{layer}.`, of which the
            first is the target's `num_layers`, or `model.mtp.layers.{module}.`, counted from 0.
    """
    pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{module\}", r"(?P<module>\d+)")
    found = set()
    for name in names:
        if match := re.search(rf"(?:^|\.){pattern}", name):
            parts = match.groupdict()
            found.add(int(parts["layer"]) - num_layers if "layer" in parts else int(parts["module"]))
    return next(count for count in range(len(found) + 1) if count not in found)


def missing_files(model: str, files: Mapping[str, str]) -> list[str]:
    """Files that the index of a folder names and that are not there; none for a repository, which is downloaded."""
    if not Path(model).is_dir():
        return []
    return sorted(name for name in set(files.values()) if not Path(model, name).exists())


def settle_modules(entry: "Architecture", config: Any, given: Any) -> None:
    """Has a draft's config say how many modules there are: as many as it was given, else as many as the files have.

    Args:
        config: the draft's, after vLLM's override; changed.
        given: the same before it.

    Raises:
        ValueError: the checkpoint hasn't got them.
    """
    model = given.name_or_path
    if entry.module_weights is None or not model:
        return
    text, key = given.get_text_config(), entry.descriptor.modules_key
    counted_by = entry.counted_by or key
    said = None if counted_by is None else getattr(text, counted_by, None)
    count = said
    files = tensor_files(model, getattr(given, "_commit_hash", None))
    if files is not None:  # weights that are made up have none
        found = count_modules(files, entry.module_weights, getattr(text, "num_hidden_layers", 0))
        count = found if said is None else said
        _check_against_files(f"{model} ({entry.module_weights}*)", counted_by, said, found)
        _check_complete(model, files)
    if key is not None and count:
        config.update({key: count, "n_predict": count})


def _check_complete(model: str, files: Mapping[str, str]) -> None:
    if missing := missing_files(model, files):
        raise ValueError(
            f"{model} lacks {', '.join(missing)}, which its index names: the draft could be loaded in parts only. "
            "Download the checkpoint again."
        )


def _check_against_files(checkpoint: str, key: str | None, said: int | None, found: int) -> None:
    """Raises `ValueError` where there are no modules, or not those that the config says there are."""
    if found == 0:
        says = "" if key is None else f", whatever its config says ({key}={said})"
        raise ValueError(
            f"There are no MTP modules to draft with in the files of {checkpoint}{says}. Use a checkpoint with its MTP "
            "layers, or serve without a speculative config."
        )
    if said is not None and not 0 < said <= found:
        raise ValueError(
            f"There are {found} MTP modules in the files of {checkpoint}, and its config says {key}={said}. Draft with "
            f"those that are there by --hf-overrides '{{\"{key}\": {found}}}', or use the complete checkpoint."
        )


def is_of_the_modules(name: str, num_target_layers: int) -> bool:
    """Whether a checkpoint's tensor is an MTP layer's: by name, or as a layer past the target's."""
    layer = _LAYER.search(f".{name}")
    return _MTP.search(name) is not None or (layer is not None and int(layer[1]) >= num_target_layers)


def is_of_quantisation(name: str, dtype: str) -> bool:
    return dtype not in _FLOATS or _QUANTISED.search(name.rpartition(".")[2]) is not None


def modules_are_unquantised(loader: Any, model_config: Any, num_target_layers: int) -> bool:
    """Whether the checkpoint has MTP layers and nothing quantised in them. False where its files don't tell.

    Args:
        loader: vLLM's `DefaultModelLoader`, which knows where the files are.
    """
    from safetensors import safe_open

    # As the load itself asks for them.
    _, files, use_safetensors, _ = loader._prepare_weights(model_config.model, None, model_config.revision, True, None)
    if not use_safetensors:
        return False
    found = False
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                if not is_of_the_modules(name, num_target_layers):
                    continue
                if is_of_quantisation(name, tensors.get_slice(name).get_dtype()):
                    return False
                found = True
    return found
