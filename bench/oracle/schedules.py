"""Random schedules: which engines there are, and what requests come, when, and how they go."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from proposers.hidden_states.plan import connector_config
from proposers.options import KEY

BLOCK_SIZE = 32  # the smallest that the CPU's attention takes


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine.

    Attributes:
        k: the most drafts a step may ask for.
        spare: positions that the engine has after the longest request.
        adaptive: a controller chooses the drafts of each step, by a clock that has no rhyme or reason.
        k_by_batch: `(from, to, drafts)` by number of scheduled requests; None: always `k`.
        block_size: of the groups, tokens.
        num_blocks: of the whole KV cache, of all groups together.
        crowd: most requests come at once with short prompts and long outputs, so that they outgrow few blocks together
            and some are preempted: the scheduler admits none whose prompt doesn't fit.
        max_batched_tokens, chunk: the largest step, and the largest chunk of a prompt (0: as large as the step).
        prefixes: requests share what they begin with, in all the ways that there are (`bench/oracle/prefixes.py`).
        adapters: some requests have a LoRA adapter, of the one checkpoint that there is one for (`mimo`).
        hash_algorithm: of the prefix cache's keys.
        checkpoint: `tiny`; `wide`, the same with KV cache groups that differ in their block size
            (`variants.widen_sliding_layers`); `sliding`, the same with modules that all slide, over fewer rows
            (`variants.slide_modules`); `mimo`, a model of one module; `narrow`, a MiMo-V2 with narrower values
            (`variants.narrow_values`), which no attention on a CPU has.
        hidden_states_flow: as in `DraftDescriptor`; False: the checkpoint's modules all take the target's.
        grammars: the share of requests whose output has to follow a grammar, which cuts drafts short.
        overlapped: steps are scheduled before the one before them has told its tokens.
        compiled: the host compiles the models, where it would.
        host: vLLM's own proposer drafts, as it does for an architecture that this package doesn't know.
        replayed: decode batches go through a graph's inputs (`bench/oracle/replayed.py`).
        v1, v2: for vLLM's V1 and V2 model runners: what a setup is for is there too, and drafted for by this package.
        cheap: drafts read weights of 8 bits and are out of a part of the vocabulary (`variants.drafted_tokens`).
        hybrid: False: all layers in one KV cache group, whatever their attention, as with most KV connectors.
        extracts: the engine drafts nothing and keeps the hidden states of these layers.
        collects: the engine drafts, and keeps the hidden states of these layers beside that; some become records.
        ranks: of tensor parallelism, each a process with an engine and an oracle of its own.
        weight: how often it is drawn.
    """

    name: str
    k: int = 3
    k_by_batch: tuple[tuple[int, int, int], ...] | None = None
    adaptive: bool = False
    max_model_len: int = 320
    spare: int = 0
    max_num_seqs: int = 6
    max_batched_tokens: int = 64
    chunk: int = 0
    num_blocks: int = 200
    crowd: bool = False
    prefix_caching: bool = True
    prefixes: bool = False
    adapters: bool = False
    hash_algorithm: str = "sha256"
    block_size: int = BLOCK_SIZE
    checkpoint: Literal["tiny", "wide", "sliding", "mimo", "narrow"] = "tiny"
    hidden_states_flow: bool = True
    grammars: float = 0.0
    overlapped: bool = False
    compiled: bool = False
    host: bool = False
    replayed: bool = False
    v1: bool = True
    v2: bool = True
    cheap: bool = False
    hybrid: bool = True
    extracts: tuple[int, ...] = ()
    collects: tuple[int, ...] = ()
    ranks: int = 1
    speculative: dict[str, Any] = field(default_factory=dict)
    weight: int = 2

    def engine_arguments(self, graphs: bool = False, dtype: str = "float32", storage: str = "") -> dict[str, Any]:
        """For `vllm.LLM`; with `graphs` it captures decode steps, of `graph_sizes` requests, as CUDA graphs.

        Args:
            storage: a folder for records, of a setup that collects them.
        """
        speculative = {"method": "mtp", "num_speculative_tokens": self.k, **self.speculative}
        if self.extracts:
            layers = {"eagle_aux_hidden_state_layer_ids": list(self.extracts)}
            speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
            speculative["draft_model_config"] = {"hf_config": layers}
        if self.k_by_batch is not None:
            speculative["num_speculative_tokens_per_batch_size"] = list(self.k_by_batch)
        captured = {
            "mode": 3 if self.compiled else 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [size * (self.k + 1) for size in self.graph_sizes],
        }
        return {
            "dtype": dtype,
            "enforce_eager": not graphs and not self.compiled,
            **({"compilation_config": captured} if graphs else {}),
            "block_size": self.block_size,
            "max_model_len": self.max_model_len + self.spare,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_batched_tokens,
            "long_prefill_token_threshold": self.chunk,
            "num_gpu_blocks_override": self.num_blocks,
            "enable_prefix_caching": self.prefix_caching,
            "prefix_caching_hash_algo": self.hash_algorithm,
            "disable_hybrid_kv_cache_manager": not self.hybrid,
            "speculative_config": speculative,
            "kv_transfer_config": self._connector(storage) if self.collects else None,
            "additional_config": {KEY: {"adapt_drafts": self.adaptive}},
            "async_scheduling": self.overlapped,
            # On the CPU, vLLM gives rows without an adapter the last one's weights: of two there is one, and the last
            # one's are zero.
            **({"enable_lora": True, "max_loras": 2} if self.adapters else {}),
            "disable_log_stats": True,
            "tensor_parallel_size": self.ranks,
            "distributed_executor_backend": "external_launcher" if self.ranks > 1 else None,
        }

    def _connector(self, storage: str) -> dict[str, Any]:
        return connector_config({"storage_root": storage, "layer_ids": list(self.collects), "sample_rate": 0.3})

    @property
    def any_model(self) -> bool:
        """Whether it drafts without what only the tiny Step-3.5 has: its tokenizer, what is made of it, its ranks."""
        plain = self.checkpoint == "tiny" and self.hidden_states_flow and self.ranks == 1
        return plain and not self.grammars and not self.extracts and not self.collects

    def for_modules(self, count: int) -> "Setup":
        """The same, with a number of drafts that vLLM allows: more than there are modules only in whole rounds."""
        return self if self.k <= count else replace(self, k=-(-self.k // count) * count)

    @property
    def architecture(self) -> str:
        """Of the checkpoint that it is made of, for a setup that isn't for any."""
        return "MiMoV2FlashForCausalLM" if self.checkpoint == "narrow" else "Step3p5ForCausalLM"

    @property
    def graph_sizes(self) -> list[int]:
        """Numbers of requests that graphs are captured for. Some are left out, so that some batches are padded."""
        return [size for size in sorted({1, 2, 4, self.max_num_seqs}) if size <= self.max_num_seqs]


SETUPS = (
    Setup("chunks", max_batched_tokens=48, weight=3),
    Setup("slivers", max_batched_tokens=24, chunk=5, max_model_len=160),
    Setup("preemption", num_blocks=32, crowd=True, prefix_caching=False, weight=3),
    Setup("preemption and prefixes", num_blocks=36, crowd=True, weight=3),
    Setup("K=1", k=1, num_blocks=40, crowd=True, prefix_caching=False),
    Setup("K=2", k=2, num_blocks=48, chunk=40),
    Setup("K=6", k=6, max_batched_tokens=80),
    Setup("K by batch, from 0", k_by_batch=((1, 1, 3), (2, 2, 0), (3, 3, 1), (4, 6, 2)), weight=3),
    Setup("K by batch, to 6", k=6, k_by_batch=((1, 1, 6), (2, 2, 1), (3, 3, 4), (4, 6, 0)), num_blocks=60),
    Setup("to the end", max_model_len=96, max_batched_tokens=96),
    Setup("past the draft's end", max_model_len=160, chunk=40, speculative={"max_model_len": 80}),
    Setup("past the draft's end, replayed", k=6, max_model_len=160, replayed=True, speculative={"max_model_len": 72}),
    Setup("sliding modules", checkpoint="sliding", prefix_caching=False, overlapped=True),
    Setup(
        "sliding modules, replayed, K=6",
        checkpoint="sliding",
        prefix_caching=False,
        hybrid=False,
        num_blocks=24,
        crowd=True,
        replayed=True,
        k=6,
    ),
    Setup("one at a time", max_num_seqs=1, max_batched_tokens=32, weight=1),
    Setup("two block sizes", checkpoint="wide", num_blocks=60, chunk=40, weight=3),
    Setup("one KV cache group", hybrid=False, num_blocks=48, crowd=True),
    Setup("overlapped", overlapped=True, weight=3),
    Setup("overlapped preemption", overlapped=True, num_blocks=32, crowd=True, prefix_caching=False),
    Setup("overlapped, K by batch", overlapped=True, k_by_batch=((1, 1, 3), (2, 2, 0), (3, 3, 1), (4, 6, 2))),
    Setup("adaptive", adaptive=True, num_blocks=36, crowd=True),
    Setup("adaptive, overlapped", adaptive=True, overlapped=True, k=6, num_blocks=60),
    Setup("compiled", compiled=True, v2=False, weight=1),
    Setup("unpadded", speculative={"disable_padded_drafter_batch": True}, v2=False),
    Setup("sampled drafts", speculative={"draft_sample_method": "probabilistic"}),
    Setup("cheap drafts", cheap=True, num_blocks=36, crowd=True),
    Setup("cheap drafts, replayed, K=6", cheap=True, replayed=True, k=6, max_batched_tokens=48, weight=1),
    Setup("grammars", grammars=0.8, max_model_len=160, weight=3),
    Setup("grammars, overlapped", grammars=0.8, overlapped=True),
    Setup("one module", checkpoint="mimo", max_batched_tokens=48),
    Setup("one module, preemption", checkpoint="mimo", num_blocks=18, crowd=True),
    Setup("one module, K by batch", checkpoint="mimo", k_by_batch=((1, 1, 3), (2, 2, 0), (3, 3, 1), (4, 6, 2))),
    Setup("prefixes", prefixes=True, max_batched_tokens=96),
    Setup("prefixes, few blocks", prefixes=True, num_blocks=48, chunk=40, hash_algorithm="sha256_cbor"),
    Setup("prefixes, overlapped", prefixes=True, overlapped=True, k=6, hash_algorithm="xxhash"),
    Setup("prefixes, one module", checkpoint="mimo", prefixes=True, chunk=40, hash_algorithm="xxhash_cbor"),
    Setup("prefixes, adapters", checkpoint="mimo", prefixes=True, adapters=True, chunk=40),
    Setup("prefixes, vLLM's own", checkpoint="mimo", host=True, prefixes=True, chunk=40),
    Setup("prefixes, vLLM's own modules", host=True, prefixes=True, v1=False),
    Setup("vLLM's own", checkpoint="mimo", host=True, max_batched_tokens=48),
    Setup("vLLM's own, to the end", checkpoint="mimo", host=True, max_model_len=96, max_batched_tokens=96),
    Setup("the target's hidden states", hidden_states_flow=False, max_model_len=160, num_blocks=24, crowd=True),
    Setup(
        "the target's hidden states, K=6",
        hidden_states_flow=False,
        k=6,
        prefix_caching=False,
        max_model_len=160,
        max_batched_tokens=48,
    ),
    Setup("replayed", replayed=True, num_blocks=36, crowd=True, weight=3),
    Setup("replayed, K=6", replayed=True, k=6, num_blocks=48, crowd=True, overlapped=True),
    Setup(
        "replayed, K by batch",
        replayed=True,
        k=6,
        k_by_batch=((1, 1, 4), (2, 2, 0), (3, 3, 1), (4, 6, 6)),
        num_blocks=60,
        crowd=True,
    ),
    Setup("replayed, two block sizes", replayed=True, checkpoint="wide", num_blocks=60, chunk=40),
    Setup("replayed, one module", replayed=True, checkpoint="mimo"),
    Setup("narrow values", checkpoint="narrow", num_blocks=60, chunk=40),
    Setup("narrow values, K=6", checkpoint="narrow", k=6, num_blocks=60, crowd=True),
    Setup("extraction", extracts=(0, 3, 6), max_batched_tokens=48, chunk=20, num_blocks=36, crowd=True),
    Setup("extraction, overlapped", extracts=(6, 1), overlapped=True, weight=1),
    Setup("extraction, two block sizes", extracts=(2,), checkpoint="wide", num_blocks=60, weight=1),
    Setup("records beside drafts", collects=(0, 3, 6), max_batched_tokens=48, chunk=20, num_blocks=36, crowd=True),
    Setup("records beside drafts, overlapped", collects=(6, 1), overlapped=True, k=6, num_blocks=60, weight=1),
    Setup("two ranks", ranks=2, max_model_len=160, max_num_seqs=4, max_batched_tokens=48, weight=1),
    Setup(
        "two ranks, local argmax",
        ranks=2,
        max_model_len=160,
        max_num_seqs=4,
        max_batched_tokens=48,
        weight=1,
        speculative={"use_local_argmax_reduction": True},
    ),
    Setup(
        "two ranks, cheap drafts",
        ranks=2,
        max_model_len=160,
        max_num_seqs=4,
        max_batched_tokens=48,
        weight=1,
        cheap=True,
        speculative={"use_local_argmax_reduction": True},
    ),
)


def setup_called(name: str) -> Setup:
    """The setup of that name. Raises `ValueError` where there is none."""
    for setup in SETUPS:
        if setup.name == name:
            return setup
    raise ValueError(f"There is no engine called {name!r}: choose from {', '.join(repr(x.name) for x in SETUPS)}.")


# Of the text that the tiny model writes, lower case goes on for a few tokens before anything else comes.
GRAMMARS = (
    r"[a-z_ ().,=:\n]*",
    r"([a-z_]+ = [a-z0-9_.()]+\n    )+",
    r"([a-z_]{3,}[ \n]){2,6}",
)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request to come.

    Attributes:
        step: it joins before that step.
        abort_after: it is aborted that many steps later, if it is still there; None: never.
        diverging: the prompt leaves an earlier one's right after a block.
        grammar: a regular expression that the output must follow, and which may end it.
        parting: how it is to part from the requests before it (`bench/oracle/prefixes.py`).
        follows: its prompt begins with all tokens of the last request that finished before it came.
        salt: of its keys in the prefix cache.
        adapted: it has the LoRA adapter.
        resets: the prefix cache is reset before it comes.
    """

    step: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    stop_token_ids: list[int]
    abort_after: int | None
    diverging: bool = False
    grammar: str | None = None
    parting: str | None = None
    follows: bool = False
    salt: str | None = None
    adapted: bool = False
    resets: bool = False


def plan_schedule(
    rng: random.Random, setup: Setup, texts: Sequence[Sequence[int]], stops: Sequence[int]
) -> tuple[int, list[RequestPlan]]:
    """Draws one schedule: its number of steps, and its requests in the order of their coming.

    Args:
        texts: token streams, each longer than `max_model_len`, to cut prompts from.
        stops: tokens that are frequent enough to end a request now and then.
    """
    if setup.prefixes:
        from bench.oracle.prefixes import plan_prefixes

        return plan_prefixes(rng, setup, texts)
    num_steps = rng.randint(40 if setup.crowd else 10, 60)
    prefix = _cut(rng, texts, setup.max_model_len)
    count = rng.randint(setup.max_num_seqs if setup.crowd else 1, 3 + 2 * setup.max_num_seqs)
    # Most come early, so that there is a crowd.
    steps = sorted(int(num_steps * rng.random() ** (4 if setup.crowd else 2)) for _ in range(count))
    return num_steps, [_plan_request(rng, setup, texts, stops, prefix, step) for step in steps]


def _plan_request(
    rng: random.Random,
    setup: Setup,
    texts: Sequence[Sequence[int]],
    stops: Sequence[int],
    prefix: Sequence[int],
    step: int,
) -> RequestPlan:
    prompt, diverging = _plan_prompt(rng, setup, texts, prefix)
    stays = setup.crowd and rng.random() < 0.8
    if stays:
        prompt = prompt[:40] if rng.random() < 0.5 else prompt[: 2 * BLOCK_SIZE + 8]
    room = setup.max_model_len - len(prompt)
    max_tokens = room if stays or rng.random() < 0.15 else rng.randint(1, min(room, 50))
    return RequestPlan(
        step=step,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0.0 if rng.random() < 0.55 else rng.choice([0.3, 0.7, 1.0]),
        stop_token_ids=rng.sample(list(stops), 3) if rng.random() < 0.2 else [],
        abort_after=rng.randint(0, 12) if not stays and rng.random() < 0.15 else None,
        diverging=diverging and len(prompt) > BLOCK_SIZE,
        grammar=rng.choice(GRAMMARS) if setup.grammars and rng.random() < setup.grammars else None,
    )


def _plan_prompt(
    rng: random.Random, setup: Setup, texts: Sequence[Sequence[int]], prefix: Sequence[int]
) -> tuple[list[int], bool]:
    """A prompt, and whether it leaves the schedule's common one right after a block."""
    longest = setup.max_model_len - 1
    kind = rng.random()
    if kind < 0.15:
        return _cut(rng, texts, rng.randint(1, 4)), False
    if kind < 0.25:
        return _cut(rng, texts, rng.randint(longest - 12, longest)), False
    if kind < 0.40:
        return list(prefix[: rng.randint(1, longest)]), False
    if kind < 0.65 and longest > BLOCK_SIZE:
        shared = BLOCK_SIZE * rng.randint(1, (longest - 1) // BLOCK_SIZE)
        tail = _cut(rng, texts, rng.randint(1, min(40, longest - shared)))
        if tail[0] == prefix[shared]:
            tail[0] = (tail[0] + 1 + rng.randrange(100)) % max(map(max, texts)) + 1
        return [*prefix[:shared], *tail], True
    return _cut(rng, texts, rng.randint(5, min(longest, 200))), False


def _cut(rng: random.Random, texts: Sequence[Sequence[int]], length: int) -> list[int]:
    text = rng.choice(texts)
    start = rng.randrange(len(text) - length)
    return list(text[start : start + length])


def draw_setups(rng: random.Random, count: int, setups: Sequence[Setup] = SETUPS) -> Iterator[tuple[Setup, int]]:
    """Yields every setup that gets any of `count` schedules, with how many; each gets one before any gets two."""
    chosen = [setup for setup, _ in zip(rng.sample(list(setups), len(setups)), range(count), strict=False)]
    rest = rng.choices(list(setups), [setup.weight for setup in setups], k=max(0, count - len(chosen)))
    for setup in setups:
        if number := chosen.count(setup) + rest.count(setup):
            yield setup, number
