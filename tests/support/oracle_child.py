"""What the tests of the oracle run in a process of its own: an engine changes the one it is in."""

import random
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.oracle.driver import Engine, ScheduleRun, read_texts, run_schedules
from bench.oracle.ranks import run_on_ranks
from bench.oracle.report import Report
from bench.oracle.schedules import SETUPS, RequestPlan, setup_called
from bench.oracle.watch import Watcher
from bench.reference.dense import DenseModel
from tests.support.children import TINY

MODEL = Path(TINY)


def schedules(count: int, seed: int, setups: list[str]) -> dict[str, Any]:
    """The report of random schedules on the engines of these names."""
    chosen = [setup for setup in SETUPS if setup.name in setups]
    return run_schedules(MODEL, count, seed, setups=chosen, progress=True).to_json()


def faults(seed: int, cases: list[tuple[str, str]], dtype: str = "float32") -> list[dict[str, Any]]:
    """Of every fault and the engine's name beside it, the report of one schedule."""
    from bench.oracle.faults import FAULTS

    return [
        run_schedules(MODEL, 1, seed, setups=[setup_called(name)], plant=FAULTS[fault], dtype=dtype).to_json()
        for fault, name in cases
    ]


def ranked_faults(seed: int, setup: str, faults: list[list[str]]) -> list[list[dict[str, Any]]]:
    """Of every rank, its reports of one schedule, one for each fault that is planted there."""
    return run_on_ranks(MODEL, 1, seed, setup_called(setup), faults=faults)


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
    setup, report = setup_called("chunks"), Report()
    with Engine(MODEL, **setup.engine_arguments()) as engine:
        watcher = Watcher(engine.runner, DenseModel(MODEL), report, 3, random.Random(0))
        ScheduleRun(engine, setup, watcher, "shared block", 0, 36, plans).run()
    return report.to_json()


def waits_for_the_device(setup: str, num_prompts: int) -> list[str]:
    """Where drafting passes wait for the device, in chunks and decode steps, on CUDA.

    The first pass of a shape may: kernels are compiled for it, and tables of pointers made.
    """
    from vllm import SamplingParams

    texts, _ = read_texts(MODEL)
    waits: list[str] = []
    with Engine(MODEL, **setup_called(setup).engine_arguments(graphs=True)) as engine:
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

    with Engine(MODEL, **setup_called(setup).engine_arguments()) as engine:
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
    report = Report()
    with Engine(MODEL, **setup_called("K=1").engine_arguments() | {"num_gpu_blocks_override": 200}) as engine:
        Watcher(engine.runner, DenseModel(MODEL), report, 0, random.Random(0))
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
        )
    rejections = report.events.rejections
    return {
        "prompts": prompts,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "accepted": rejections.get(0, 0),
        "rejected": rejections.get(1, 0),
    }
