"""The window of a pass: its rows, and the history that it takes the ones before the step from."""

import random

import pytest
import torch

from mtp.window import build_window, prompt_reach
from tests.support.window_tests import WindowTests, make_history, make_step, make_story


class TestWindowOnTheHost(WindowTests):
    def test_has_no_more_rows_than_the_valid_and_the_stale_ones(self) -> None:
        story = make_story(random.Random(0), "a")
        story.computed = story.known_from = 20
        history = make_history(2, 2)
        for _ in range(20):
            rows, cad = make_step(random.Random(story.computed), [story], [0])
            slots = torch.tensor(history.assign(["a"], {"a": story.state}))
            num_valid = int(cad.query_start_loc[1]) - story.rejected
            assert build_window(rows, cad, history, slots).num_rows == max(num_valid, 3)
            story.computed += num_valid


class TestWindowInPyTorch(WindowTests):
    @pytest.fixture(autouse=True)
    def not_on_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("mtp.window", "mtp.kernels.window"):
            monkeypatch.setattr(f"{module}.is_on_host", lambda positions: False)


def test_a_request_that_waits_keeps_its_history_while_others_come_and_go() -> None:
    history = make_history(2, 4)
    states = {name: make_story(random.Random(0), name).state for name in "abcdefgh"}
    alive = {name: states[name] for name in "ab"}
    (slot,) = history.assign(["a"], alive)
    for name in "bcdefgh":
        alive = {"a": states["a"], name: states[name]}
        assert history.assign([name], alive) != [slot]
    assert history.assign(["a"], alive) == [slot]


def test_a_new_request_of_an_old_id_does_not_inherit_its_rows() -> None:
    history = make_history(2, 4)
    old, new = (make_story(random.Random(i), "same id").state for i in range(2))
    (slot,) = history.assign(["same id"], {"same id": old})
    history.valid[slot] = 2
    (slot,) = history.assign(["same id"], {"same id": new})
    assert int(history.valid[slot]) == 0


@pytest.mark.parametrize(
    ("windows", "flow", "reach"),
    [
        ([[512], [512], [512]], True, 1534),  # the first draft of the last module, through all that it depends on
        ([[128], [128], [128]], False, 128),
        ([[512], [512], [None]], True, None),
        ([[512], [512], [None]], False, None),
        ([[512], []], True, None),  # no attention that is known
        ([[64], [8, 16]], True, 64 + 8 + 16 - 2),
        ([[100], [10]], False, 100),
        ([[64], [1]], True, 65),  # the row before the last is run again by the next pass
    ],
)
def test_drafts_depend_on_what_the_windows_of_all_modules_reach(
    windows: list[list[int | None]], flow: bool, reach: int | None
) -> None:
    assert prompt_reach(windows, flow, depth=2) == reach
