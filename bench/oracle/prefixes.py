"""Schedules of requests that share what they begin with, in all the ways that there are to part.

A few families of requests have a prompt in common. Each request after the first leaves it at some token, is the same
prompt again, or goes on with everything that an earlier request had, sampled output included. `Events.partings` counts
the prefix hits of each kind.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from bench.oracle.schedules import RequestPlan, Setup

INSIDE, AT, AFTER = "inside a block", "at a block's end", "right after a block"
AGAIN, SALTED, ALONE = "not at all", "not at all, under the same salt", "not at all, under a salt of its own"
ADAPTED = "not at all, with the same adapter"
GREEDY, SAMPLED = "after another's greedy output", "after another's sampled output"
PARTINGS = (INSIDE, AT, AFTER, AGAIN, SALTED, GREEDY, SAMPLED)
"""All kinds of which there are hits. Under a salt of its own a request has none."""
KINDS = (*PARTINGS, ALONE, GREEDY, SAMPLED)
"""What is planned; with adapters `ADAPTED`, too."""

FURTHEST = 6
"""Parting right after a block is parting that many tokens after its end at most: as many as any draft looks ahead."""


def plan_prefixes(rng: random.Random, setup: Setup, texts: Sequence[Sequence[int]]) -> tuple[int, list[RequestPlan]]:
    """Draws one schedule: its number of steps, and its requests in the order of their coming."""
    num_steps = rng.randint(60, 90)
    block_size = setup.block_size
    longest = setup.max_model_len - block_size
    prompts = [_cut(rng, texts, rng.randint(min(3 * block_size, longest - 1), longest)) for _ in range(2)]
    kinds = [*KINDS, ADAPTED] if setup.adapters else list(KINDS)
    plans = []
    for prompt in prompts:
        first = _request(rng, setup, 0, prompt, 0.0)
        plans += [first, replace(first, step=1, salt="shared")]
        plans += [replace(first, step=1, adapted=True)] if setup.adapters else []
    # Each begins once those before it have run for some steps.
    steps = sorted(rng.randint(8, num_steps - 10) for _ in range(rng.randint(len(kinds), 16)))
    kinds = [*rng.sample(kinds, len(kinds)), *rng.choices(kinds, k=len(steps) - len(kinds))]
    for step, kind in zip(steps, kinds, strict=True):
        plans.append(_plan(rng, setup, texts, rng.choice(prompts), step, kind))
    # A step that is under way when the cache is reset is thrown away with its tokens, which its pass has shown.
    if rng.random() < 0.5 and not setup.overlapped:
        middle = len(plans) // 2
        plans[middle] = replace(plans[middle], resets=True)
    return num_steps, plans


def _plan(
    rng: random.Random, setup: Setup, texts: Sequence[Sequence[int]], prompt: list[int], step: int, kind: str
) -> RequestPlan:
    temperature = rng.choice((0.0, 0.7))
    if kind in (GREEDY, SAMPLED):
        # Which of both it is depends on who has finished by then.
        tail = _cut(rng, texts, rng.randint(1, 12))
        return replace(_request(rng, setup, step, tail, temperature), follows=True)
    plan = _request(rng, setup, step, _parted(rng, setup.block_size, texts, prompt, kind), temperature)
    salt = {SALTED: "shared", ALONE: f"of step {step}, {rng.random()}"}.get(kind)
    return replace(plan, parting=kind, salt=salt, adapted=kind == ADAPTED)


def _parted(
    rng: random.Random, block_size: int, texts: Sequence[Sequence[int]], prompt: list[int], kind: str
) -> list[int]:
    block = block_size * rng.randint(1, (len(prompt) - 1) // block_size)
    beyond = {INSIDE: rng.randint(FURTHEST + 1, block_size - 1), AT: 0, AFTER: rng.randint(1, FURTHEST)}
    if kind not in beyond:
        return list(prompt)
    shared = min(block + beyond[kind], len(prompt) - 1)
    tail = _cut(rng, texts, rng.randint(2, block_size // 2))
    if tail[0] == prompt[shared]:
        tail = tail[1:] if tail[1] != prompt[shared] else [tail[0] ^ 1, *tail[1:]]
    return [*prompt[:shared], *tail]


def _request(rng: random.Random, setup: Setup, step: int, prompt: list[int], temperature: float) -> RequestPlan:
    room = max(1, setup.max_model_len - len(prompt))
    return RequestPlan(step, prompt, min(room, rng.randint(1, 20)), temperature, [], None)


def _cut(rng: random.Random, texts: Sequence[Sequence[int]], length: int) -> list[int]:
    text = rng.choice(texts)
    start = rng.randrange(len(text) - length)
    return list(text[start : start + length])
