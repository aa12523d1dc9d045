"""Time per node must not grow with the graph: partitioning is linear but for one heap of ready units."""

from __future__ import annotations

import gc
import time
from random import Random

from pygraph.ir import CAPTURABLE, FREE, REASON, Cost, Device, DType, Effects, Graph, Stage, TensorType
from pygraph.passes import Pass, PassContext
from pygraph.passes.indirection import Indirection
from pygraph.passes.partitioning import Partitioning
from pygraph.passes.selection import Selection

SMALL, LARGE = 2_000, 20_000
TENSOR = TensorType(DType.F32, (8, 8), Device("cpu"))
LAUNCH = Cost(64, 512, 256, 1, 0)


def large(nodes: int) -> Graph:
    """Mostly binary operators on recent values, with views, mutation and nodes that cannot be captured."""
    random = Random(0)
    graph = Graph(stage=Stage.PLACED)
    values = [graph.add_input(TENSOR) for _ in range(8)]
    for _ in range(nodes):
        recent = values[-64:]
        operands = [random.choice(recent), random.choice(recent)]
        chance = random.random()
        effects = Effects(aliases=((0, 0),), writes=(0,) if chance < 0.05 else ()) if chance < 0.2 else Effects()
        cost = FREE if 0.05 <= chance < 0.2 else LAUNCH
        node = graph.add("test.op", operands, [TENSOR], effects=effects, cost=cost)
        node.meta.set(CAPTURABLE, chance < 0.98)
        if chance >= 0.98:
            node.meta.set(REASON, "chosen")
        values.append(node.output)
    graph.set_outputs(values[-3:])
    return graph


def passes_time(nodes: int) -> float:
    """CPU seconds per node of the three passes together, on a fresh graph."""
    graph, ctx = large(nodes), PassContext()
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
    graph = Graph(stage=Stage.PLACED)
    value = graph.add_input(TENSOR)
    for i in range(10_000):
        node = graph.add("test.op", [value], [TENSOR], cost=LAUNCH)
        node.meta.set(CAPTURABLE, i % 2 == 0)
        value = node.output
    Partitioning().run(graph, PassContext())
    assert len(graph.regions) == 5_000
