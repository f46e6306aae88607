"""Start-up: models that vLLM itself can't start. These patches are there for vLLM's own proposers too (`upstream`)."""

from typing import Any

from packaging.specifiers import SpecifierSet

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
    ("hf_config",),
    why="a draft's config is made from its target's, and an architecture's entry may have more to say of it than vLLM: "
    "Step-3.5's layers index past the target's list of layer types.",
    upstream="vllm-project/vllm#40000",
    until="vLLM 0.32 is no longer supported, and no entry overrides a config",
)
def override_config(original: Any) -> Any:
    def hf_config_override(hf_config: Any) -> Any:
        from proposers.architecture import known_architectures

        config = original(hf_config)
        architectures = getattr(config, "architectures", None) or [None]
        entry = known_architectures().get(architectures[0])
        if entry is not None and entry.override_config is not None:
            entry.override_config(config)
        return config

    return hf_config_override


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


PATCHES = (keep_layer_types, override_config, find_heads_by_layer_type)
