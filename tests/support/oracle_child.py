"""What the tests run in a process of its own, since an engine changes the process it is in.

    python -m tests.support.oracle_child FUNCTION '{"argument": ...}'

calls a function of this module and prints what it returns as one line of JSON, the last.
"""

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.interpreter import choose_runner
from bench.oracle.driver import Engine, ScheduleRun, read_texts, run_schedules
from bench.oracle.ranks import run_on_ranks
from bench.oracle.report import Record
from bench.oracle.schedules import SETUPS, RequestPlan, Setup
from bench.oracle.watch import Watcher
from bench.reference.dense import DenseModel
from tests.support.engine import TINY

MODEL = Path(TINY)


def schedules(count: int, seed: int, setups: list[str]) -> dict[str, Any]:
    """The record of random schedules on the engines of these names."""
    chosen = [setup for setup in SETUPS if setup.name in setups]
    return run_schedules(MODEL, count, seed, setups=chosen, progress=True).to_json()


def faults(seed: int, cases: list[tuple[str, str]], dtype: str = "float32") -> list[dict[str, Any]]:
    """Of every fault and the engine's name beside it, the record of one schedule."""
    from bench.oracle.faults import FAULTS

    return [
        run_schedules(MODEL, 1, seed, setups=[_setup(name)], plant=FAULTS[fault], dtype=dtype).to_json()
        for fault, name in cases
    ]


def on_rank(
    model: str, count: int, seed: int, setup: str, modules: int | None, graphs: bool, faults: list[str]
) -> list[dict[str, Any]]:
    """One rank's records of a setup that has several, one for each fault that is planted there."""
    from bench.oracle.faults import FAULTS

    return [
        run_schedules(
            Path(model),
            count,
            seed,
            modules=modules,
            setups=[_setup(setup)],
            plant=FAULTS[fault],
            graphs=graphs,
            progress=True,
        ).to_json()
        for fault in faults
    ]


def ranked_faults(seed: int, setup: str, faults: list[list[str]]) -> list[list[dict[str, Any]]]:
    """Of every rank, its records of one schedule, one for each fault that is planted there."""
    return run_on_ranks(MODEL, 1, seed, _setup(setup), faults=faults)


def shared_block() -> dict[str, Any]:
    """A block is computed twice, before different tokens, and then reused before those of the second time.

    The first request leaves the common prompt right after block 1. The second goes on with it; the host keeps the
    second's own block 1 beside the first's, under one hash, because it drops the last block that matches. The third
    matches further than that.
    """
    texts, _ = read_texts(MODEL)
    prompt, other = texts[0], texts[1]
    prompts = [prompt[:64] + other[:20], prompt[:140], prompt[:150]]
    plans = [
        RequestPlan(12 * index, tokens, 4, 0.0, [], None, diverging=index == 0) for index, tokens in enumerate(prompts)
    ]
    setup, record = _setup("chunks"), Record()
    with Engine(MODEL, **setup.engine_arguments()) as engine:
        watcher = Watcher(engine.runner, DenseModel(MODEL), record, 3, random.Random(0))
        ScheduleRun(engine, setup, watcher, "shared block", 0, 36, plans).run()
    return record.to_json()


def waits_for_the_device(setup: str, num_prompts: int) -> list[str]:
    """Where drafting passes wait for the device, in chunks and decode steps, on CUDA.

    The first pass of a shape may: kernels are compiled for it, and tables of pointers made.
    """
    from vllm import SamplingParams

    texts, _ = read_texts(MODEL)
    waits: list[str] = []
    with Engine(MODEL, **_setup(setup).engine_arguments(graphs=True)) as engine:
        propose = engine.drafter.propose

        def watched_propose(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                drafts = propose(*args, **kwargs)
            torch.cuda.set_sync_debug_mode("default")
            waits.extend(f"{warning.filename}:{warning.lineno}: {warning.message}" for warning in caught)
            return drafts

        for propose_now in (propose, watched_propose):
            engine.drafter.propose = propose_now
            engine.llm.generate(
                [{"prompt_token_ids": text[: 20 + 9 * i]} for i, text in enumerate(texts[:num_prompts])],
                [SamplingParams(temperature=0, max_tokens=8 + 3 * i, ignore_eos=True) for i in range(num_prompts)],
                use_tqdm=False,
            )
    return waits


def graphs_after_shutdown(setup: str) -> bool:
    """Whether a drafter that somebody still holds has its graphs when the engine is gone."""
    from vllm import SamplingParams

    with Engine(MODEL, **_setup(setup).engine_arguments()) as engine:
        drafter = engine.drafter
        prompt = {"prompt_token_ids": read_texts(MODEL)[0][0][:20]}
        engine.llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
        drafter.graphs = drafter.make_graphs()
    return drafter.graphs is not None


def greedy(num_prompts: int, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Greedy outputs with one draft a step, and how many drafts were accepted."""
    from vllm import SamplingParams

    texts, _ = read_texts(MODEL)
    prompts = [text[:num_tokens] for text in texts[:num_prompts]]
    record = Record()
    with Engine(MODEL, **_setup("K=1").engine_arguments() | {"num_gpu_blocks_override": 200}) as engine:
        Watcher(engine.runner, DenseModel(MODEL), record, 0, random.Random(0))
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
        )
    rejections = record.events.rejections
    return {
        "prompts": prompts,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "accepted": rejections.get(0, 0),
        "rejected": rejections.get(1, 0),
    }


def _setup(name: str) -> Setup:
    return next(setup for setup in SETUPS if setup.name == name)


if __name__ == "__main__":
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        choose_runner("v2")
    print("\n" + json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
