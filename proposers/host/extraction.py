"""Extraction of hidden states. These patches touch code that every engine runs, and act only where there is a plan.

The extractor is an attribute of the model runner, `hidden_states_extractor`, beside its drafter. Where extraction is
the speculative method itself, the runner is built without a speculative config, and its steps are those of an engine
without speculation.
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from packaging.specifiers import SpecifierSet

from proposers.hidden_states.adopted import adopt
from proposers.hidden_states.plan import (
    CONNECTOR_OF_THE_HOST,
    METHOD,
    ExtractionPlan,
    asks_for_hidden_states,
    check_configuration,
)
from proposers.host.drafting import NO_REGISTRY, PLUGIN_PROPOSERS
from proposers.host.patching import patch

logger = logging.getLogger("vllm.proposers")

NO_TENSORS_BESIDE = "a KVCacheConfig can hold supplementary tensors"


# The configuration.


@patch(
    "vllm.config.vllm:VllmConfig.__post_init__",
    ("self",),
    why="vLLM drafts the token it has just sampled, which is never right, and verifies two positions a step; with "
    "no drafts at all it verifies one. Layer ids and configurations are checked here, before a process starts.",
    upstream="none yet",
    until="vLLM's extraction drafts nothing and checks its layer ids",
)
def draft_nothing(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        adopt(self)
        if ExtractionPlan.of(self) is not None:
            check_configuration(self)
        original(self)

    return __post_init__


@patch(
    "vllm.config.vllm:VllmConfig.__init__",
    ("__dataclass_self__", "args", "kwargs"),
    why="a copy of a config is validated like a new one, and no drafts would be refused.",
    upstream="none yet",
    until="vLLM's extraction drafts nothing",
)
def copy_as_given(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("speculative_config")
        if asks_for_hidden_states(config):
            config.num_speculative_tokens = config.num_speculative_tokens or 1
        original(self, *args, **kwargs)

    return __init__


@patch(
    "vllm.config.vllm:VllmConfig.compute_hash",
    ("self", ...),
    why="the compiled graph has the captures in it, so it must not be taken for one without them, or with others.",
    upstream="none yet",
    until="never: it goes with the captures",
)
def name_graphs_by_plan(original: Any) -> Any:
    def compute_hash(self: Any, *args: Any, **kwargs: Any) -> str:
        digest: str = original(self, *args, **kwargs)
        plan = ExtractionPlan.of(self)
        if plan is None:
            return digest
        captures = hashlib.sha256(repr((plan.layer_ids, plan.num_slices)).encode()).hexdigest()[:10]
        return f"{digest}-captured-{captures}"

    return compute_hash


# The model runners.


def _with_extractor(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, device: Any) -> None:
        plan = ExtractionPlan.of(vllm_config)
        if plan is None:
            _say_who_extracts(vllm_config)
            original(self, vllm_config, device)
            return
        original(self, _without_the_method(vllm_config), device)
        self.vllm_config = vllm_config
        self.hidden_states_extractor = _build_extractor(plan, vllm_config, device)

    return __init__


def _say_who_extracts(vllm_config: Any) -> None:
    if asks_for_hidden_states(vllm_config.speculative_config):
        logger.info(
            "vLLM's own proposer extracts hidden states: the configuration names its %s, with settings that "
            "vllm-mtp-proposers doesn't serve or beside others. For its extraction name HiddenStatesConnector instead.",
            CONNECTOR_OF_THE_HOST,
        )


def _without_the_method(vllm_config: Any) -> Any:
    """The config of an engine without speculation, where speculation is extraction."""
    if not asks_for_hidden_states(vllm_config.speculative_config):
        return vllm_config
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return plain


def _build_extractor(plan: ExtractionPlan, vllm_config: Any, device: Any) -> Any:
    from proposers.hidden_states.extractor import ExtractHiddenStatesProposer

    alone = asks_for_hidden_states(vllm_config.speculative_config)
    logger.info(
        "%s.%s keeps the hidden states %s of every token, %s.",
        ExtractHiddenStatesProposer.__module__,
        ExtractHiddenStatesProposer.__name__,
        list(plan.layer_ids),
        "instead of vLLM's own proposer (MTP_PROPOSERS=upstream switches back)" if alone else "beside what drafts",
    )
    return ExtractHiddenStatesProposer(plan, vllm_config, device)


def _extractor_of(runner: Any) -> Any:
    return getattr(runner, "hidden_states_extractor", None)


_WHY_WITHOUT_SPECULATION = (
    f"with {METHOD} as its speculative method the runner wants the EAGLE3 interface of the model, a draft per request, "
    "the rejection sampler in every step, and recurrent states by accepted drafts. The captures are hooks of the "
    "model, so its steps can be those of an engine without speculation."
)


@patch(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__",
    ("self", "vllm_config", "device"),
    why=_WHY_WITHOUT_SPECULATION,
    upstream=NO_REGISTRY,
    until=PLUGIN_PROPOSERS,
)
def add_extractor_on_v1(original: Any) -> Any:
    return _with_extractor(original)


@patch(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__",
    ("self", "vllm_config", "device"),
    why=_WHY_WITHOUT_SPECULATION,
    upstream=NO_REGISTRY,
    until=PLUGIN_PROPOSERS,
)
def add_extractor_on_v2(original: Any) -> Any:
    return _with_extractor(original)


@patch(
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    ("self", ...),
    why="the extractor hooks the layers of the model before its first forward, so that they are in every graph.",
    upstream=NO_REGISTRY,
    until=PLUGIN_PROPOSERS,
)
def hook_model(original: Any) -> Any:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if extractor := _extractor_of(self.model_runner):
            extractor.load_model(self.model_runner.get_model())

    return load_model


# The rows: their memory, and what it costs.


@patch(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache_tensors",
    ("self", "kv_cache_config", "kernel_block_sizes", "kv_cache_allocation_context"),
    why="the rows are allocated after the KV cache and in its memory pool, so that sleep mode releases them too.",
    upstream="none yet",
    until=NO_TENSORS_BESIDE,
)
def allocate_rows_on_v1(original: Any) -> Any:
    def initialize_kv_cache_tensors(
        self: Any, kv_cache_config: Any, kernel_block_sizes: Any, kv_cache_allocation_context: Any = None
    ) -> Any:
        def allocate(context: Any) -> Any:
            return original(self, kv_cache_config, kernel_block_sizes, context)

        def block_tables() -> tuple[list[Any], None]:
            return [table.block_table.gpu for table in self.input_batch.block_table.block_tables], None

        return _with_rows(self, kv_cache_config, kv_cache_allocation_context, allocate, block_tables)

    return initialize_kv_cache_tensors


@patch(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
    ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    why="as on the V1 runner: the rows are allocated after the KV cache and in its memory pool.",
    upstream="none yet",
    until=NO_TENSORS_BESIDE,
)
def allocate_rows_on_v2(original: Any) -> Any:
    def initialize_kv_cache(
        self: Any, kv_cache_config: Any, is_profiling: bool = False, kv_cache_allocation_context: Any = None
    ) -> None:
        def allocate(context: Any) -> None:
            original(self, kv_cache_config, is_profiling, context)

        def block_tables() -> tuple[list[Any], list[int]]:
            return self.block_tables.input_block_tables, self.block_tables.block_sizes

        _with_rows(self, kv_cache_config, kv_cache_allocation_context, allocate, block_tables)

    return initialize_kv_cache


def _with_rows(
    runner: Any,
    kv_cache_config: Any,
    context: Any,
    allocate: Callable[[Any], Any],
    block_tables: Callable[[], tuple[Any, Any]],
) -> Any:
    """The host's allocation of its KV cache, in its context, and ours after it in the same."""
    extractor = _extractor_of(runner)
    if extractor is None:
        return allocate(context)
    rows: list[Any] = []

    @contextmanager
    def with_rows() -> Iterator[None]:
        with context or nullcontext():
            yield
            rows.extend(extractor.allocate(kv_cache_config, *block_tables()))

    result = allocate(with_rows())
    # Where the host copies blocks, it copies every tensor of this list.
    runner.kv_caches += rows
    return result


def _bill_rows(original: Any) -> Any:
    def pool_bytes_per_block(*arguments: Any) -> int:
        *_, vllm_config, kv_cache_groups = arguments  # after the builder, where there is one
        bytes_per_block: int = original(*arguments)
        return bytes_per_block + _row_bytes_per_block(vllm_config, kv_cache_groups)

    return pool_bytes_per_block


def _row_bytes_per_block(vllm_config: Any, kv_cache_groups: Any) -> int:
    plan = ExtractionPlan.of(vllm_config)
    if plan is None:
        return 0
    from mtp.store import row_bytes_per_block

    return row_bytes_per_block(kv_cache_groups, plan.stored_bytes)


@patch(
    "vllm.v1.core.kv_cache_utils:_pool_bytes_per_block",
    ("vllm_config", "kv_cache_groups"),
    why="a block of the pool costs its rows too, wherever the host checks that memory suffices.",
    upstream="none yet",
    until=NO_TENSORS_BESIDE,
    versions=SpecifierSet("<0.33"),
)
def bill_rows(original: Any) -> Any:
    return _bill_rows(original)


@patch(
    "vllm.v1.core.kv_cache_planning:_pool_bytes_per_block_from_builder",
    ("builder", "vllm_config", "kv_cache_groups"),
    why="a block of the pool costs its rows too: both what memory suffices for and the number of blocks are by it.",
    upstream="none yet",
    until=NO_TENSORS_BESIDE,
    versions=SpecifierSet(">=0.33"),
)
def bill_rows_by_builder(original: Any) -> Any:
    return _bill_rows(original)


@patch(
    "vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups",
    ("vllm_config", "kv_cache_groups", "available_memory"),
    why="the number of blocks is what remains after the rows have had their share.",
    upstream="none yet",
    until=NO_TENSORS_BESIDE,
    versions=SpecifierSet("<0.33"),
)
def leave_room_for_rows(original: Any) -> Any:
    def get_kv_cache_config_from_groups(vllm_config: Any, kv_cache_groups: Any, available_memory: int) -> Any:
        if row_bytes := _row_bytes_per_block(vllm_config, kv_cache_groups):
            from vllm.v1.core.kv_cache_utils import _pool_bytes_per_block

            billed = _pool_bytes_per_block(vllm_config, kv_cache_groups)
            available_memory = available_memory // billed * (billed - row_bytes)
        return original(vllm_config, kv_cache_groups, available_memory)

    return get_kv_cache_config_from_groups


PATCHES = (
    draft_nothing,
    copy_as_given,
    name_graphs_by_plan,
    add_extractor_on_v1,
    add_extractor_on_v2,
    hook_model,
    allocate_rows_on_v1,
    allocate_rows_on_v2,
    bill_rows,
    bill_rows_by_builder,
    leave_room_for_rows,
)
