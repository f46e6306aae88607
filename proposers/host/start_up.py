"""Start-up: models that vLLM itself can't start. These patches are there for vLLM's own proposers too (`upstream`)."""

import copy
from collections.abc import Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from proposers.hidden_states.plan import METHOD
from proposers.host.patching import patch


@patch(
    "vllm.transformers_utils.configs.step3p5:Step3p5Config.__init__",
    ("self", ..., "num_hidden_layers", ..., "layer_types", ...),
    why="the config forgets the attention types of the MTP layers, which lie past num_hidden_layers; the target's "
    "own list must stay short, or strict validation refuses it under extract_hidden_states.",
    upstream="vllm-project/vllm#40000",
    until="vLLM 0.32 is no longer supported",
    versions=SpecifierSet("<0.33"),
)
def keep_layer_types(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        layer_types = kwargs.get("layer_types")
        if layer_types is not None and len(layer_types) > self.num_hidden_layers:
            self.mtp_layer_types = list(layer_types[self.num_hidden_layers :])

    return __init__


@patch(
    "vllm.config.speculative:SpeculativeConfig.hf_config_override",
    ("hf_config", ...),
    why="a draft's config is made from its target's, and an architecture's entry may have more to say of it than vLLM: "
    "Step-3.5's layers index past the target's list of layer types. The number of modules is taken from the config "
    "alone, or for MiMo-V2 from a constant, whatever the checkpoint has.",
    upstream="vllm-project/vllm#40000, vllm-project/vllm#31204",
    until="vLLM counts the modules of a checkpoint, vLLM 0.32 is no longer supported, and no entry overrides a config",
)
def override_config(original: Any) -> Any:
    def hf_config_override(hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        from proposers.architecture import known_architectures

        given = copy.deepcopy(hf_config)  # the original changes what it is given
        config = original(hf_config, *args, **kwargs)
        architectures = getattr(config, "architectures", None) or [None]
        entry = known_architectures().get(architectures[0])
        if entry is not None:
            _complete_config(entry, config, given)
        return config

    return hf_config_override


def _complete_config(entry: Any, config: Any, given: Any) -> None:
    from proposers.checkpoint import settle_modules
    from proposers.plugin import Mode

    # Where vLLM's proposers draft there is no model class of ours, and theirs is built as theirs wants it.
    if entry.model_class is not None and Mode.from_env() is not Mode.ON:
        return
    settle_modules(entry, config, given)
    if entry.override_config is not None:
        entry.override_config(config)


@patch(
    "vllm.model_executor.models.step3p5:_get_num_attention_heads",
    ("config", "layer_idx", "layer_type"),
    why="heads of layers with full attention are looked up in the target's list, which the MTP layers lie past: a "
    "draft with such a layer fails to start (IndexError). A layer of the target of the same type has as many.",
    upstream="none yet",
    until="vLLM looks up the heads of MTP layers",
    versions=SpecifierSet(">=0.33"),
)
def find_heads_by_layer_type(original: Any) -> Any:
    def _get_num_attention_heads(config: Any, layer_idx: int, layer_type: str) -> int:
        if layer_idx >= config.num_hidden_layers and layer_type in config.layer_types:
            layer_idx = config.layer_types.index(layer_type)
        heads: int = original(config, layer_idx, layer_type)
        return heads

    return _get_num_attention_heads


@patch(
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    ("self", ...),
    why="anything but a dictionary, such as the bare name of a method, is an AttributeError ('str' object has no "
    "attribute 'items') that doesn't say what was wrong, nor where.",
    upstream="none yet",
    until="vLLM checks that its speculative config is a dictionary",
)
def check_speculative_config(original: Any) -> Any:
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.speculative_config is not None:
            check_given(self.speculative_config)
        return original(self, *args, **kwargs)

    return create_speculative_config


def check_given(given: Any) -> None:
    """Raises `ValueError` where vLLM would go on as if it were a dictionary; what is in one, vLLM itself checks."""
    _check_dictionary("speculative_config", given, '{"method": "mtp", "num_speculative_tokens": 3}')
    draft = given.get("draft_model_config", given.get("draft-model-config"))
    if given.get("method") == METHOD and isinstance(draft, dict) and "hf_config" in draft:
        example = '{"eagle_aux_hidden_state_layer_ids": [1, 2]}'
        _check_dictionary("speculative_config.draft_model_config.hf_config", draft["hf_config"], example)


def _check_dictionary(name: str, given: Any, example: str) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{name} is {given!r}, and a dictionary with strings for keys is wanted, as in {example}.")


PATCHES = (check_speculative_config, keep_layer_types, override_config, find_heads_by_layer_type)
