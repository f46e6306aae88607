"""Replays without CUDA: decode batches go through the inputs of a graph, padding included, and are then run eagerly.

What a graph would do by itself, which is the same launches on the same memory, is all that is left out; `tests/gpu` has
the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stand:
    """Stands for a captured graph."""

    def __init__(self, graphs: Any, size: int) -> None:
        self.graphs, self.size = graphs, size
        self.drafts = graphs.run_static(size)

    def replay(self) -> None:
        self.drafts.copy_(self.graphs.run_static(self.size))


def count_replays(graphs: Any, events: Any) -> Any:
    replay = graphs.replay

    def counted_replay(*args: Any, **kwargs: Any) -> torch.Tensor:
        events.replays += 1
        return replay(*args, **kwargs)

    graphs.replay = counted_replay
    return graphs


@contextmanager
def replaying(drafter: Any, sizes: list[int], events: Any) -> Iterator[None]:
    """Gives a proposer of ours graphs of so many requests, once its block tables are known, and counts replays."""
    propose = drafter.propose

    def propose_by_replay(*args: Any, **kwargs: Any) -> torch.Tensor:
        if drafter.graphs is None:
            graphs = drafter.make_graphs()
            for size in sizes:
                stand = Stand(graphs, size)
                graphs._graphs[size] = stand, stand.drafts
            graphs._sizes = sizes
            drafter.graphs = count_replays(graphs, events)
        return propose(*args, **kwargs)

    drafter.propose = propose_by_replay
    yield
