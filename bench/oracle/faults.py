"""Known faults, planted into a running drafter, for the tests that show that the oracle sees them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from bench.oracle.driver import Engine
from bench.oracle.replayed import EagerGraph
from bench.workers.engine import drafter_of as proposer_of

Plant = Callable[[Engine], AbstractContextManager[Any]]


def none(engine: Engine) -> AbstractContextManager[Any]:
    """No fault: what the same schedules look like without one."""
    return nullcontext()


def module_0_only(engine: Engine) -> AbstractContextManager[Any]:
    """The later modules write one row per request and pass, as vLLM's own proposer has it."""
    drafter = engine.drafter
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
    return mock.patch.object(engine.drafter.history, "store", return_value=None)


def primary_block_size(engine: Engine) -> AbstractContextManager[Any]:
    """All groups' slots are counted in blocks of the first group's size; those outside the cache are dropped."""
    from mtp import passes, slots

    primary = engine.drafter.groups.primary.block_size
    num_blocks = engine.runner.kv_cache_config.num_blocks
    write = slots.write_slot_mappings

    def wrong(groups: Any, *args: Any) -> None:
        sizes = [group.block_size for group in groups]
        for group in groups:
            group.block_size = primary
        write(groups, *args)
        for group, size in zip(groups, sizes, strict=True):
            group.block_size = size
            group.slot_mapping[group.slot_mapping >= num_blocks * size] = PADDING_SLOT_ID

    return mock.patch.object(passes, "write_slot_mappings", wrong)


def wrong_chunk_end(engine: Engine) -> AbstractContextManager[Any]:
    """The end of a chunk is fed what the host hands over: the prompt's last token, or a draft of this pass."""
    run_pass = engine.drafter._run_pass
    return mock.patch.object(
        engine.drafter, "_run_pass", lambda inputs, *args: run_pass(inputs._replace(prompt_token_ids=None), *args)
    )


def repairs_rejections_only(engine: Engine) -> AbstractContextManager[Any]:
    """Earlier rows are run again where drafts were rejected, and not where drafts were dropped before they were run."""
    drafter, batch = engine.drafter, engine.runner.input_batch
    propose, history = drafter.propose, drafter.history

    def forgetful_propose(**kwargs: Any) -> torch.Tensor:
        rejected = kwargs["num_rejected_tokens_gpu"]
        for index, request_id in enumerate(batch.req_ids):
            if request_id in history._slots and (rejected is None or rejected[index] == 0):
                history.valid[history._slots[request_id][1]] = 0
        return propose(**kwargs)

    return mock.patch.object(drafter, "propose", forgetful_propose)


def rollout_stays(engine: Engine) -> AbstractContextManager[Any]:
    """Every draft past the modules attends as the first of them does: the rows between are not looked at."""
    drafter = engine.drafter
    one_row = drafter._one_row_per_request
    return mock.patch.object(
        drafter, "_one_row_per_request", lambda cad, positions, ahead: one_row(cad, positions - (ahead - 1), 1)
    )


def stale_hidden_states(engine: Engine) -> AbstractContextManager[Any]:
    """Steps past the modules are given the hidden states that the first of them was given."""
    drafter = engine.drafter
    slide, forward = drafter._slide, drafter._forward
    first: list[torch.Tensor] = []

    def noting_slide(*args: Any) -> None:
        first.append(args[2].clone())
        slide(*args)
        first.clear()

    def stale_forward(inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if first:
            inputs["hidden_states"][: len(first[0])] = first[0]
        return forward(inputs, *args, **kwargs)

    return mock.patch.multiple(drafter, _slide=noting_slide, _forward=stale_forward)


def hidden_states_flow(engine: Engine) -> AbstractContextManager[Any]:
    """Modules take those of the module before them, whatever the descriptor says."""
    drafter = engine.drafter
    return mock.patch.object(drafter, "descriptor", replace(drafter.descriptor, hidden_states_flow=True))


def no_slots_for_module_1(engine: Engine) -> AbstractContextManager[Any]:
    """What module 1 computes is not kept. (Rows are as many as without the fault, so that ranks still meet.)"""
    drafter = engine.drafter
    forward = drafter._forward

    def unkept_forward(inputs: dict[str, Any], layers: Any, *args: Any) -> Any:
        if inputs.get("spec_step_idx") != 1:
            return forward(inputs, layers, *args)
        slots = {name: torch.full_like(slot, PADDING_SLOT_ID) for name, slot in layers.slot_mapping.items()}
        return forward(inputs, layers._replace(slot_mapping=slots), *args)

    return mock.patch.object(drafter, "_forward", unkept_forward)


def padding_drafts_ahead(engine: Engine) -> AbstractContextManager[Any]:
    """Requests that pad a replayed batch end right before position 0, so that drafts past that have positions."""
    replay = EagerGraph.replay

    def padding_replay(graph: EagerGraph) -> None:
        static = graph.graphs._static
        static.rows.num_rejected[static.seq_lens == 0] = 0
        replay(graph)

    return mock.patch.object(EagerGraph, "replay", padding_replay)


def half_block_size(engine: Engine) -> AbstractContextManager[Any]:
    """The proposer takes the blocks of its groups for half as long as they are."""
    for group in proposer_of(engine.runner).bound_groups.all:
        group.block_size //= 2
    return nullcontext()


def short_reach(engine: Engine) -> AbstractContextManager[Any]:
    """Of a prompt one row more is left out than nothing depends on."""
    return mock.patch.object(engine.drafter, "prompt_reach", engine.drafter.prompt_reach - 1)


def hosts_chunk_ends(engine: Engine) -> AbstractContextManager[Any]:
    """vLLM's own proposer gives the end of a prompt's chunk the prompt's last token, as it is without this package."""
    return mock.patch("proposers.v1.chunk_ends", return_value=None)


def hosts_limit(engine: Engine) -> AbstractContextManager[Any]:
    """vLLM's runner leaves its own proposer's passes out near the end of the context, as without this package."""
    return mock.patch("proposers.host.drafting.keyed_lookahead", return_value=0)


FAULTS: dict[str, Plant] = {
    "none": none,
    "module_0_only": module_0_only,
    "no_history": no_history,
    "primary_block_size": primary_block_size,
    "wrong_chunk_end": wrong_chunk_end,
    "repairs_rejections_only": repairs_rejections_only,
    "rollout_stays": rollout_stays,
    "stale_hidden_states": stale_hidden_states,
    "hidden_states_flow": hidden_states_flow,
    "no_slots_for_module_1": no_slots_for_module_1,
    "padding_drafts_ahead": padding_drafts_ahead,
    "half_block_size": half_block_size,
    "short_reach": short_reach,
    "hosts_chunk_ends": hosts_chunk_ends,
    "hosts_limit": hosts_limit,
}
