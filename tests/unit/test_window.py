"""The window of a pass: its rows, and the history that it takes the ones before the step from."""

import random

from tests.support.window_tests import WindowTests, make_history, make_story


class TestWindowInPyTorch(WindowTests):
    pass


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
