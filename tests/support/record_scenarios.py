"""Scenarios for `tests.support.forked_engine.run`: engines that write records, and what lies on disk afterwards.

Every engine gets a storage root of its own by `records_engine`, and scenarios return facts; the tests judge them.
"""

import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from bench.reference.residual import residual_stream_of
from proposers.hidden_states import Record, RecordDataset, load
from tests.support.engine_arguments import extract
from tests.support.scenarios import allow_async_scheduling, metrics, runner

LAYERS = [6, 0, 3]  # not ascending, the last layer's output among them
RING_BYTES = 40 * 3 * 192 * 4  # forty tokens of the tiny model: requests come in pieces and writers are waited for


def records_engine(root: Path, layer_ids: list[int] = LAYERS, **settings: Any) -> dict[str, Any]:
    """Engine arguments for extracting into a folder."""
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"storage_root": str(root), "ring_bytes": RING_BYTES} | settings,
    }
    return extract(layer_ids) | {"kv_transfer_config": transfer}


def ask(max_tokens: int = 8, **kv_transfer_params: Any) -> SamplingParams:
    extra = {"extra_args": {"kv_transfer_params": kv_transfer_params}} if kv_transfer_params else {}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **extra)


def connector(llm: LLM) -> Any:
    """The worker's side of the connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def files(root: str | Path) -> list[str]:
    """All files under the root, but for locks."""
    paths = (path.relative_to(root) for path in Path(root).rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.name not in ("lock", ".writing.lock"))


def prompts(*lengths: int, shared: int = 0, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    start = [draw.randrange(4, 1000) for _ in range(shared)]
    return [start + [draw.randrange(4, 1000) for _ in range(length)] for length in lengths]


def examine(llm: LLM, output: Any) -> dict[str, Any]:
    """What a response says, and how the record behind it compares with the request and the dense reference."""
    params = output.kv_transfer_params
    facts = {
        "params": params,
        "prompt": len(output.prompt_token_ids),
        "output": len(output.outputs[0].token_ids),
        "reason": output.outputs[0].finish_reason,
    }
    path = (params or {}).get("hidden_states_path") or (params or {}).get("hidden_states_shard")
    if path is None:
        return facts
    record = load(path, params.get("hidden_states_name"))
    return facts | compare(llm, output, record)


def compare(llm: LLM, output: Any, record: Record) -> dict[str, Any]:
    """A record beside its answer and the dense reference."""
    info = record.info
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    stop = info.first_position + info.rows
    expected = residual_stream_of(llm.llm_engine.vllm_config.model_config.model)(tokens[:stop])[info.first_position :]
    expected = expected[:, list(info.layer_ids)]
    return {
        "shape": list(record.hidden_states.shape),
        "layer_ids": list(info.layer_ids),
        "first": info.first_position,
        "rows": info.rows,
        "tokens equal": record.token_ids.tolist() == tokens[info.first_position : stop],
        "worst": float((record.hidden_states - expected).abs().max() / expected.abs().max()),
        "finish_reason": info.finish_reason,
    }


def generate(llm: LLM, batch: list[list[int]], params: Any) -> list[dict[str, Any]]:
    """Everything is examined after `generate` has returned and before anything else runs."""
    inputs = [{"prompt_token_ids": prompt} for prompt in batch]
    return [examine(llm, output) for output in llm.generate(inputs, params, use_tqdm=False)]


def settle(llm: LLM) -> None:
    """Steps until nothing is under way any more, as an engine in a process of its own does by itself."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():
        llm.llm_engine.step()


def stopped_by_strings(llm: LLM, root: str) -> list[dict[str, Any]]:
    """Requests that stop strings end, whose answers leave at once: the records that lie there soon after."""
    before = set(RecordDataset(root).entries)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts(60, 150)]
    extra = {"extra_args": {"kv_transfer_params": {"include_output_tokens": True}}}
    params = SamplingParams(temperature=0, max_tokens=40, stop=["e", " "], **extra)
    outputs = llm.generate(inputs, params, use_tqdm=False)
    settle(llm)
    written = {}
    for path, name in set(RecordDataset(root).entries) - before:
        record = load(path, name)
        written[record.info.request_id.rsplit("-", 1)[0]] = record
    return [
        {
            "reason": str(output.outputs[0].stop_reason),
            "prompt": len(output.prompt_token_ids),
            "output": len(output.outputs[0].token_ids),
            **compare(llm, output, written[output.request_id]),
        }
        for output in outputs
        if output.request_id in written
    ]


def refusal(llm: LLM, params: SamplingParams) -> str:
    """What is raised for a request of 60 tokens."""
    try:
        generate(llm, prompts(60), params)
    except VLLMValidationError as error:
        return str(error)
    return "nothing"


def few(llm: LLM, root: str) -> dict[str, Any]:
    """The same for engines that are slow: chunks, decoding side by side, hits, a name that leads out of the root."""
    everything = {"include_output_tokens": True}
    return {
        "batches": {
            "chunks": generate(llm, prompts(150), ask(4)),
            "side by side": generate(llm, prompts(3, 20, 40), ask(6, **everything)),
            "shared": generate(llm, prompts(3, 40, shared=96), ask(4, **everything)),
            "again": generate(llm, prompts(3, 40, shared=96), ask(4, **everything)),
        },
        "refused": refusal(llm, ask(2, name="../up")),
        "metrics": metrics(llm),
        "files": files(root),
        "runner": type(runner(llm)).__module__,
    }


def many(llm: LLM, root: str) -> dict[str, Any]:
    """Batches of one to sixteen; prompts in chunks, hits and repetitions; what can be asked of a request."""
    everything = {"include_output_tokens": True}
    batches = {
        "alone": generate(llm, prompts(150), ask()),
        "sixteen": generate(llm, prompts(*range(1, 161, 10)), ask(20, **everything)),
        "shared": generate(llm, prompts(3, 40, 70, shared=96), ask(**everything)),
        "again": generate(llm, prompts(3, 40, 70, shared=96), ask(**everything)),
        "one token": generate(llm, prompts(33), ask(1)),
        "window": generate(llm, prompts(60), ask(window=[10, 45])),
        "window past the end": generate(llm, prompts(60), ask(window=[50, 500], **everything)),
        "off": generate(llm, prompts(60), ask(extract=False)),
        "named": generate(llm, prompts(60), ask(name="set/one")),
        "same name": generate(llm, prompts(60), ask(name="set/one.safetensors")),
    }
    stopped = stopped_by_strings(llm, root)
    os.symlink("/", Path(root, "outside"))
    os.symlink(root, Path(root, "set", "inside"))
    refused = {
        "../up": ask(name="../up"),
        "/absolute": ask(name="/absolute"),
        "half a surrogate pair": ask(name="a\ud800"),
        "an empty window": ask(window=[70, 80]),
        "a window past the last token": ask(window=[67, 80], **everything),
        "an unknown key": ask(hidden_states_path="x"),
    }
    in_vain = {
        "outside/file": ask(name="outside/file"),
        "set/inside/file": ask(name="set/inside/file"),
        "a file for a folder": ask(name="set/one.safetensors/file"),
    }
    outputs = generate(llm, prompts(*[60] * len(in_vain)), list(in_vain.values()))
    left = connector(llm).peak_host_bytes, connector(llm)._transfer.gathers
    return {
        "batches": batches,
        "stopped": stopped,
        "refused": {name: refusal(llm, params) for name, params in refused.items()},
        "in vain": dict(zip(in_vain, outputs, strict=True)),
        "files": files(root),
        "metrics": metrics(llm),
        "peak_bytes": left[0],
        "gathers": left[1],
        "dataset": len(RecordDataset(root)),
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }


def crowded(llm: LLM, root: str) -> dict[str, Any]:
    """More requests than the KV cache holds at once, so that some are preempted."""
    outputs = generate(llm, prompts(*[90] * 8), ask(80, include_output_tokens=True))
    return {
        "outputs": outputs,
        "files": files(root),
        "metrics": metrics(llm),
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }


def many_asynchronous(llm: LLM, root: str) -> dict[str, Any]:
    return many(llm, root)


def crowded_asynchronous(llm: LLM, root: str) -> dict[str, Any]:
    return crowded(llm, root)


many_asynchronous.prepare = crowded_asynchronous.prepare = allow_async_scheduling


def sharded(llm: LLM, root: str) -> dict[str, Any]:
    """Many records a file: some batches, one of them longer than a shard."""
    everything = {"include_output_tokens": True}
    outputs = generate(llm, prompts(*range(5, 90, 7)), ask(**everything))
    outputs += generate(llm, prompts(150, 150), ask(name="twice"))
    dataset = RecordDataset(root)
    return {
        "outputs": outputs,
        "files": files(root),
        "names": sorted({name for _, name in dataset.entries}),
        "rows": sum(record.info.rows for record in dataset),
        "metrics": metrics(llm),
    }


def aborted(llm: LLM, root: str) -> dict[str, Any]:
    """Requests that are aborted before they run, between two chunks of their prompt, while decoding, and preempted."""
    engine = llm.llm_engine
    facts: dict[str, Any] = {}

    def add(name: str, *lengths: int, max_tokens: int = 60) -> None:
        for i, prompt in enumerate(prompts(*lengths)):
            engine.add_request(f"{name}{i}", {"prompt_token_ids": prompt}, ask(max_tokens, include_output_tokens=True))

    def requests() -> dict[str, Any]:
        return {r.request_id.rsplit("-", 1)[0]: r for r in engine.engine_core.engine_core.scheduler.requests.values()}

    add("before", 30)
    engine.abort_request(["before0"])
    add("prefill", 200)
    engine.step()
    facts["computed in prefill"] = requests()["prefill0"].num_computed_tokens
    engine.abort_request(["prefill0"])
    add("decode", 30)
    for _ in range(3):
        engine.step()
    engine.abort_request(["decode0"])
    # The cache holds all of them at first; when they grow, the last to come is preempted.
    add("crowd", *[60] * 6, max_tokens=120)
    while not any(r.num_preemptions for r in requests().values()):
        engine.step()
    victim = next(name for name, r in requests().items() if r.num_preemptions)
    facts["status of the victim"] = str(requests()[victim].status)
    engine.abort_request([f"crowd{i}" for i in range(6)])
    while engine.has_unfinished_requests():
        engine.step()
    facts["files"] = files(root)
    facts["after"] = generate(llm, prompts(20), ask())
    facts["blocks in use"] = engine.engine_core.engine_core.scheduler.kv_cache_manager.usage
    return facts


@contextmanager
def no_file_longer_than(num_bytes: int, process: int = 0) -> Iterator[None]:
    """What a full disk does, without filling one: a write of that process past that length fails (0: of this one)."""
    soft, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (soft, hard))


def writer_process(llm: LLM) -> int:
    """The id of the process that writes records."""
    process: int = connector(llm)._writers._process.pid
    return process


def failing(llm: LLM, root: str) -> dict[str, Any]:
    """Writes that fail, between others that succeed."""
    facts = {"before": generate(llm, prompts(20), ask())}
    with no_file_longer_than(120 * 3 * 192 * 4, writer_process(llm)):
        facts["disk full"] = generate(llm, prompts(200, 20, 210), ask())
    (folder,) = Path(root).glob(".writing-run-*")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    facts["after our folder was removed"] = generate(llm, prompts(20), ask())
    (Path(root) / "file").write_text("")
    facts["a file in place of a folder"] = generate(llm, prompts(20), ask(name="file/record"))
    facts["after"] = generate(llm, prompts(20), ask())
    facts["files"] = files(root)
    facts["metrics"] = metrics(llm)
    return facts


@contextmanager
def standing_still(llm: LLM) -> Iterator[threading.Event]:
    """A disk that stands still: who writes to it is stopped until then.

    After a minute it goes on by itself, and the event is set, since an engine that waits for it would wait forever.
    """
    by_itself, process = threading.Event(), writer_process(llm)

    def go_on() -> None:
        by_itself.set()
        os.kill(process, signal.SIGCONT)

    watchdog = threading.Timer(60, go_on)
    watchdog.daemon = True
    watchdog.start()
    os.kill(process, signal.SIGSTOP)
    try:
        yield by_itself
    finally:
        watchdog.cancel()
        os.kill(process, signal.SIGCONT)


def others_go_on(llm: LLM, root: str) -> dict[str, Any]:
    """A disk that stands still holds back the requests that wait for it, and nobody else.

    One of them is longer than the ring, so that its rows have to wait in the store.
    """
    engine = llm.llm_engine
    facts: dict[str, Any] = {}
    for length in (20, 150):
        with standing_still(llm) as by_itself:
            for name, params in ((f"stored {length}", ask(2)), (f"other {length}", ask(40, extract=False))):
                engine.add_request(name, {"prompt_token_ids": prompts(length)[0]}, params)
            outputs: list[Any] = []
            while f"other {length}" not in [output.request_id for output in outputs]:
                outputs += [output for output in engine.step() if output.finished]
            before = [output.request_id for output in outputs], files(root), by_itself.is_set()
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
        (stored,) = (examine(llm, output) for output in outputs if output.request_id == f"stored {length}")
        facts[str(length)] = {
            "before": before[0],
            "files before": before[1],
            "went on by itself": before[2],
            "finished": [output.request_id for output in outputs],
            "files": files(root),
            "stored": stored,
        }
    return facts


def embedded(llm: LLM, root: str) -> dict[str, Any]:
    """What the responses say where a prompt, or a part of it, is embeddings."""
    embeds = torch.randn(6, llm.llm_engine.model_config.get_hidden_size())
    token_ids = [5, 6, 0, 0, 9, 10]
    mixed = {"prompt_token_ids": token_ids, "is_token_ids": [True, True, False, False, True, True], "type": "embeds"}
    outputs = [llm.generate([{"prompt_embeds": embeds, **more}], ask(2), use_tqdm=False)[0] for more in ({}, mixed)]
    return {"responses": [output.kv_transfer_params for output in outputs], "files": files(root)}


def two_requests(llm: LLM, root: str) -> dict[str, Any]:
    return {"outputs": generate(llm, prompts(50, 7), ask(include_output_tokens=True)), "files": files(root)}


def two_ranks(llm: LLM, root: str) -> dict[str, Any]:
    """More than the ring holds, and more than may wait in the store."""
    outputs = generate(llm, prompts(50, 7, 150, 90, 33, 120), ask(include_output_tokens=True))
    return {"outputs": outputs, "files": files(root)}


def timed(llm: LLM, num_prompts: int, num_tokens: int, max_tokens: int) -> str:
    """Decoding, as `bench extract` times it; the error if it can't."""
    from bench.workers.extract import run_decode

    try:
        run_decode(llm.llm_engine, prompts(*[num_tokens] * num_prompts), ask(max_tokens), "timed")
    except ValueError as error:
        return str(error)
    return ""
