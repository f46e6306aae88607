"""Who runs what the collector collects: an engine of its own, or a server. Either leaves records under the folder."""

import copy
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from proposers.hidden_states.layout import ENCODING, PLAIN, SUFFIX


class Request(NamedTuple):
    """What is to be run.

    Attributes:
        number: of its line.
        name: of its record, under the folder.
        mask: of the token ids.
        max_tokens: of the answer; its rows are in the record where that is above 1.
    """

    number: int
    name: str
    token_ids: list[int]
    mask: list[int]
    max_tokens: int


class Outcome(NamedTuple):
    """What became of it: its record is in place, or there is an error."""

    request: Request
    num_output_tokens: int = 0
    error: str | None = None


class Backend(Protocol):
    max_length: int
    """Tokens that a request may have, with its answer."""

    def row_bytes(self) -> int | None:
        """Bytes of a token's rows; None while that isn't known."""
        ...

    def run(self, requests: Iterator[Request]) -> Iterator[Outcome]:
        """Runs the requests, and yields what becomes of each, in the order in which they end."""
        ...


class OwnEngine:
    """An engine in this process, which starts with the first request.

    Args:
        eight_bits: to write records in.

    Raises:
        ValueError: it can't be started with these arguments.
    """

    def __init__(
        self,
        model: str,
        layer_ids: list[int] | None,
        out: Path,
        arguments: dict[str, Any],
        eight_bits: bool = False,
    ) -> None:
        from proposers.hidden_states.plan import LAYER_IDS_KEY, ExtractionPlan, connector_config

        ids = default_layer_ids(model) if layer_ids is None else layer_ids
        transfer = {"storage_root": str(out), "dtype": "fp8" if eight_bits else "model"}
        self._arguments = {
            "model": model,
            "disable_log_stats": True,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {LAYER_IDS_KEY: ids}},
            },
            "kv_transfer_config": connector_config(transfer),
            **arguments,
        }
        config = self._engine_args().create_engine_config()
        plan = ExtractionPlan.of(config)
        assert plan is not None
        self._row_bytes = sum(plan.record_bytes(ENCODING if eight_bits else PLAIN))
        self._at_once = 2 * config.scheduler_config.max_num_seqs
        self.max_length: int = config.model_config.max_model_len

    def _engine_args(self) -> Any:
        from vllm import EngineArgs

        return EngineArgs(**copy.deepcopy(self._arguments))  # vLLM writes into what it is given

    def row_bytes(self) -> int:
        return self._row_bytes

    def run(self, requests: Iterator[Request]) -> Iterator[Outcome]:
        from vllm.v1.engine.llm_engine import LLMEngine

        if (first := next(requests, None)) is None:
            return
        requests = chain([first], requests)
        engine = LLMEngine.from_engine_args(self._engine_args())
        running: dict[str, Request] = {}
        try:
            while True:
                while len(running) < self._at_once and (request := next(requests, None)) is not None:
                    running[request.name] = request
                    prompt = {"prompt_token_ids": request.token_ids}
                    engine.add_request(request.name, prompt, _sampling(request))
                if not running:
                    return
                for output in engine.step():
                    if output.finished:
                        yield _outcome_of_output(running.pop(output.request_id), output)
        finally:
            engine.engine_core.shutdown()


def default_layer_ids(model: str) -> list[int]:
    """EAGLE-3's three layers, near the beginning, in the middle and near the end, and the last one's output."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(model)
    num_layers = (config.get("text_config") or config)["num_hidden_layers"]
    aux = {min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 1)}
    return [*sorted(aux), num_layers]


def _sampling(request: Request) -> Any:
    from vllm import SamplingParams

    asked = {"name": request.name, "include_output_tokens": request.max_tokens > 1}
    return SamplingParams(
        temperature=0, max_tokens=request.max_tokens, detokenize=False, extra_args={"kv_transfer_params": asked}
    )


def _outcome_of_output(request: Request, output: Any) -> Outcome:
    answered = output.kv_transfer_params or {}
    if "hidden_states_path" not in answered:
        return Outcome(request, error=answered.get("error", "the engine has left no record"))
    return Outcome(request, len(output.outputs[0].token_ids))


class Server:
    """A running server with `HiddenStatesConnector`, whose files this process can reach.

    Raises:
        OSError: it doesn't answer.
    """

    def __init__(self, url: str, out: Path, at_once: int = 64) -> None:
        self._url, self._out, self._at_once = url.rstrip("/"), out, at_once
        model = self._ask("/v1/models")["data"][0]
        self._model: str = model["id"]
        self.max_length: int = model.get("max_model_len") or 1 << 30
        self._row_bytes: int | None = None

    def row_bytes(self) -> int | None:
        return self._row_bytes

    def run(self, requests: Iterator[Request]) -> Iterator[Outcome]:
        with ThreadPoolExecutor(self._at_once) as pool:
            running: set[Future[Outcome]] = set()
            while True:
                while len(running) < self._at_once and (request := next(requests, None)) is not None:
                    running.add(pool.submit(self._run, request))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()

    def _run(self, request: Request) -> Outcome:
        body = {
            "model": self._model,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "kv_transfer_params": {"include_output_tokens": request.max_tokens > 1},
        }
        try:
            answer = self._ask("/v1/completions", body)
            self._take(answer.get("kv_transfer_params") or {}, request)
        except (OSError, ValueError) as error:
            return Outcome(request, error=str(error))
        return Outcome(request, answer["usage"]["completion_tokens"])

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=None) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ValueError(
                f"the server answers {error.code}: {error.read().decode(errors='replace')[:300]}"
            ) from error

    def _take(self, answered: dict[str, Any], request: Request) -> None:
        """Moves a record from where the server has written it."""
        path = answered.get("hidden_states_path")
        if path is None:
            raise ValueError(
                answered.get("error")
                or "the server answers without the path of a record: start it with "
                "HiddenStatesConnector, not sharded, and beside a drafting method with wait_for_records"
            )
        if not os.path.exists(path):
            raise ValueError(f"the server's record {path} can't be reached from here: share the folder that it lies in")
        if self._row_bytes is None:
            self._row_bytes = os.path.getsize(path) // len(request.token_ids)
        place = self._out / f"{request.name}{SUFFIX}"
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.partial")
        shutil.move(path, partial)  # onto another file system it is a copy, which may be broken off
        partial.replace(place)
