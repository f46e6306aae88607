"""Replays without CUDA: decode batches go through the inputs of a graph, padding included, and are then run eagerly.

What a captured graph does by itself, which is the same launches on the same memory, is all that is left out;
`tests/gpu` has the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class EagerGraph:
    """In place of a captured CUDA graph: a replay runs the pass eagerly on the graph's own inputs.

    Attributes:
        size: requests of the graph's batch, padding included.
        drafts: `[size, num_speculative_tokens]`, which a replay writes.
    """

    def __init__(self, graphs: Any, size: int, drafts: torch.Tensor | None = None) -> None:
        self.graphs, self.size = graphs, size
        self.drafts: torch.Tensor = graphs.run_static(size) if drafts is None else drafts

    def replay(self) -> None:
        self.drafts.copy_(self.graphs.run_static(self.size))


def count_replays(graphs: Any, events: Any) -> Any:
    """Has every further replay counted in `events.replays`; returns the graphs."""
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
                graph = EagerGraph(graphs, size)
                graphs._graphs[size] = graph, graph.drafts
            graphs._sizes = sizes
            drafter.graphs = count_replays(graphs, events)
        return propose(*args, **kwargs)

    drafter.propose = propose_by_replay
    yield
