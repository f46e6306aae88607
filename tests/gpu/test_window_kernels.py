"""The window of a pass once more, with its kernels: on the GPU, or by Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch

from mtp.kernels.window import shift_rows
from tests.support.window_tests import WindowTests


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


class TestWindowWithKernels(WindowTests):
    pass


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
