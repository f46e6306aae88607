"""Products of few rows with weights of 8 bits and of 16, on CUDA: `python -m bench.micro.products`.

Prints microseconds of each, with the time that reading the weight takes, and with `--blocks` those of other blocks of
the kernel, the best first.
"""

import argparse
import itertools
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F

from bench.arguments import numbers
from bench.tables import markdown
from mtp.kernels import fp8_weights
from mtp.kernels.fp8_weights import Blocks, fp8_linear, quantise

# Channels and columns of Step-3.5's weights: heads of all tokens and of some, and of a module in the order of its pass.
SHAPES = ((128896, 4096), (32768, 4096), (4096, 8192), (14432, 4096), (4096, 12288), (22528, 4096), (4096, 11264))
OUT_OF_CACHE = 256 << 20
"""Bytes of weights that are read by turns, so that none is in the L2 cache when its turn comes."""
REPEATS = 20


def microseconds(product: Callable[[int], torch.Tensor], copies: int) -> float:
    """Of one product, in a graph of many, the median of graphs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(copies):
            product(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(REPEATS):
            product(i % copies)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPEATS * 1e3)
    return sorted(times)[len(times) // 2]


def candidates(num_rows: int) -> list[Blocks]:
    rows = next(size for size in (16, 32, 64, 128) if size >= min(num_rows, 128))
    tiles = itertools.product((32, 64, 128), (64, 128, 256), (3, 4), (4, 8), (False, True), (1, 2, 4, 8))
    return [
        Blocks(rows, channels, columns, stages, warps, first, shares)
        for channels, columns, stages, warps, first, shares in tiles
        if 4096 <= channels * columns <= 32768 and (channels + 2 * rows) * columns * (stages - 1) < 200_000
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.products", description=__doc__)
    parser.add_argument("--rows", type=numbers, default="1,4,8,16,32,64,128,256")
    parser.add_argument("--blocks", action="store_true", help="try others, too: minutes of compilation")
    args = parser.parse_args()
    table = [["channels", "columns", "rows", "8 bits, us", "16 bits, us", "GB/s of 8 bits", "other blocks"]]
    for channels, columns in SHAPES:
        copies = max(1, OUT_OF_CACHE // (channels * columns))
        wide = [torch.randn(channels, columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        narrow = [quantise(weight) for weight in wide]
        for num_rows in args.rows:
            x = torch.randn(num_rows, columns, device="cuda", dtype=torch.bfloat16)
            ours, bf16 = microseconds(_by_kernel(x, narrow), copies), microseconds(_by_library(x, wide), copies)
            best = _best_blocks(x, narrow, copies) if args.blocks else "-"
            rate = f"{channels * columns / ours / 1e3:.0f}"
            table.append([*map(str, (channels, columns, num_rows)), f"{ours:.1f}", f"{bf16:.1f}", rate, best])
            print(" ".join(table[-1]), flush=True)
    print(markdown(table))


def _by_kernel(x: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[int], torch.Tensor]:
    return lambda i: fp8_linear(x, *weights[i])


def _by_library(x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    return lambda i: F.linear(x, weights[i])


def _best_blocks(x: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]], copies: int) -> str:
    found = []
    for blocks in candidates(len(x)):
        with mock.patch.object(fp8_weights, "_blocks", return_value=blocks):
            try:
                found.append((microseconds(_by_kernel(x, weights), copies), blocks))
            except Exception as error:  # more shared memory than there is, say
                print(f"{blocks}: {type(error).__name__}", flush=True)
    return ", ".join(f"{time:.1f} {tuple(blocks)}" for time, blocks in sorted(found)[:3])


if __name__ == "__main__":
    main()
