"""Work per node hardly grows with the graph: partitioning is linear but for one heap of ready units."""

from __future__ import annotations

from random import Random

from pygraph.passes import Pass, PassContext
from pygraph.passes.indirection import Indirection
from pygraph.passes.partitioning import Partitioning
from pygraph.passes.selection import Selection
from tests.passes.build import build, layered
from tests.work import work


def work_per_node(nodes: int) -> float:
    """Of the three passes together, on a fresh graph."""
    graph, ctx = layered(Random(0), nodes), PassContext()
    passes: tuple[Pass, ...] = (Partitioning(), Indirection(), Selection())
    return work(lambda: [each.run(graph, ctx) for each in passes]) / nodes


def test_work_per_node_grows_by_less_than_a_third_from_1000_to_8000_nodes() -> None:
    assert work_per_node(8_000) < 1.33 * work_per_node(1_000)


def test_a_long_chain_of_cuts_is_no_deeper_than_a_loop() -> None:
    graph = build(*(f"n{i + 1}: {'host' if i % 2 else 'launch'} n{i}" for i in range(4_000)))
    Partitioning().run(graph, PassContext())
    assert len(graph.regions) == 2_000
