"""Observes what a drafter feeds its model in a running engine, and judges it by the requests' own tokens."""

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index

from tests.support.observed_pass import Forward, ObservedPass, chain_length, selected_module


class PassObserver:
    """Listens to `runner.drafter`; takes vLLM's own as well as ours."""

    def __init__(self, runner: Any) -> None:
        self.passes: list[ObservedPass] = []
        self._runner, self._drafter = runner, runner.drafter
        self._propose = runner.drafter.propose
        runner.drafter.propose = self._observe_pass
        runner.drafter.model.register_forward_pre_hook(self._before, with_kwargs=True)
        runner.drafter.model.register_forward_hook(self._after, with_kwargs=True)
        # The draft's layers by module, and the group of each.
        self._layers = sorted(runner.drafter._draft_attn_layer_names, key=extract_layer_index)
        groups = runner.kv_cache_config.kv_cache_groups
        self._gids = [next(g for g, group in enumerate(groups) if name in group.layer_names) for name in self._layers]

    @property
    def block_sizes(self) -> list[int]:
        """Of each module's group."""
        return [self._runner.input_batch.block_table[gid].block_size for gid in self._gids]

    def _observe_pass(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch, starts = self._runner.input_batch, kwargs["common_attn_metadata"].query_start_loc
        num_reqs, positions = batch.num_reqs, kwargs["target_positions"]
        last = kwargs["token_indices_to_sample"]
        tables = {gid: batch.block_table[gid].get_device_tensor(num_reqs).clone() for gid in set(self._gids)}
        self.passes.append(
            ObservedPass(
                req_ids=list(batch.req_ids),
                firsts=positions[starts[:-1]].tolist(),
                lasts=positions[starts[1:] - 1 if last is None else last].tolist(),
                chunk_ends=self._runner.discard_request_mask.np[:num_reqs].tolist(),
                chain_length=chain_length(self._drafter),
                tables=[tables[gid] for gid in self._gids],
                block_sizes=self.block_sizes,
                max_model_len=self._runner.max_model_len,
            )
        )
        drafts = self._propose(*args, **kwargs)
        self.passes[-1].drafts = drafts.tolist()
        return drafts

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not self.passes:
            return  # a warm-up run
        context = get_forward_context()
        module = selected_module(kwargs, len(self._layers))
        layer = self._layers[module]
        metadata = context.attn_metadata[layer]
        self.passes[-1].forwards.append(
            Forward(
                module,
                kwargs["input_ids"].tolist(),
                kwargs["positions"].clone(),
                metadata.query_start_loc.tolist(),
                context.slot_mapping[layer].tolist(),
                metadata,
            )
        )

    def _after(self, model: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        if self.passes:
            self.passes[-1].forwards[-1].output = output.clone()

    def wrong_slots(self) -> list[str]:
        return [wrong for done in self.passes for wrong in done.wrong_slots()]

    def fed_tokens(self, requests: dict[str, tuple[list[int], int]]) -> dict[str, Any]:
        """Compares what each module consumed with the request's tokens, known once all is generated.

        Module i at position p consumes token p + 1 + i. At the end of a chunk that is the prompt's, or that of the
        output so far; elsewhere the tokens after the one just sampled are drafts, of which nothing is said here.

        Args:
            requests: of each request, by its number, prompt and output in one and the length of the prompt.
        """
        wrong, ends, ends_in_output = [], 0, 0
        for done in self.passes:
            for r, req_id in enumerate(done.req_ids):
                tokens, prompt_len = requests[req_id.split("-")[0]]
                for i, fed in enumerate(done.forwards[: done.chain_length]):
                    for row in fed.rows_of(r):
                        position = int(fed.positions[row])
                        index = position + 1 + i
                        is_row = done.firsts[r] <= position <= done.lasts[r]
                        is_known = index < len(tokens) and (index <= done.lasts[r] + 1 or done.chunk_ends[r])
                        if is_row and is_known and fed.input_ids[row] != tokens[index]:
                            kind = "a chunk's end" if done.chunk_ends[r] and position == done.lasts[r] else "a row"
                            found = fed.input_ids[row]
                            wrong.append(f"module {i}, {kind} at {position}: {found} is not {tokens[index]}")
                if done.chunk_ends[r]:
                    ends += 1
                    ends_in_output += done.lasts[r] + 1 >= prompt_len
        return {"wrong": wrong, "chunk ends": ends, "chunk ends in the output": ends_in_output}

    def drafts_by_heads(self) -> dict[str, int]:
        """How many drafts are the greedy token of their own module's head, and of module 0's.

        For as many drafts as there are modules: each of them comes from one forward.
        """
        model = self._drafter.model
        counts = {"drafts": 0, "own head": 0, "first head": 0}
        for done in self.passes:
            for step, forward in enumerate(done.forwards):
                rows = [done.last_row(step, request) for request in range(len(done.req_ids))]
                # A module that feeds no other returns those rows alone.
                output = forward.output if len(forward.output) == len(rows) else forward.output[rows]
                drafts = torch.tensor([row[step] for row in done.drafts])
                counts["drafts"] += len(drafts)
                for name, module in (("own head", forward.module), ("first head", 0)):
                    greedy = model.compute_logits(output, spec_step_idx=module).argmax(-1)
                    counts[name] += int((greedy == drafts).sum())
        return counts
