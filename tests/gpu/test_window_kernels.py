"""The window of a pass once more, with its kernels: on the GPU, or by Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch

from mtp.kernels.window import shift_rows
from tests.support.window_stories import (
    check_a_request_shorter_than_its_history,
    check_one_module_without_history,
    check_random_windows,
)


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(25))
def test_a_window_holds_the_steps_valid_rows_and_the_history_before_them(depth: int, seed: int) -> None:
    check_random_windows(depth, seed)


def test_a_request_shorter_than_its_history_begins_at_position_0() -> None:
    check_a_request_shorter_than_its_history()


def test_one_module_has_no_history_and_its_window_is_the_step_itself() -> None:
    check_one_module_without_history()


@pytest.mark.parametrize("num_rows", [1, 4, 255, 256, 257, 5000])
def test_rows_shift_as_in_plain_pytorch(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    starts = torch.arange(0, num_rows, 3)
    req_indices = torch.arange(num_rows) // 3
    last_rows = torch.minimum(starts + torch.randint(0, 3, starts.shape), torch.tensor(num_rows - 1))
    token_ids = torch.randint(0, 10**6, (num_rows,), dtype=torch.int32)
    follows = torch.randint(0, 10**6, starts.shape)
    expected = token_ids.roll(-1)
    expected[-1] = 0
    expected[last_rows] = follows.int()
    assert torch.equal(shift_rows(token_ids, req_indices, last_rows, follows), expected)
