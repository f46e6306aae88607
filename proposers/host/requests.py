"""What a request asks of the record of its hidden states, checked where the request comes in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from proposers.hidden_states.plan import is_the_only_connector, settings_of_connector
from proposers.host.patching import patch


@patch(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    ("self", "request_id", "prompt", "params", ...),
    why="a KV connector sees a request when its tokens are made, and what it then says of wrong kv_transfer_params "
    "comes after all the work, with a status of success. A front end that raises answers 400 instead.",
    upstream="none yet",
    until="a KV connector can refuse a request",
)
def refuse_wrong_requests(original: Any) -> Any:
    def process_inputs(self: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        with _as_error_of_the_client():
            wanted = _wanted(self.vllm_config, params)
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if wanted is not None and wanted.extract and request.prompt_token_ids is not None:
            length = len(request.prompt_token_ids)
            with _as_error_of_the_client():
                wanted.rows(length, length + request.sampling_params.max_tokens)
        return request

    return process_inputs


@contextmanager
def _as_error_of_the_client() -> Iterator[None]:
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except ValueError as error:  # which the server would take for a fault of its own
        raise VLLMValidationError(str(error), parameter="kv_transfer_params") from error


def _wanted(vllm_config: Any, params: Any) -> Any:
    """What the request asks of `HiddenStatesConnector`, checked; None where that isn't there, or nothing is asked."""
    settings, extra = settings_of_connector(vllm_config), getattr(params, "extra_args", None) or {}
    asked = extra.get("kv_transfer_params")
    if asked is None or settings is None:
        return None
    from proposers.hidden_states.request import RecordRequest

    has_others = not is_the_only_connector(vllm_config)
    return RecordRequest.of(asked, settings.get("include_output_tokens", False), has_others=has_others)


PATCHES = (refuse_wrong_requests,)
