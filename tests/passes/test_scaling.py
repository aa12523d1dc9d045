"""Time per node must not grow with the graph: partitioning is linear but for one heap of ready units."""

from __future__ import annotations

import gc
import time
from random import Random

from pygraph.passes import Pass, PassContext
from pygraph.passes.indirection import Indirection
from pygraph.passes.partitioning import Partitioning
from pygraph.passes.selection import Selection
from tests.passes.build import build, layered

SMALL, LARGE = 2_000, 20_000


def passes_time(nodes: int) -> float:
    """CPU seconds per node of the three passes together, on a fresh graph."""
    graph, ctx = layered(Random(0), nodes), PassContext()
    passes: tuple[Pass, ...] = (Partitioning(), Indirection(), Selection())
    gc.collect()
    gc.disable()  # a full collection walks whatever else the test process holds
    try:
        start = time.process_time()
        for item in passes:
            item.run(graph, ctx)
        return (time.process_time() - start) / nodes
    finally:
        gc.enable()


def test_time_per_node_at_most_doubles_from_2000_to_20000_nodes() -> None:
    ratios: list[float] = []
    small = large_ = float("inf")
    for _ in range(6):
        small, large_ = min(small, passes_time(SMALL)), min(large_, passes_time(LARGE))
        ratios.append(large_ / small)
        if ratios[-1] <= 2:
            return
    raise AssertionError(f"time per node grows by {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


def test_a_long_chain_of_cuts_is_no_deeper_than_a_loop() -> None:
    graph = build(*(f"n{i + 1}: {'host' if i % 2 else 'launch'} n{i}" for i in range(10_000)))
    Partitioning().run(graph, PassContext())
    assert len(graph.regions) == 5_000
