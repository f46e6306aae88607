"""Scenarios for `tests.support.forked_engine.run`: what is asked of an engine, with and without speculation alike."""

import contextlib
import random
import time
from typing import Any
from unittest.mock import Mock

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from bench.corpus import held_out_prompts
from bench.oracle.cache import module_caches
from bench.oracle.runners import V1Runner, view_of
from bench.workers.engine import drafter_of
from mtp.fusion import blocks
from mtp.fusion.gemms import weight_of_both
from proposers.models.step3p5_modules import run_module as fused_module
from tests.support import fp8_blocks
from tests.support.pass_observer import PassObserver

MAX_MODEL_LEN = 320
MAX_TOKENS = 40
BLOCK = 32
WINDOW = 64
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, WINDOW + 1, 2 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1)


def runner(llm: LLM) -> Any:
    """The model runner of an engine that lives in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def class_path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def metrics(llm: LLM) -> dict[str, Any]:
    """vLLM's own counters, by name."""
    return {
        m.name.removeprefix("vllm:"): m.values if hasattr(m, "values") else m.value
        for m in llm.get_metrics()
        if hasattr(m, "values") or hasattr(m, "value")
    }


def generate(llm: LLM, prompts: list[list[int]], params: Any, adapters: Any = None) -> list[Any]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=adapters)


def greedy(llm: LLM, prompts: list[list[int]], max_tokens: int = MAX_TOKENS, adapters: Any = None) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in generate(llm, prompts, params, adapters)]


def workloads(llm: LLM) -> dict[str, list[list[int]]]:
    """Greedy generations that must not depend on speculation, by name."""
    texts = held_out_prompts(llm.get_tokenizer(), 12, 200)
    shared = texts[8][: 3 * BLOCK]
    results = {
        "alone": greedy(llm, [texts[0]]),
        "eight": greedy(llm, [text[: 40 + 20 * i] for i, text in enumerate(texts[:8])]),
        "lengths": greedy(llm, [texts[9][:length] for length in LENGTHS]),
        "again": greedy(llm, [texts[0], texts[1]]),
        "shared prefix": greedy(llm, [shared + text[:20] for text in texts[9:12]]),
    }
    # Both a request that starts far from the end of the context and one that has a single token left.
    for left in (1, 2, 30):
        prompt = (texts[0] + texts[1])[: MAX_MODEL_LEN - left]
        results[f"{left} before the end"] = greedy(llm, [prompt], left)
    return results


def state(llm: LLM) -> dict[str, Any]:
    """What drafted, with which groups, and how it went."""
    config = llm.llm_engine.vllm_config
    result = {"metrics": metrics(llm), "block_size": config.cache_config.block_size}
    drafter = None
    if config.parallel_config.tensor_parallel_size == 1:
        drafter = drafter_of(runner(llm))
    if drafter is not None:
        result["proposer"] = class_path(drafter)
        if groups := getattr(drafter, "groups", None):
            result["groups"] = [group.kv_cache_group_id for group in groups.all]
            attn_groups = [attn for group in groups.all for attn in group.attn_groups]
            result["windows"] = sorted(str(drafter._windows_of(attn)) for attn in attn_groups)
    return result


def lossless(llm: LLM) -> dict[str, Any]:
    return {"tokens": workloads(llm), **state(llm)}


def resent(llm: LLM, lengths: list[int]) -> dict[str, Any]:
    """Prefix-cache hits, in tokens, of a prompt of each length that is asked for a second time."""
    text = held_out_prompts(llm.get_tokenizer(), 1, max(lengths))[0]
    hits = []
    for length in lengths:
        llm.reset_prefix_cache()
        greedy(llm, [text[:length]], 2)
        before = state(llm)["metrics"]["prefix_cache_hits"]
        greedy(llm, [text[:length]], 2)
        hits.append(state(llm)["metrics"]["prefix_cache_hits"] - before)
    return {"hits": hits, **state(llm)}


KEYED_BLOCKS = 3


def keyed(llm: LLM) -> dict[str, Any]:
    """Who makes the prefix cache's keys, and how many a prompt has that ends with a block."""
    core = llm.llm_engine.engine_core.engine_core
    hasher, counts = core.request_block_hasher, []

    def counting_hasher(request: Any) -> list[Any]:
        counts.append(len(hashes := hasher(request)))
        return hashes

    core.request_block_hasher = counting_hasher
    text = held_out_prompts(llm.get_tokenizer(), 1, KEYED_BLOCKS * BLOCK)[0]
    greedy(llm, [text], 1)
    return {"keys": [hasher.__module__, counts[0]], **state(llm)}


def modules_against_the_hosts(llm: LLM, as_with_kernels: bool) -> dict[str, Any]:
    """Runs vLLM's own modules after ours on the same rows; the largest difference of each, and the rows.

    Args:
        as_with_kernels: what is fused on CUDA only is fused here too, in its PyTorch version.
    """
    if as_with_kernels:
        blocks.has_kernels = lambda x: True
    model = drafter_of(runner(llm)).model
    run_module, num_modules = model.forward, model.model.num_mtp_layers
    largest, rows, wanted_rows = [0.0] * num_modules, [0] * num_modules, [0] * num_modules

    def run_both(spec_step_idx: int, wanted: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
        ours = run_module(spec_step_idx=spec_step_idx, wanted=wanted, **rest)
        theirs = type(model).forward(model, spec_step_idx=spec_step_idx, **rest)
        difference = ours - (theirs if wanted is None else theirs[wanted])
        largest[spec_step_idx] = max(largest[spec_step_idx], float(difference.abs().max()))
        rows[spec_step_idx] += len(theirs)
        wanted_rows[spec_step_idx] += len(ours)
        return ours

    model.forward = run_both
    texts = held_out_prompts(llm.get_tokenizer(), 4, 150)
    greedy(llm, [text[: 20 + 40 * i] for i, text in enumerate(texts)])
    attention = [module.mtp_block.self_attn for module in model.model.layers.values()]
    return {
        "largest": largest,
        "rows": rows,
        "wanted rows": wanted_rows,
        "fused": run_module.func is fused_module,
        "one GEMM": [weight_of_both(x.qkv_proj, x.g_proj) is not None for x in attention],
    }


def crowded(llm: LLM) -> dict[str, Any]:
    """More requests than the KV cache can hold at once."""
    texts = held_out_prompts(llm.get_tokenizer(), 8, 100)
    return {"tokens": greedy(llm, texts, 80), **state(llm)}


def adaptive(llm: LLM) -> dict[str, Any]:
    """Long generations in small batches, and how often which number of drafts was chosen."""
    texts = held_out_prompts(llm.get_tokenizer(), 6, 60)
    tokens = greedy(llm, texts, 200)
    lookup = llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup
    if lookup is None:
        return {"tokens": tokens, "chosen": {}}
    counted = {
        metric.labels["num_drafts"]: metric.value
        for metric in (llm.get_metrics() if llm.llm_engine.log_stats else ())
        if metric.name == "vllm:spec_decode_num_steps"
    }
    return {"tokens": tokens, "chosen": dict(lookup.chosen), "times": lookup.step_times(), "counted": counted}


def adaptive_asynchronous(llm: LLM) -> dict[str, Any]:
    return adaptive(llm)


def rates(llm: LLM) -> dict[str, Any]:
    """Enough drafts for acceptance rates worth a floor."""
    texts = held_out_prompts(llm.get_tokenizer(), 16, 200)
    return {"tokens": greedy(llm, texts, 96), **state(llm)}


def choices(llm: LLM) -> dict[str, Any]:
    """Stops in the middle of a draft, and two sequences of a request."""
    text = held_out_prompts(llm.get_tokenizer(), 1, 200)[0]
    tokenizer = llm.get_tokenizer()
    plain = greedy(llm, [text], 32)[0]
    result: dict[str, Any] = {"plain": plain, "stop token": [], "stop string": []}
    # A step verifies fewer than eight tokens, so one of eight neighbouring ones lies in the middle of a step.
    for i in range(8, 16):
        params = SamplingParams(temperature=0, max_tokens=32, stop_token_ids=[plain[i]], ignore_eos=True)
        output = generate(llm, [text], params)[0].outputs[0]
        result["stop token"].append([list(output.token_ids), output.finish_reason, output.stop_reason])
        word = tokenizer.decode(plain[i : i + 2])
        params = SamplingParams(temperature=0, max_tokens=32, stop=[word], ignore_eos=True)
        output = generate(llm, [text], params)[0].outputs[0]
        result["stop string"].append([output.text, output.finish_reason, word])
    # Greedy requests may not ask for two sequences; sampling from the likeliest token alone gives greedy tokens.
    for name, top_k in (("n=2 of one", 1), ("n=2", 0)):
        params = SamplingParams(n=2, temperature=1, top_k=top_k, seed=7, max_tokens=32, ignore_eos=True)
        result[name] = [list(o.token_ids) for o in generate(llm, [text], params)[0].outputs]
    return result


def samples(llm: LLM, count: int, temperature: float) -> dict[str, Any]:
    """First tokens of many seeded generations of one prompt."""
    # Of the held-out prompts, one whose continuation is neither certain nor close to uniform.
    prompt = held_out_prompts(llm.get_tokenizer(), 4, 40)[3]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=4, ignore_eos=True) for seed in range(count)
    ]
    tokens = [list(o.outputs[0].token_ids) for o in generate(llm, [prompt] * count, params)]
    return {"tokens": tokens, "by seed": by_seed(llm, prompt, temperature), **state(llm)}


def by_seed(llm: LLM, prompt: list[int], temperature: float, count: int = 24) -> dict[str, list[list[int]]]:
    """Longer generations under equal and other seeds: those of requests, and the one that is the process's."""

    def draw(seeds: list[int | None]) -> list[list[int]]:
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True) for seed in seeds]
        return [list(o.outputs[0].token_ids) for o in generate(llm, [prompt] * len(seeds), params)]

    def draw_after(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return draw([None] * count)

    seeds: list[int | None] = list(range(count))
    return {
        "requests": draw(seeds),
        # In another order and with ten more: each request has another index in the batch, and other neighbours.
        "requests, reversed": draw([*seeds, *range(100, 110)][::-1])[::-1][:count],
        "process": draw_after(5),
        "process again": draw_after(5),
        "process, otherwise": draw_after(6),
    }


def random_prompts(llm: LLM, vocab_size: int) -> dict[str, Any]:
    """For models without a tokenizer: prompts of random tokens, alone and in a batch, around the block size."""
    prompts = _random_prompts(vocab_size)
    return {"tokens": [*greedy(llm, prompts[-1:]), *greedy(llm, prompts)], **state(llm)}


def _random_prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(1, vocab_size) for _ in range(length)] for length in (*LENGTHS[:6], 150)]


def sampled(llm: LLM, prompt: list[int], count: int, temperature: float, max_tokens: int) -> dict[str, Any]:
    """So many outputs of one prompt, each drawn by itself, and what became of the drafts."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    tokens = [list(output.outputs[0].token_ids) for output in generate(llm, [prompt] * count, params)]
    found = metrics(llm)
    return {
        "tokens": tokens,
        "drafted": found["spec_decode_num_draft_tokens"],
        "accepted": found["spec_decode_num_accepted_tokens"],
    }


def adapted(llm: LLM, adapter: str, vocab_size: int) -> dict[str, Any]:
    """Requests of the base model, of an adapter, and of both in one batch."""
    prompts = _random_prompts(vocab_size)
    request = LoRARequest("adapter", 1, adapter)
    mixed = [request if i % 2 else None for i in range(len(prompts))]
    tokens = [greedy(llm, prompts, adapters=which) for which in (None, request, mixed)]
    return {"tokens": tokens, **state(llm)}


def slept(llm: LLM) -> dict[str, Any]:
    """The same prompts before and after sleep mode has taken the weights and the KV cache off the device."""
    graphs = drafter_of(runner(llm)).graphs
    graphs.replay = replay = Mock(wraps=graphs.replay)
    prompts = held_out_prompts(llm.get_tokenizer(), 5, 100)

    def draft() -> dict[str, Any]:
        replay.reset_mock()
        before = metrics(llm)["spec_decode_num_accepted_tokens"]
        tokens = greedy(llm, prompts)
        accepted = metrics(llm)["spec_decode_num_accepted_tokens"] - before
        return {"tokens": tokens, "accepted": accepted, "replays": replay.call_count}

    before = draft()
    llm.sleep(level=1)
    llm.wake_up()
    return {"before": before, "after": draft()}


def asynchronous(llm: LLM) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config.scheduler_config
    return {"async_scheduling": config.async_scheduling, **lossless(llm)}


def allow_async_scheduling() -> None:
    """vLLM turns asynchronous scheduling off on the CPU, where it gains nothing, and would wait for CUDA's events.

    The scheduler and the runner's bookkeeping, which run ahead of the sampled tokens, are what a drafter has to get
    along with, and they are the same everywhere.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def keep_async_scheduling(cls: type, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    class DoneEvent:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.record = self.synchronize = self.wait = lambda *args: None

    CpuPlatform.check_and_update_config = classmethod(keep_async_scheduling)
    torch.Event = DoneEvent
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda device=None: None


asynchronous.prepare = adaptive_asynchronous.prepare = allow_async_scheduling


def observed(llm: LLM, count: int, length: int, max_tokens: int) -> dict[str, Any]:
    """Greedy generations, and what the drafter fed its model in every pass of them."""
    observer = PassObserver(runner(llm))
    draw = random.Random(0)
    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    if llm.llm_engine.vllm_config.model_config.skip_tokenizer_init:
        prompts = [[draw.randrange(1, vocab_size) for _ in range(length)] for _ in range(count)]
    else:
        prompts = held_out_prompts(llm.get_tokenizer(), count, length)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = generate(llm, prompts, params)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    requests = {
        output.request_id: (prompt + generated, len(prompt))
        for output, prompt, generated in zip(outputs, prompts, tokens, strict=True)
    }
    wrong_slots = observer.wrong_slots()
    return {
        "tokens": tokens,
        "passes": len(observer.passes),
        "block sizes": observer.block_sizes,
        "wrong slots": wrong_slots[:10],
        "number of wrong slots": len(wrong_slots),
        "fed": observer.fed_tokens(requests),
        "heads": observer.drafts_by_heads(),
        **state(llm),
    }


def _few_prompts(llm: LLM) -> list[list[int]]:
    texts = held_out_prompts(llm.get_tokenizer(), 4, 60)
    return [text[:length] for text, length in zip(texts, (3, 33, 50, 60), strict=True)]


def few(llm: LLM) -> dict[str, Any]:
    """Greedy and seeded generations of few and short prompts, for engines that are slow."""
    prompts = _few_prompts(llm)
    seeded = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(4)]
    drawn = [
        [list(output.outputs[0].token_ids) for output in generate(llm, prompts[::way], seeded[::way])][::way]
        for way in (1, -1)
    ]
    return {"tokens": greedy(llm, prompts, 24), "drawn": drawn[0], "drawn in reverse": drawn[1], **state(llm)}


def few_greedy(llm: LLM) -> dict[str, Any]:
    """The greedy half of `few`: vLLM alone verifies sampled drafts at memory that was never set (vLLM issue 55005)."""
    return {"tokens": greedy(llm, _few_prompts(llm), 24), **state(llm)}


def few_in_fp8_blocks(llm: LLM) -> dict[str, Any]:
    """`few`, of a checkpoint with block scales."""
    return few(llm)


few_in_fp8_blocks.prepare = fp8_blocks.register_kernel


def dummy_runs(llm: LLM) -> dict[str, Any]:
    """Generations around the host's profiling and warm-up steps, whose requests are nobody's."""
    prompts = [text[:50] for text in held_out_prompts(llm.get_tokenizer(), 2, 60)]
    before = greedy(llm, prompts, 12)
    for caches in (True, False):
        runner(llm)._dummy_run(16, skip_attn=caches, is_profile=caches)
    return {"tokens": before, "again": greedy(llm, prompts, 12), **state(llm)}


def transferred(llm: LLM, max_tokens: int) -> dict[str, Any]:
    """Greedy continuations of prompts whose blocks another engine may have left."""
    texts = held_out_prompts(llm.get_tokenizer(), 3, 100)
    return {"tokens": greedy(llm, [text[: 70 + 5 * i] for i, text in enumerate(texts)], max_tokens), **state(llm)}


OFFLOADED = (100, 140, 170)
"""Lengths of prompts whose last whole block is followed by as many tokens as its draft rows depend on."""


def offloaded(llm: LLM) -> dict[str, Any]:
    """The same prompts twice, between which the prefix cache is reset: their blocks are in host memory alone."""
    *texts, other = held_out_prompts(llm.get_tokenizer(), len(OFFLOADED) + 1, max(OFFLOADED))
    prompts = [text[:length] for text, length in zip(texts, OFFLOADED, strict=True)]

    def play() -> dict[str, Any]:
        before = metrics(llm)
        tokens, after = greedy(llm, prompts), metrics(llm)
        counts = {name: after[name] - before[name] for name in COUNTS}
        accepted = [b - a for a, b in zip(before[ACCEPTED], after[ACCEPTED], strict=True)]
        return {"tokens": tokens, "accepted": accepted, **counts}

    first, reset = play(), False
    for _ in range(50):  # blocks on their way are in use, and steps notice when they have arrived
        greedy(llm, [other[:20]], 8)
        llm.llm_engine.step()  # one may still run, which overlaps the last, and blocks are kept until it has ended
        if reset := llm.reset_prefix_cache():
            break
        time.sleep(0.1)
    return {"first": first, "reset": reset, "again": play(), **state(llm)}


ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
COUNTS = ("prefix_cache_hits", "external_prefix_cache_hits")


def assert_brought_back(found: dict[str, Any]) -> None:
    """Of what `offloaded` has found: outputs and drafts don't depend on where the blocks came from."""
    first, again = found["first"], found["again"]
    assert found["reset"]
    assert [first[name] for name in COUNTS] == [0, 0]
    assert again["prefix_cache_hits"] == 0
    assert again["external_prefix_cache_hits"] >= BLOCK
    assert (again["tokens"], again["accepted"]) == (first["tokens"], first["accepted"])
    assert min(first["accepted"]) > 0


def rows_after_hits(llm: LLM, vocab_size: int) -> dict[str, Any]:
    """How far a draft's rows are from those of a run from scratch where a prompt was partly in the prefix cache.

    It parts from the prompt before it right after a block, and in chunks.
    """
    view = view_of(runner(llm))
    (cache,) = module_caches(view)
    propose, sample_tokens, rows = view.drafter.propose, view.runner.sample_tokens, []

    def noting_sample_tokens(*args: Any, **kwargs: Any) -> Any:
        view.scheduled = view.runner.execute_model_state.scheduler_output
        return sample_tokens(*args, **kwargs)

    if isinstance(view, V1Runner):
        view.runner.sample_tokens = noting_sample_tokens

    def reading_propose(*args: Any, **kwargs: Any) -> Any:
        request = view.read_pass(*args, **kwargs).requests[0]
        drafts = propose(*args, **kwargs)
        rows[:] = [torch.cat(cache.read(view.block_table(cache.group, 0), 0, request.last + 1), dim=-1)]
        return drafts

    view.drafter.propose = reading_propose
    draw = random.Random(0)
    first, other = ([draw.randrange(1, vocab_size) for _ in range(3 * BLOCK + 9)] for _ in range(2))
    second = [*first[: 2 * BLOCK], *other[: BLOCK + 5]]

    def play(*prompts: list[int]) -> tuple[torch.Tensor, list[int], int]:
        llm.reset_prefix_cache()
        before = metrics(llm)["prefix_cache_hits"]
        tokens = [greedy(llm, [prompt], 6)[0] for prompt in prompts]
        return rows[0], tokens[-1], metrics(llm)["prefix_cache_hits"] - before

    scratch, tokens, _ = play(second)
    result: dict[str, Any] = {}
    # A longer prompt hits what the second has finished, or what the first has.
    for name, prompts in {"parting": [first, second], "again": [second, second]}.items():
        found, same_tokens, hits = play(*prompts)
        furthest = float((found - scratch).abs().max() / scratch.abs().max()) if found.shape == scratch.shape else None
        result[name] = {"furthest": furthest, "hits": hits, "tokens": same_tokens == tokens}
    return result | state(llm)
