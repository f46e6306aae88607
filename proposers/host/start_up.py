"""Start-up fixes: what vLLM answers with an error of its own insides."""

from collections.abc import Mapping
from typing import Any

from proposers.host.patching import Patch


def _check_given(original: Any) -> Any:
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.speculative_config is not None:
            check_speculative_config(self.speculative_config)
        return original(self, *args, **kwargs)

    return create_speculative_config


def check_speculative_config(given: Any) -> None:
    """Raises `ValueError` where vLLM would go on as if it were a dictionary; what is in one, vLLM itself checks."""
    _check_dictionary("speculative_config", given, '{"method": "mtp", "num_speculative_tokens": 3}')
    draft = given.get("draft_model_config", given.get("draft-model-config"))
    if given.get("method") == "extract_hidden_states" and isinstance(draft, dict) and "hf_config" in draft:
        example = '{"eagle_aux_hidden_state_layer_ids": [1, 2]}'
        _check_dictionary("speculative_config.draft_model_config.hf_config", draft["hf_config"], example)


def _check_dictionary(name: str, given: Any, example: str) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{name} is {given!r}, and a dictionary with strings for keys is wanted, as in {example}.")


START_UP_CHECKS = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        parameters=("self", ...),
        replace=_check_given,
        why="anything but a dictionary, such as the bare name of a method, is an AttributeError ('str' object has no "
        "attribute 'items') that doesn't say what was wrong, nor where.",
        upstream="none yet",
        until="vLLM checks that its speculative config is a dictionary",
    ),
)
