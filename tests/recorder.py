"""Writes down what a drafter feeds its model in a running engine, and judges it by the requests' own tokens."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID


@dataclass
class Forward:
    module: int
    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    output: torch.Tensor | None = None


@dataclass
class Pass:
    """One call of `propose`."""

    req_ids: list[str]
    starts: list[int]
    last_rows: list[int]
    chunk_ends: list[bool]
    tables: dict[int, np.ndarray]
    forwards: list[Forward] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)

    def requests(self) -> list[int]:
        """The request of each row of the first forward."""
        return [r for r in range(len(self.req_ids)) for _ in range(self.starts[r], self.starts[r + 1])]


class Recorder:
    """Listens to `runner.drafter`; takes vLLM's own as well as ours."""

    def __init__(self, runner: Any) -> None:
        self.passes: list[Pass] = []
        self._runner, self._drafter = runner, runner.drafter
        self._propose = runner.drafter.propose
        runner.drafter.propose = self._record_pass
        runner.drafter.model.register_forward_pre_hook(self._before, with_kwargs=True)
        runner.drafter.model.register_forward_hook(self._after, with_kwargs=True)
        # The draft's layers by module, and the group of each.
        layers = sorted(runner.drafter._draft_attn_layer_names, key=extract_layer_index)
        groups = runner.kv_cache_config.kv_cache_groups
        self._gids = [next(g for g, group in enumerate(groups) if name in group.layer_names) for name in layers]
        self._layers = layers

    @property
    def block_sizes(self) -> list[int]:
        """Of each module's group."""
        return [self._runner.input_batch.block_table[gid].block_size for gid in self._gids]

    def _record_pass(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch, metadata = self._runner.input_batch, kwargs["common_attn_metadata"]
        num_reqs = batch.num_reqs
        starts = metadata.query_start_loc[: num_reqs + 1].tolist()
        last = kwargs["token_indices_to_sample"]
        self.passes.append(
            Pass(
                list(batch.req_ids),
                starts,
                [end - 1 for end in starts[1:]] if last is None else last.tolist(),
                self._runner.discard_request_mask.np[:num_reqs].tolist(),
                {gid: batch.block_table[gid].get_device_tensor(num_reqs).numpy().copy() for gid in set(self._gids)},
            )
        )
        drafts = self._propose(*args, **kwargs)
        self.passes[-1].drafts = drafts.tolist()
        return drafts

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not self.passes:
            return
        module = kwargs.get("spec_step_idx", 0) % len(self._layers)
        slots = get_forward_context().slot_mapping[self._layers[module]]
        ids, positions = kwargs["input_ids"].tolist(), kwargs["positions"].tolist()
        self.passes[-1].forwards.append(Forward(module, ids, positions, slots.tolist()))

    def _after(self, model: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        if self.passes:
            self.passes[-1].forwards[-1].output = output.clone()

    def wrong_slots(self) -> list[str]:
        """Rows whose keys and values would land elsewhere than in their request's blocks."""
        wrong = []
        for done in self.passes:
            for step, forward in enumerate(done.forwards):
                gid = self._gids[forward.module]
                size = self._runner.input_batch.block_table[gid].block_size
                if step == 0:
                    rows = list(zip(done.requests(), forward.positions, strict=False))
                else:
                    first = done.forwards[0].positions
                    rows = [(r, first[row] + step) for r, row in enumerate(done.last_rows)]
                for row, (request, position) in enumerate(rows):
                    expected = PADDING_SLOT_ID
                    if position < self._runner.max_model_len:
                        expected = int(done.tables[gid][request, position // size]) * size + position % size
                    if forward.slots[row] != expected:
                        wrong.append(f"step {step}, position {position}: {forward.slots[row]} is not {expected}")
        return wrong

    def fed_tokens(self, requests: dict[str, tuple[list[int], int]]) -> dict[str, Any]:
        """Compares each row of the first forwards with the token that follows it, known once all is generated.

        Args:
            requests: of each request, by its number, prompt and output in one and the length of the prompt.
        """
        wrong, ends, ends_in_output = [], 0, 0
        for done in self.passes:
            fed = done.forwards[0]
            for r, req_id in enumerate(done.req_ids):
                tokens, prompt_len = requests[req_id.split("-")[0]]
                rows = range(done.starts[r], done.last_rows[r] + 1)
                for row in rows:
                    following = fed.positions[row] + 1
                    if following < len(tokens) and fed.input_ids[row] != tokens[following]:
                        kind = "a chunk's end" if done.chunk_ends[r] and row == rows[-1] else "a row"
                        wrong.append(f"{kind} at {following - 1}: {fed.input_ids[row]} is not {tokens[following]}")
                if done.chunk_ends[r]:
                    ends += 1
                    ends_in_output += fed.positions[rows[-1]] + 1 >= prompt_len
        return {"wrong": wrong, "chunk ends": ends, "chunk ends in the output": ends_in_output}

    def drafts_by_heads(self) -> dict[str, int]:
        """How many drafts are the greedy token of their own module's head, and of module 0's."""
        model = self._drafter.model
        counts = {"drafts": 0, "own head": 0, "first head": 0}
        for done in self.passes:
            for step, forward in enumerate(done.forwards):
                hidden = forward.output[done.last_rows] if step == 0 else forward.output[: len(done.req_ids)]
                drafts = torch.tensor([row[step] for row in done.drafts])
                counts["drafts"] += len(drafts)
                for name, module in (("own head", forward.module), ("first head", 0)):
                    greedy = model.compute_logits(hidden, spec_step_idx=module).argmax(-1)
                    counts[name] += int((greedy == drafts).sum())
        return counts
