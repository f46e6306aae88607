"""Replays without CUDA: batches go through the inputs of a graph, padding included, and are then run eagerly.

What a captured graph does by itself, which is the same launches on the same memory, is all that is left out;
`tests/gpu` has the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # importing it imports vLLM, before which the runner is chosen
    from mtp.graphs import PassShape, Replay


class EagerGraph:
    """In place of a captured CUDA graph: a replay runs the pass eagerly on the graph's own inputs.

    Attributes:
        shape: of the pass, padding included.
        drafts: `[shape.num_reqs, num_speculative_tokens]`, which a replay writes.
    """

    def __init__(self, graphs: Any, shape: "PassShape", drafts: torch.Tensor | None = None) -> None:
        self.graphs, self.shape = graphs, shape
        if drafts is None:
            graphs.pad_all(shape)
            drafts = graphs.run_static(shape)
        self.drafts: torch.Tensor = drafts

    def replay(self) -> None:
        self.drafts.copy_(self.graphs.run_static(self.shape))


def count_replays(graphs: Any, events: Any) -> Any:
    """Has every further replay counted in `events.replays`, and those with a prompt in `events.replays_uneven` too.

    Returns:
        the graphs.
    """
    replay = graphs.replay

    def counted_replay(found: "Replay", *args: Any, **kwargs: Any) -> torch.Tensor:
        events.replays += 1
        events.replays_uneven += not found.shape.even
        return replay(found, *args, **kwargs)

    graphs.replay = counted_replay
    return graphs


@contextmanager
def replaying(drafter: Any, sizes: list[int], events: Any) -> Iterator[None]:
    """Gives a proposer of ours graphs of so many requests, once its block tables are known, and counts replays."""
    propose = drafter.propose

    def propose_by_replay(*args: Any, **kwargs: Any) -> torch.Tensor:
        if drafter.graphs is None:
            graphs = drafter.make_graphs()
            even = [graphs.even(size, count) for size in sizes for count in (None, *drafter.fewer_drafts())]
            for shape in (*even, *drafter.uneven_shapes()):
                graph = EagerGraph(graphs, shape)
                graphs.add(shape, graph, graph.drafts)
            drafter.graphs = count_replays(graphs, events)
        return propose(*args, **kwargs)

    drafter.propose = propose_by_replay
    yield
