"""A client that keeps so many requests with a server at a time, and what it sees of them.

Requests are sent and timed by the function that `vllm bench serve` has for that. The rest of that command wants prompts
as text, and so a tokenizer, which a model of dummy weights has none of.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.servers import SERVED_NAME, Server, counter
from bench.spread import yardstick_ms

CELL_S = 1200  # after which a server is taken to hang
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preemptions": "vllm:num_preemptions",
    "looked_up_tokens": "vllm:prefix_cache_queries",
    "hit_tokens": "vllm:prefix_cache_hits",
}


class Request(NamedTuple):
    prompt: list[int]
    output_tokens: int


def longest_output(mean: int) -> int:
    """The most tokens that a request of `make_requests` has generated."""
    return mean + mean // 2


def make_requests(
    count: int, prompt_tokens: int, output_tokens: int, vocab_size: int, shared_prefix: float, seed: str
) -> list[Request]:
    """Prompts of random token ids, and how many tokens each has generated: half to one and a half of `output_tokens`.

    Args:
        shared_prefix: the share of each prompt that is the same in all prompts, whatever the seed.
        seed: other requests for another one, and the same in every process.
    """
    vocabulary = range(vocab_size)
    shared = random.Random("shared").choices(vocabulary, k=prompt_tokens)[: round(shared_prefix * prompt_tokens)]
    rng = random.Random(seed)
    return [
        Request(
            shared + rng.choices(vocabulary, k=prompt_tokens - len(shared)),
            rng.randint(output_tokens - output_tokens // 2, longest_output(output_tokens)),
        )
        for _ in range(count)
    ]


def run_cell(server: Server, requests: Sequence[Request], concurrency: int) -> dict[str, Any]:
    """Has a server answer all requests, `concurrency` of them at a time.

    Returns:
        What `summarise_cell` does, the counters of the server meanwhile, and `yardstick_ms` before.

    Raises:
        RuntimeError: the server ended or hangs, or a request failed; the message ends with the end of the server's log.
    """
    yardstick = yardstick_ms()
    try:
        before = server.get("/metrics")
        outputs, seconds = asyncio.run(_send_all(f"{server.url}/v1/completions", requests, concurrency))
        for request, output in zip(requests, outputs, strict=True):
            if not output.success or output.output_tokens != request.output_tokens:
                reason = output.error.strip().splitlines()[-1:] or ["no reason was given"]
                raise server.failure(f"gave {output.output_tokens} of {request.output_tokens} tokens, {reason[0]}")
        after = server.get("/metrics")
    except OSError as error:  # a timeout, too
        raise server.failure(f"doesn't answer: {error!r}") from error
    counters = {key: round(counter(after, name) - counter(before, name)) for key, name in COUNTERS.items()}
    return {**summarise_cell(outputs, seconds), **counters, "yardstick_ms": round(yardstick, 3)}


async def _send_all(url: str, requests: Sequence[Request], concurrency: int) -> tuple[list[Any], float]:
    """What became of each request, as vLLM's `RequestFuncOutput`, and the seconds from the first to the last of all."""
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

    semaphore = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=None)

    async def send(request: Request, session: aiohttp.ClientSession) -> Any:
        call = RequestFuncInput(
            prompt=request.prompt,
            api_url=url,
            prompt_len=len(request.prompt),
            output_len=request.output_tokens,
            model=SERVED_NAME,
            ignore_eos=True,
            extra_body={"temperature": 0},
        )
        async with semaphore:
            return await async_request_openai_completions(call, session)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        before = time.perf_counter()
        async with asyncio.timeout(CELL_S):
            outputs = await asyncio.gather(*(send(request, session) for request in requests))
        return outputs, time.perf_counter() - before


def summarise_cell(outputs: Sequence[Any], seconds: float) -> dict[str, Any]:
    """The figures of one cell.

    Args:
        outputs: vLLM's `RequestFuncOutput`s, with times in seconds.

    Returns:
        `output_tokens_per_s` of all; median and 99th percentile of `ttft_ms`, of `tpot_ms` (a request's time for a
        token after its first one) and of `itl_ms` (between two chunks of a stream, whatever tokens are in them).
    """
    tokens = sum(output.output_tokens for output in outputs)
    times = {
        "ttft": [output.ttft for output in outputs],
        "tpot": [
            (output.latency - output.ttft) / (output.output_tokens - 1)
            for output in outputs
            if output.output_tokens > 1
        ],
        "itl": [gap for output in outputs for gap in output.itl],
    }
    figures: dict[str, Any] = {
        "requests": len(outputs),
        "seconds": round(seconds, 4),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / seconds, 1),
    }
    for name, values in times.items():
        median, p99 = np.percentile(values, [50, 99]) * 1e3 if values else (float("nan"),) * 2
        figures |= {f"{name}_ms": round(float(median), 3), f"{name}_p99_ms": round(float(p99), 3)}
    return figures
