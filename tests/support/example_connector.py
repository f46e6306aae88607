"""An engine that is configured for vLLM's example connector: on vLLM's own extraction, and on ours."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)

from tests.support.engine_arguments import extract
from tests.support.extraction_scenarios import plain_id
from tests.support.scenarios import class_path, generate, metrics, runner

LAYER_IDS = [1, 2]


def example_engine(model: str, root: Path, **settings: Any) -> dict[str, Any]:
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(root), **settings},
    }
    return {"model": model, "skip_tokenizer_init": True, "kv_transfer_config": connector} | extract(LAYER_IDS)


PROMPTS = [list(range(1, length)) for length in (2, 33, 70)]


def served(llm: LLM, root: str, lock_files: bool) -> dict[str, Any]:
    """What ours leaves for readers of that connector, who clean up after themselves."""
    outputs = generate(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    records = []
    for output in outputs:
        path = output.kv_transfer_params["hidden_states_path"]
        there = Path(path).is_file(), Path(f"{path}.lock").is_file()
        record = load_hidden_states(path) if lock_files else load_file(path)
        records.append(
            {
                "params": sorted(output.kv_transfer_params),
                "there": there,
                "in the root": Path(path).is_relative_to(root),
                "tokens": record["token_ids"].tolist(),
                "hidden states": record["hidden_states"].flatten(1).tolist(),
            }
        )
        cleanup_hidden_states(path)
    left = [str(path) for path in Path(root).rglob("*.safetensors*")]
    return {"proposer": class_path(runner(llm).hidden_states_extractor), "records": records, "left": left}


def kept(llm: LLM, root: str) -> dict[str, Any]:
    """What extracted, and of each request the path in its response and the values in the file there."""
    _stand_in_for_cuda()
    prompts = PROMPTS
    outputs = generate(llm, prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    # In this process nobody but `generate` steps the engine, and the connector writes in the step after the last token.
    while llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        llm.llm_engine.step()
    records = []
    for output in outputs:
        path = Path(output.kv_transfer_params["hidden_states_path"])
        record = load_hidden_states(str(path))
        records.append(
            {
                "params": sorted(output.kv_transfer_params),
                "in the root": path.parent == Path(root),
                "of the request": path.name.startswith(f"{plain_id(output.request_id)}-"),
                "tokens": record["token_ids"].tolist(),
                "hidden states": record["hidden_states"].flatten(1).tolist(),
                "output": list(output.outputs[0].token_ids),
            }
        )
    return {
        "proposer": class_path(runner(llm).drafter),
        "records": records,
        "files": len(list(Path(root).glob("*.safetensors"))),
        "drafts": {name: value for name, value in metrics(llm).items() if "spec_decode" in name},
        "num_speculative_tokens": llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens,
        "groups": [type(g.kv_cache_spec).__name__ for g in runner(llm).kv_cache_config.kv_cache_groups],
    }


def _stand_in_for_cuda() -> None:
    """What the connector asks of CUDA at the end of a request, where copies are over when they return.

    Called once the engine is there: vLLM's CPU worker puts its own, which can do less, in these places.
    """

    class DoneEvent:
        def record(self, stream: Any = None) -> None: ...

        def synchronize(self) -> None: ...

        def query(self) -> bool:
            return True

    class OnlyStream:
        def wait_event(self, event: DoneEvent) -> None: ...

    torch.cuda.Event, torch.cuda.Stream = DoneEvent, OnlyStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    empty_like = torch.empty_like
    torch.empty_like = lambda *args, pin_memory=False, **kwargs: empty_like(*args, **kwargs)
