"""Tests of the window of a pass: each row against its request's true tokens and hidden states.

Tensors are made on PyTorch's default device, so that the same tests judge the PyTorch version on the CPU
(`tests/unit/test_window.py`) and the kernels (`tests/gpu/test_window_kernels.py`).
"""

import itertools
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from mtp.rows import StepRows
from mtp.window import History, Window, build_window, step_as_window

HIDDEN = 3


@dataclass
class Story:
    """A request: its true tokens, and how far the target has computed it."""

    state: CachedRequestState
    tokens: list[int]
    computed: int = 0
    # Where the request last began or was resumed: the history must have the rows from there on.
    known_from: int = 0
    rejected: int = field(default=0)

    def hidden(self, position: int) -> list[float]:
        return [self.tokens[position], position, len(self.tokens)]


def make_story(rng: random.Random, name: str) -> Story:
    state = CachedRequestState(name, [1], [], None, None, (), 0, [])
    return Story(state, [rng.randrange(1, 1000) for _ in range(200)])


def make_step(rng: random.Random, stories: list[Story], prefill: list[int]) -> tuple[StepRows, CommonAttentionMetadata]:
    """The target's rows of one step: a chunk for each request that prefills, else one token and some drafts.

    Rejected rows hold other tokens and other hidden states than the request ends up with.
    """
    tokens, positions, hidden, lens, seq_lens, upper = [], [], [], [], [], []
    for story, chunk in zip(stories, prefill, strict=True):
        length = chunk or 1 + rng.randrange(4)
        story.rejected = 0 if chunk else rng.randrange(length)
        for offset in range(length):
            position, right = story.computed + offset, offset < length - story.rejected
            tokens.append(story.tokens[position] if right else 5000 + offset)
            hidden.append(story.hidden(position) if right else [-1.0] * HIDDEN)
            positions.append(position)
        lens.append(length)
        seq_lens.append(story.computed + length)
        # Under asynchronous scheduling the host's bound includes drafts of the step before that were rejected.
        upper.append(seq_lens[-1] + (0 if chunk else rng.randrange(4)))
    query_start_loc = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    cad = CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc.cpu(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(stories),
        num_actual_tokens=len(tokens),
        max_query_len=max(lens),
        max_seq_len=max(upper),
        block_table_tensor=torch.zeros(len(stories), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(len(tokens), dtype=torch.int64),
        seq_lens_cpu_upper_bound=torch.tensor(upper, dtype=torch.int32, device="cpu"),
    )
    rows = StepRows(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(positions),
        torch.tensor(hidden, dtype=torch.float32),
        torch.tensor([story.rejected for story in stories], dtype=torch.int32),
        query_start_loc,
    )
    return rows, cad


def check_window(window: Window, stories: list[Story], lens: list[int], depth: int) -> None:
    starts = window.cad.query_start_loc.tolist()
    for request, (story, length) in enumerate(zip(stories, lens, strict=True)):
        last = story.computed + length - 1 - story.rejected
        rows = range(starts[request], starts[request + 1])
        assert window.seq_positions is not None
        assert window.req_indices is not None
        written = {int(window.seq_positions[row]): row for row in rows if window.seq_positions[row] >= 0}
        # Rows before these were final after the last pass, whatever was rejected. More may come where a step has room
        # for them, or where a prefix hit ends at rows that the history still has.
        asked = range(max(min(story.computed, last - depth), story.known_from), last + 1)
        assert set(asked) <= written.keys() <= set(range(story.computed - depth, last + 1))
        for position, row in written.items():
            assert int(window.req_indices[row]) == request
            assert int(window.token_ids[row]) == story.tokens[position]
            assert window.hidden_states[row].tolist() == story.hidden(position)
            assert int(window.positions[row]) == position
        assert int(window.last_rows[request]) == written[last]
        assert int(window.last_positions[request]) == last
        # To the attention backend the rows are the last ones of a sequence of `seq_lens` tokens.
        assert int(window.cad.seq_lens[request]) - len(rows) + (written[last] - rows[0]) == last
        assert len(rows) <= max(lens[request], depth + 1)
    assert window.cad.num_actual_tokens == window.num_rows == starts[-1]
    assert window.cad.max_query_len == max(b - a for a, b in itertools.pairwise(starts))
    assert window.cad.max_seq_len >= int(window.cad.seq_lens.max())


def make_history(depth: int, max_num_reqs: int) -> History:
    return History(depth, max_num_reqs, HIDDEN, torch.float32, (), torch.get_default_device())


class WindowTests:
    """What holds of every implementation; a test module has a subclass that pytest finds."""

    @pytest.mark.parametrize("depth", [1, 2, 4])
    @pytest.mark.parametrize("seed", range(25))
    def test_a_window_holds_the_steps_valid_rows_and_the_history_before_them(self, depth: int, seed: int) -> None:
        rng = random.Random(seed)
        history = make_history(depth, 8)
        stories: dict[str, Story] = {}
        for step in range(40):
            if len(stories) < 4 and (not stories or rng.random() < 0.3):
                name = f"request {step if rng.random() < 0.8 else 0}"  # ids come again
                stories[name] = make_story(rng, name)
            for name in [name for name, story in stories.items() if story.computed > 150 or rng.random() < 0.03]:
                del stories[name]
            running = rng.sample(list(stories), rng.randint(1, len(stories))) if stories else []
            if not running:
                continue
            for name in running:
                if stories[name].computed and rng.random() < 0.05:  # preempted, and resumed at a prefix hit
                    block = rng.randrange(stories[name].computed // 16 + 1)
                    stories[name].computed = stories[name].known_from = 16 * block
            batch = [stories[name] for name in running]
            prefill = [rng.choice([1, 2, 3, 7, 30]) if s.computed == s.known_from else 0 for s in batch]
            rows, cad = make_step(rng, batch, prefill)
            slots = torch.tensor(history.assign(running, {name: story.state for name, story in stories.items()}))
            assert len(set(slots.tolist())) == len(running)
            window = build_window(rows, cad, history, slots)
            lens = cad.query_start_loc.diff().tolist()
            check_window(window, batch, lens, depth)
            history.store(slots, window)
            for story, length in zip(batch, lens, strict=True):
                story.computed += length - story.rejected

    def test_a_request_shorter_than_its_history_begins_at_position_0(self) -> None:
        story = make_story(random.Random(0), "short")
        history = make_history(4, 2)
        for prefill in ([1], [0], [0]):
            rows, cad = make_step(random.Random(1), [story], prefill)
            slots = torch.tensor(history.assign(["short"], {"short": story.state}))
            window = build_window(rows, cad, history, slots)
            check_window(window, [story], cad.query_start_loc.diff().tolist(), 4)
            history.store(slots, window)
            story.computed += int(cad.query_start_loc[1]) - story.rejected
        assert story.computed <= 8

    def test_one_module_has_no_history_and_its_window_is_the_step_itself(self) -> None:
        rng = random.Random(2)
        stories = [make_story(rng, "a"), make_story(rng, "b")]
        for story, computed in zip(stories, (0, 40), strict=True):
            story.computed = story.known_from = computed
        rows, cad = make_step(rng, stories, [9, 0])
        window = build_window(rows, cad, None, None)
        assert window.token_ids.tolist() == rows.token_ids.tolist()
        assert window.cad.query_start_loc.tolist() == cad.query_start_loc.tolist()
        assert window.last_rows.tolist() == (cad.query_start_loc[1:] - 1 - rows.num_rejected).tolist()
        check_window(window, stories, cad.query_start_loc.diff().tolist(), 0)

    @pytest.mark.parametrize("seed", range(5))
    def test_windows_of_one_module_may_have_more_rows_than_the_step(self, seed: int) -> None:
        rng = random.Random(seed)
        stories = [make_story(rng, name) for name in "abc"]
        for story in stories:
            story.computed = story.known_from = rng.randrange(1, 100)
        rows, cad = make_step(rng, stories, [0, 0, 0])
        lens = cad.query_start_loc.diff().tolist()
        starts = torch.arange(4, dtype=torch.int32) * 5
        padded = cad.replace(query_start_loc=starts, num_actual_tokens=15, max_query_len=5)
        window = build_window(rows, padded, None, None, laid_out=True)
        for request, (story, length) in enumerate(zip(stories, lens, strict=True)):
            valid = length - story.rejected
            positions = list(range(story.computed, story.computed + valid))
            of_request = slice(5 * request, 5 * request + 5)
            assert window.seq_positions is not None
            assert window.seq_positions[of_request].tolist() == positions + [-1] * (5 - valid)
            assert window.token_ids[of_request][:valid].tolist() == [story.tokens[p] for p in positions]
            assert window.hidden_states[of_request][:valid].tolist() == [story.hidden(p) for p in positions]
            assert int(window.last_rows[request]) == 5 * request + valid - 1

    @pytest.mark.parametrize("known", [False, True])
    def test_a_step_that_is_taken_as_it_is_makes_the_same_window(self, known: bool) -> None:
        rng = random.Random(3)
        stories = [make_story(rng, "a"), make_story(rng, "b")]
        rows, cad = make_step(rng, stories, [9, 0])
        built = build_window(rows, cad, None, None)
        slot_mapping = torch.arange(rows.token_ids.shape[0] + 3)
        taken = step_as_window(replace(rows, last_rows=built.last_rows if known else None), cad, slot_mapping)
        for name in ("token_ids", "positions", "hidden_states", "last_rows", "last_positions", "seq_lens"):
            assert getattr(taken, name).tolist() == getattr(built, name).tolist(), name
        assert taken.slot_mapping is not None
        assert taken.slot_mapping.tolist() == slot_mapping[: taken.num_rows].tolist()
