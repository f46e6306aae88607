"""Where a stop string ended a request, as the engine can tell.

Stop strings are looked for by the front end, which then aborts the request: to the engine it is as one whose client has
gone. The text tells them apart. Whatever the engine has generated beyond the stop string meanwhile is not part of the
answer, nor of the record.
"""

from functools import cached_property
from typing import Any

from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.request import RequestStatus


class StopStrings:
    """Finds what the front end has found, by the front end's own detokenizer."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    @cached_property
    def _tokenizer(self) -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(self._model_config)

    @staticmethod
    def may_have_ended(request: Any) -> bool:
        """Whether a scheduler's request was aborted, and may have been so since it came to a stop string."""
        return request.status is RequestStatus.FINISHED_ABORTED and _has_any(request)

    def tokens_up_to(self, request: Any) -> int | None:
        """The number of output tokens of a scheduler's request up to its first stop string; None where it has none."""
        if not _has_any(request):
            return None
        detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        for count, token_id in enumerate(request.output_token_ids, 1):
            if detokenizer.update([token_id], stop_terminated=False):
                return count
        return None


def _has_any(request: Any) -> bool:
    return bool(getattr(request.sampling_params, "stop", None))
