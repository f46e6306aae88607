"""Loading: a draft has all of its weights, as the checkpoint has them, or is refused by name."""

import copy
import logging
from typing import Any

from proposers.architecture import Architecture, architecture_of
from proposers.host.patching import patch

logger = logging.getLogger("vllm.proposers")

SHOWN = 6
"""Names in an error."""


def _entry_of(model_config: Any, vllm_config: Any) -> Architecture | None:
    """The entry of the architecture, where this is the config of a draft that this package runs."""
    speculative = vllm_config.speculative_config
    if speculative is None or model_config is not speculative.draft_model_config:
        return None
    return architecture_of(speculative)


@patch(
    "vllm.model_executor.models.step3p5_mtp:Step3p5MTP.load_weights",
    ("self", "weights"),
    why="compressed-tensors gives every attention layer scales and zero points of a KV cache, ignored or not, which "
    "have defaults; this model wants them all from the checkpoint, and refuses a quantised Step-3.5.",
    upstream="none yet",
    until="Step3p5MTP leaves parameters of BaseKVCacheMethod out of its check",
)
def start_without_kv_scales(original: Any) -> Any:
    from vllm.model_executor.model_loader import mtp_validation

    def load_weights(self: Any, weights: Any) -> set[str]:
        wanted = mtp_validation.is_mtp_completeness_check_enabled()
        with mtp_validation.disable_mtp_completeness_check():
            loaded: set[str] = original(self, weights)
        if wanted and (missing := {name for name, _ in self.named_parameters()} - loaded - _kv_scales(self)):
            raise RuntimeError(_some_of(sorted(missing)) + " are not in the checkpoint, so they have no values.")
        return loaded

    return load_weights


def _kv_scales(model: Any) -> set[str]:
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        for name, _ in module.named_parameters(recurse=False)
    }


@patch(
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
    ("self", "vllm_config", "model_config", ...),
    why="a quantised checkpoint names layers that are not quantised by its own names, and vLLM looks for its own: MTP "
    "layers are built as quantised, get no scales, and hardly a draft is accepted.",
    upstream="none yet",
    until="vLLM maps the names of ignored MTP layers",
)
def load_as_stored(original: Any) -> Any:
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _entry_of(model_config, vllm_config) is not None and _is_stored_unquantised(self, vllm_config, model_config):
            logger.info("The checkpoint's MTP layers are not quantised, so the draft is not, whatever its target is.")
            vllm_config = copy.copy(vllm_config)
            vllm_config.quant_config = model_config.quantization = None
        return original(self, vllm_config, model_config, *args, **kwargs)

    return load_model


def _is_stored_unquantised(loader: Any, vllm_config: Any, model_config: Any) -> bool:
    from vllm.model_executor.model_loader import DefaultModelLoader

    from proposers.checkpoint import modules_are_unquantised

    # Without a config of its quantisation the checkpoint is quantised while it is loaded, as the user wants it.
    is_quantised = model_config.quantization and getattr(model_config.hf_config, "quantization_config", None)
    if not is_quantised or not isinstance(loader, DefaultModelLoader):
        return False
    target = vllm_config.speculative_config.target_model_config
    return modules_are_unquantised(loader, model_config, target.hf_text_config.num_hidden_layers)


@patch(
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights",
    ("self", "model", "model_config"),
    why="a fused parameter counts as loaded when one of its parts was, linear layers need not be loaded at all, and "
    "of a quantised model nothing is checked: a draft with holes drafts in silence, and hardly anything is accepted.",
    upstream="none yet",
    until="vLLM's check sees the parts of fused parameters, in quantised models too",
)
def refuse_holes(original: Any) -> Any:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        from vllm.config import get_current_vllm_config

        entry = _entry_of(model_config, get_current_vllm_config())
        if entry is None:
            original(self, model, model_config)
            return
        from proposers.unset_weights import MarkedWeights

        marked = MarkedWeights(model, entry.descriptor.own_heads)
        with disable_mtp_completeness_check():
            original(self, model, model_config)
        if unset := marked.take_unset():
            raise ValueError(_say_what_is_missing(unset, model_config))

    return load_weights


@patch(
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.create_model",
    ("self", "vllm_config", "model_config", ...),
    why="weights of 8 bits and heads of a part of the vocabulary are made when a layer is loaded, and so have to be "
    "asked for between the model's construction and its load.",
    upstream="none yet: vLLM quantises a draft as its target, by a config that not all of its layers are built with",
    until="a plugin can choose the method of a draft's layers",
)
def make_drafts_cheap(original: Any) -> Any:
    def create_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(self, vllm_config, model_config, *args, **kwargs)
        from proposers.cheap import CheapDrafts

        entry = _entry_of(model_config, vllm_config)
        if entry is not None and CheapDrafts.loading is not None:
            CheapDrafts.loading.before_load(model, entry.descriptor.own_heads)
        return model

    return create_model


def _drafter_of(worker: Any) -> Any:
    from proposers.drafter import ArchitecturePasses

    runner = worker.model_runner
    found = (getattr(runner, name, None) for name in ("drafter", "speculator"))
    return next((drafter for drafter in found if isinstance(drafter, ArchitecturePasses)), None)


WHY_REFRESH = "a draft has to make copies of weights again when these have changed: of its target's head, packed ones."


@patch(
    "vllm.v1.worker.gpu_worker:Worker.reload_weights",
    ("self", ...),
    why=WHY_REFRESH,
    upstream="none yet",
    until="a runner tells its drafter of new weights",
)
def refresh_after_reload(original: Any) -> Any:
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if (drafter := _drafter_of(self)) is not None:
            drafter.refresh_weights()

    return reload_weights


@patch(
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
    ("self",),
    why=WHY_REFRESH,
    upstream="none yet",
    until="a runner tells its drafter of new weights",
)
def refresh_after_update(original: Any) -> Any:
    def finish_weight_update(self: Any) -> None:
        original(self)
        if (drafter := _drafter_of(self)) is not None:
            drafter.refresh_weights()

    return finish_weight_update


def _say_what_is_missing(unset: list[str], model_config: Any) -> str:
    quantised = ""
    if any(not name.endswith((".weight", ".bias")) for name in unset):
        quantised = (
            f" The draft is quantised by {model_config.quantization}: layers that the checkpoint has unquantised must "
            "be in the ignore list of its quantization config, by the names that vLLM has for them."
        )
    return (
        f"{model_config.model} has no weights for {len(unset)} parts of its MTP layers: {_some_of(unset)}. They would "
        f"be whatever was in memory, and hardly a draft would be accepted.{quantised} Use a checkpoint with whole MTP "
        "layers, serve without a speculative config, or set MTP_PROPOSERS=upstream to leave it to vLLM."
    )


def _some_of(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


START_UP = (start_without_kv_scales,)
PATCHES = (load_as_stored, refuse_holes, make_drafts_cheap, refresh_after_reload, refresh_after_update)
