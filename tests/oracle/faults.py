"""Known faults, planted into a running drafter, for the tests that show that the oracle sees them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from tests.oracle.driver import Engine

Plant = Callable[[Engine], AbstractContextManager[Any]]


def none(engine: Engine) -> AbstractContextManager[Any]:
    """No fault: what the same schedules look like without one."""
    return nullcontext()


def module_0_only(engine: Engine) -> AbstractContextManager[Any]:
    """The later modules write one row per request and pass, as vLLM's own proposer has it."""
    drafter = engine.runner.drafter
    run_chain, forward = drafter._run_chain, drafter._forward
    last_rows = torch.empty(0)

    def noting_run_chain(window: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last_rows
        last_rows = window.last_rows
        return run_chain(window, *args, **kwargs)

    def sparse_forward(inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if inputs["spec_step_idx"] == 0:
            return forward(inputs, *args, **kwargs)
        slots = [group.slot_mapping for group in drafter.groups.all]
        saved = [slot.clone() for slot in slots]
        for slot, kept in zip(slots, saved, strict=True):
            slot.fill_(PADDING_SLOT_ID)
            slot[last_rows] = kept[last_rows]
        try:
            return forward(inputs, *args, **kwargs)
        finally:
            for slot, kept in zip(slots, saved, strict=True):
                slot.copy_(kept)

    return mock.patch.multiple(drafter, _run_chain=noting_run_chain, _forward=sparse_forward)


def no_history(engine: Engine) -> AbstractContextManager[Any]:
    """What was drafted and then rejected stays in the later modules' caches."""
    return mock.patch.object(engine.runner.drafter.history, "store", return_value=None)


def primary_block_size(engine: Engine) -> AbstractContextManager[Any]:
    """All groups' slots are counted in blocks of the first group's size; those outside the cache are dropped."""
    from mtp import proposer

    primary = engine.runner.drafter.groups.primary.block_size
    num_blocks = engine.runner.kv_cache_config.num_blocks
    write = proposer.write_slot_mappings

    def wrong(groups: Any, *args: Any) -> None:
        sizes = [group.block_size for group in groups]
        for group in groups:
            group.block_size = primary
        write(groups, *args)
        for group, size in zip(groups, sizes, strict=True):
            group.block_size = size
            group.slot_mapping[group.slot_mapping >= num_blocks * size] = PADDING_SLOT_ID

    return mock.patch.object(proposer, "write_slot_mappings", wrong)


def wrong_chunk_end(engine: Engine) -> AbstractContextManager[Any]:
    """The end of a chunk is fed the token that the host hands over: the prompt's last."""
    from mtp import proposer

    return mock.patch.object(proposer, "chunk_ends", return_value=None)


FAULTS: dict[str, Plant] = {
    "none": none,
    "none_with_two_block_sizes": none,
    "module_0_only": module_0_only,
    "no_history": no_history,
    "primary_block_size": primary_block_size,
    "wrong_chunk_end": wrong_chunk_end,
}
