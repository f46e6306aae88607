"""Watches the drafter of a running engine and compares what every pass left behind with the reference.

The comparison stands between the end of `propose` and whatever the engine does next, so that nothing has been written
since. For each request of the batch, L is the row of its last accepted token (or of its chunk's last token), and known
are the tokens up to L + 1, and the whole prompt (with the output so far, after a preemption). Then:

* rows p <= L of every module, as far back as the pass's first row attends, hold what the reference computes from the
  known tokens and, past those, from the drafts that this very pass returned. A row that would take a draft which was
  not asked for is open, and so are rows past the limit of a draft that is limited to shorter sequences;
* draft i is the best token of module i's head at row L. In a chunk that ends before its prompt the engine throws it
  away, and it is right all the same.

Where all modules slide and nobody but the engine's own passes reads the cache, rows may be missing that no draft
depends on: those far enough before the end of what was known when the request began, or began again. Drafts at the ends
of chunks, which the engine throws away, then may depend on them, and are not checked.

Where the host doesn't call the drafter (`_input_fits_in_drafter`), rows stay unwritten that no later pass is given.
Their slots are remembered, and requests that attend to them are not checked.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.oracle import prefixes
from bench.oracle.cache import ModuleCache, module_caches
from bench.oracle.replayed import count_replays
from bench.oracle.report import ROUTING_TOLERANCES, Report
from bench.oracle.runners import Pass, RequestPass, V1Runner, view_of
from bench.oracle.slots import count_wrong_slots
from bench.reference.dense import DenseModel, Reference

Continuation = Callable[[Reference, int, list[int]], Tensor]
"""From a request's reference, its row L and the drafts before, to the logits `[vocab]` that choose the next draft, past
the last module."""


@dataclass
class Followed:
    """One request, as the passes have shown it.

    Attributes:
        tokens: the known ones.
        start: its first row in the pass that began it, or began it again: the rows before were reused.
        prompt_len: how many tokens were known then.
        next_row: the row after the last valid one of its latest pass.
        target_error: the furthest that the engine's target was from the reference's.
    """

    reference: Reference
    tokens: list[int]
    start: int = 0
    prompt_len: int = 0
    next_row: int | None = None
    target_error: float = 0.0

    def took_another_expert(self, report: Report) -> bool:
        """Whether some row's experts are a tie and were chosen differently: everything after it then differs."""
        target, modules = self.reference.closest_routing()
        tie = ROUTING_TOLERANCES[report.dtype]
        return modules < tie or (target < tie and self.target_error > report.tolerance)


@dataclass
class Watcher:
    """Follows all requests of one engine.

    Attributes:
        modules: how many of the modules to check, the first ones.
        continuation: what chooses the drafts beyond the last module; None leaves them unchecked.
        forget_rate: how often a reference is thrown away and computed anew.
        greedy_drafts: drafts are never sampled; otherwise those of requests with a temperature are not compared.
        diverging: ids of requests whose prompt leaves an earlier one right after a block.
        partings: of requests that were planned to share a prefix, by id, how they do (`bench/oracle/prefixes.py`).
        adapted_model: what the model is to requests with the adapter.
        adapted: their ids.
    """

    runner: Any
    model: DenseModel
    report: Report
    modules: int
    rng: random.Random
    continuation: Continuation | None = Reference.slide
    forget_rate: float = 0.02
    greedy_drafts: bool = True
    diverging: set[str] = field(default_factory=set)
    partings: dict[str, str] = field(default_factory=dict)
    adapted_model: DenseModel | None = None
    adapted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.view = view_of(self.runner)
        self.caches = module_caches(self.view)
        # The draft may be limited to shorter sequences than its target.
        self.limit = getattr(self.view.drafter, "draft_max_model_len", self.runner.max_model_len)
        self.reaches = self._find_reaches()
        self.followed: dict[str, Followed] = {}
        num_blocks = self.runner.kv_cache_config.num_blocks
        self._unwritten = [torch.zeros(num_blocks * cache.block_size, dtype=torch.bool) for cache in self.caches]
        self._last_k: int | None = None
        self._proposed = False
        self._install()

    def _find_reaches(self) -> list[int] | None:
        """For each module, how many of a prompt's last rows a draft depends on; None: every row has to be there.

        The first draft of module i attends to W_i rows up to the prompt's last, and module i's row p is made of what
        module i - 1's attends to, which are the W_{i-1} rows up to p.
        """
        config = self.runner.vllm_config
        if getattr(self.view.drafter, "prompt_reach", None) is None:
            return None
        assert not config.cache_config.enable_prefix_caching
        assert config.kv_transfer_config is None
        chain = self.caches[: config.speculative_config.num_speculative_tokens]
        reaches: list[int] = []
        for cache in reversed(chain):
            assert cache.window is not None
            further = reaches[0] - 1 if reaches and self.model.hidden_states_flow else 0
            reaches.insert(0, cache.window + further)
        return reaches

    def start_schedule(self) -> None:
        """Forgets the requests of the schedule before."""
        self.report.start_schedule()
        self._last_k = None
        self.followed.clear()
        self.diverging.clear()
        self.partings.clear()
        self.adapted.clear()

    # Hooks.

    def _install(self) -> None:
        drafter = self.view.drafter
        propose = drafter.propose

        def watched_propose(*args: Any, **kwargs: Any) -> Tensor:
            asked = self.view.read_pass(*args, **kwargs)
            drafts = propose(*args, **kwargs)
            self._proposed = True
            self._check_pass(asked, drafts)
            return drafts

        drafter.propose = watched_propose
        if isinstance(self.view, V1Runner):
            self._install_in_steps(self.view)
        if getattr(drafter, "graphs", None) is not None:
            count_replays(drafter.graphs, self.report.events)

    def _install_in_steps(self, view: V1Runner) -> None:
        """Notices the steps in which the V1 runner does not call its drafter, for want of room in the context."""
        runner = view.runner
        sample_tokens = runner.sample_tokens

        def watched_sample_tokens(*args: Any, **kwargs: Any) -> Any:
            state = runner.execute_model_state
            self._proposed, view.scheduled = False, state and state.scheduler_output
            output = sample_tokens(*args, **kwargs)
            if state is not None and not self._proposed:
                self._note_skipped(view.scheduled)
            return output

        runner.sample_tokens = watched_sample_tokens

    # One pass.

    def _check_pass(self, asked: Pass, drafts: Tensor) -> None:
        passes, k = asked.requests, asked.k
        report, events = self.report, self.report.events
        report.passes += 1
        events.k_zero += k == 0
        events.k_changes += self._last_k is not None and k != self._last_k
        self._last_k = k
        width = k if isinstance(self.view, V1Runner) else self.view.drafter.num_speculative_steps
        if drafts.shape != (len(passes), width):
            report.drafts_mismatched += 1
            report.note_mismatch(
                f"The pass returned drafts of shape {list(drafts.shape)}, and [{len(passes)}, {width}] was asked for."
            )
        self._check_slots(asked)
        start = 0
        for view, row in zip(passes, drafts.tolist(), strict=True):
            rows = asked.hidden[start : start + view.last + 1 - view.first]
            start += len(view.rows)
            self._check_request(view, rows, row[:k])

    def _check_slots(self, asked: Pass) -> None:
        """The target's rows have the host's slots in every group of the drafter, where it was given all of them."""
        groups = getattr(self.view.drafter, "groups", None)
        if groups is None or not asked.has_all_rows:
            return
        device = groups.primary.slot_mapping.device
        first_positions = torch.tensor([request.first for request in asked.requests], device=device)
        query_lens = torch.tensor([len(request.rows) for request in asked.requests], device=device)
        self.report.note_slots(*count_wrong_slots(groups.all, first_positions, query_lens, self.runner.max_model_len))

    def _check_request(self, view: RequestPass, hidden: Tensor, drafts: list[int]) -> None:
        followed = self._follow(view)
        unwritten = self._attends_to_unwritten(view)
        for cache, slots in zip(self.caches, self._unwritten, strict=True):
            slots[cache.slots(self._table(cache, view), view.first, view.last + 1)] = unwritten
        if unwritten:
            self.report.rows_unwritten += self.modules * (view.last + 1)
            return
        if self.rng.random() < self.forget_rate:
            followed.reference.forget()
        # Drafts stand from L + 2 on, and known tokens come first.
        if self.report.dtype != "float32":
            # The modules are held against what they were given: the target's own rounding is not the drafter's.
            followed.reference.hold(view.first, hidden)
        tokens = followed.tokens + drafts[len(followed.tokens) - (view.last + 2) :]
        followed.reference.update(tokens, view.last)
        error = (followed.reference.target_state()[view.first :] - hidden).abs().max().item()
        followed.target_error = max(followed.target_error, error)
        self.report.max_target_error = max(self.report.max_target_error, error)
        for cache in self.caches[: self.modules]:
            self._check_rows(view, followed, cache, drafts)
        self._check_drafts(view, followed, drafts)

    def _follow(self, view: RequestPass) -> Followed:
        """Adds the pass's tokens to the request's known ones, and counts what happened to the request.

        Raises:
            AssertionError: the engine ran other tokens than the known ones.
        """
        events = self.report.events
        followed = self._followed(view.request_id)
        resumed = followed.next_row is not None and view.first < followed.next_row
        events.preemptions += resumed
        if resumed or followed.next_row is None:
            followed.start, followed.prompt_len = view.first, max(len(followed.tokens), view.last + 1)
            events.prefix_hits += view.first > 0
            events.prefix_hits_diverging += view.first > 0 and view.request_id in self.diverging
            self._note_parting(view, resumed)
        known = followed.tokens
        # Tokens of steps whose pass the host left out.
        known += self.view.known_tokens(view.request_id)[1][len(known) : view.first + 1]
        valid = view.rows[: view.last + 1 - view.first]
        overlap = known[view.first : view.last + 1]
        assert valid[: len(overlap)] == overlap, (
            f"Request {view.request_id} ran the tokens {valid} from row {view.first} on, and {overlap} are known there."
        )
        if view.drafted:
            self.report.note_rejected(view.drafted - (view.last - view.first))
        known += valid[len(overlap) :]
        if view.last + 1 < len(known):
            events.chunk_boundaries += 1
        else:
            known.append(view.next_token)
        followed.next_row = view.last + 1
        return followed

    def _note_parting(self, view: RequestPass, resumed: bool) -> None:
        kind = self.partings.get(view.request_id)
        if kind is None or view.first == 0 or resumed:
            return
        self.report.note_parting(kind)
        if kind == prefixes.ALONE:
            self.report.hits_mismatched += 1
            self.report.note_mismatch(f"Request {view.request_id} begins at row {view.first} under a salt of its own.")

    def _followed(self, request_id: str) -> Followed:
        if request_id not in self.followed:
            prompt, _ = self.view.known_tokens(request_id)
            model = self.adapted_model if request_id in self.adapted else self.model
            assert model is not None
            self.followed[request_id] = Followed(Reference(model), prompt)
        return self.followed[request_id]

    # Rows.

    def _check_rows(self, view: RequestPass, followed: Followed, cache: ModuleCache, drafts: list[int]) -> None:
        report, module = self.report, cache.module
        reference = followed.reference
        keys, values = (x[: self.limit, cache.heads] for x in (reference.keys(module), reference.values(module)))
        start, end = cache.first_visible(view.first), len(keys)
        report.rows_freed += min(start, end)
        if self.reaches is not None:
            first_read = min(max(start, followed.prompt_len - self.reaches[module]), end)
            report.rows_unread += max(0, first_read - start)
            start = max(start, first_read)
        report.rows_open += view.last + 1 - end
        if start >= end:
            return
        expected = torch.cat([keys[start:], values[start:]], dim=-1)
        got = torch.cat(cache.read(self._table(cache, view), start, end), dim=-1)
        error = (got - expected).abs()
        wrong = (error > report.tolerance * expected.abs().clamp(min=1.0)) | ~error.isfinite()
        bad = wrong.flatten(1).any(1)
        report.rows_checked += end - start
        count = int(bad.sum())
        if count == 0:
            report.max_abs_error = max(report.max_abs_error, error.max().item())
            return
        if followed.took_another_expert(report):
            report.rows_excused += count
            return
        report.note_wrong_rows(module, count)
        if report.wants_words:
            row = int(bad.nonzero()[0])
            report.note_mismatch(
                self._explain_row(view, followed, cache, start + row, expected[row], got[row], len(drafts), count)
            )

    def _explain_row(
        self,
        view: RequestPass,
        followed: Followed,
        cache: ModuleCache,
        position: int,
        expected: Tensor,
        got: Tensor,
        k: int,
        count: int,
    ) -> str:
        worst = int((got - expected).abs().nan_to_num(torch.inf).argmax())
        head, feature = divmod(worst, expected.shape[-1])
        key_dim = cache.key_dim
        part = f"key[head {cache.heads.start + head}, {feature}]"
        if feature >= key_dim:
            part = f"value[head {cache.heads.start + head}, {feature - key_dim}]"
        taken = position + 1 + cache.module
        known = taken < len(followed.tokens)
        token = f"takes t_{taken}, " + (
            "which is known" if known else f"for which draft {taken - view.last - 2} stands"
        )
        if position >= view.first:
            why = f"this pass was given its hidden state (rows {view.first} to {view.last})"
        elif position < followed.start:
            why = (
                f"its block was reused: an earlier request wrote it with the same tokens up to row {followed.start - 1}"
            )
        elif position > view.first - 1 - cache.module:
            why = "when it was run before, a draft that has since been replaced stood for a token it depends on"
        else:
            why = "an earlier pass was given its hidden state, and all it depends on has been known since"
        zero = " (all of the row is zero: it was never written)" if not got.any() else ""
        return (
            f"Request {view.request_id}, module {cache.module}, KV cache group {cache.group}, position {position}: "
            f"{part} is {got.flatten()[worst]:.6g} and should be {expected.flatten()[worst]:.6g}{zero}. "
            f"The row {token}, and should be right because {why}. L = {view.last}, K = {k}, "
            f"{count} of the request's rows of this module are wrong."
        )

    # Drafts.

    def _check_drafts(self, view: RequestPass, followed: Followed, drafts: list[int]) -> None:
        report, checkable = self.report, self._num_checkable(view, followed, len(drafts))
        report.drafts_unchecked += len(drafts) - checkable
        for index, draft in enumerate(drafts[:checkable]):
            if index < len(self.caches):
                logits = followed.reference.draft_logits(index, view.last)
            else:
                assert self.continuation is not None
                logits = self.continuation(followed.reference, view.last, drafts[:index])
            report.drafts_checked += 1
            head, best = min(index, len(self.caches) - 1), int(logits.argmax())
            if best == draft:
                continue
            behind = (logits[best] - logits[draft]).item()
            if behind < report.tolerance * max(1.0, logits[best].abs().item()):
                report.draft_ties += 1
            elif followed.took_another_expert(report):
                report.drafts_unchecked += 1
            else:
                report.drafts_mismatched += 1
                report.note_mismatch(
                    f"Request {view.request_id}, draft {index} of {len(drafts)} at row L = {view.last} is {draft} and "
                    f"should be {best}, whose logit is {behind:.4g} higher at the head of module {head}."
                )

    def _num_checkable(self, view: RequestPass, followed: Followed, k: int) -> int:
        """How many of the drafts, from the first on, the reference can judge."""
        if self.view.temperature(view.request_id) > 0 and not self.greedy_drafts:
            return 0
        if view.last >= self.limit:
            return 0
        if self.reaches is not None and view.last + 1 < followed.prompt_len:
            return 0
        modules = len(self.caches)
        # In a chunk that ends before its prompt, drafts past the modules would continue what isn't the prompt.
        if self.continuation is None or self.modules < modules or view.last + 2 < len(followed.tokens):
            return min(k, self.modules)
        # Draft i of those is made at row L + i - M + 1, and there are no rows past the limit.
        return min(k, max(modules, self.limit - view.last + modules - 2))

    # Rows that the host never gave to the drafter.

    def _note_skipped(self, scheduled: Any) -> None:
        """Marks the slots of the step's rows, and of the rows before that wait for its tokens, as never written."""
        batch = self.runner.input_batch
        self.report.events.skipped_passes += 1
        for request_id, count in scheduled.num_scheduled_tokens.items():
            index = batch.req_id_to_index[request_id]
            first = int(batch.num_computed_tokens_cpu[index])
            for cache, slots in zip(self.caches, self._unwritten, strict=True):
                table = batch.block_table.block_tables[cache.group].block_table.np[index]
                slots[cache.slots(table, max(0, first - len(self.caches) + 1), first + count)] = True
            followed = self._followed(request_id)
            if followed.next_row is None:
                followed.start = first
            followed.next_row = first

    def _attends_to_unwritten(self, view: RequestPass) -> bool:
        return any(
            bool(slots[cache.slots(self._table(cache, view), cache.first_visible(view.first), view.first)].any())
            for cache, slots in zip(self.caches, self._unwritten, strict=True)
        )

    def _table(self, cache: ModuleCache, view: RequestPass) -> Any:
        return self.view.block_table(cache.group, view.index)
