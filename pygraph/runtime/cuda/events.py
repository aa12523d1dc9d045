"""Events that NCCL records in a captured graph, of which the last record is enough::

    reduce ─► record ─► reduce ─► record            reduce ─► reduce ─► record

Behind each collective that is captured, NCCL records an event of its communicator. Collectives on other streams wait
for it, as it was recorded last. Between two kernels such a node takes 7 µs (H200).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import ModuleType

from pygraph.runtime.contract import Order
from pygraph.runtime.cuda.bindings import add_edges, call, read_edges
from pygraph.runtime.cuda.nodes import EventNode, Node

__all__ = ["drop_superseded", "superseded"]


def drop_superseded(driver: ModuleType, graph: int, nodes: Sequence[Node | None]) -> list[Node | None]:
    """Take superseded records out of a graph, of which ``nodes`` are all, by launch, and out of these. What was ordered
    by way of a record still is. NCCL waits for an event in a graph before it records it there: all records of one that
    is waited for later stay."""
    places = {node.handle: place for place, node in enumerate(nodes) if node is not None}
    edges = [(places[earlier], places[later], any(data[:3])) for earlier, later, data in read_edges(graph)]
    early = {(earlier, later) for earlier, later, less in edges if less}
    kept = {place for edge in early for place in edge}
    found = [(place, node) for place, node in enumerate(nodes) if isinstance(node, EventNode)]
    first = {node.event: place for place, node in reversed(found) if node.records}
    late = {node.event for place, node in found if not node.records and place > first.get(node.event, place)}
    records = {place: node.event for place, node in found if node.records and place not in kept}
    records = {place: event for place, event in records.items() if event not in late}
    dropped, instead = superseded(len(nodes), [edge[:2] for edge in edges if not edge[2]], records)
    if early.intersection(instead):
        return list(nodes)
    handles = {place: handle for handle, place in places.items()}
    for place in dropped:
        call(driver.cuGraphDestroyNode, driver.CUgraphNode(handles[place]))
    add_edges(graph, [(handles[earlier], handles[later]) for earlier, later in instead])
    return [None if place in dropped else node for place, node in enumerate(nodes)]


def superseded(
    count: int, edges: Collection[tuple[int, int]], records: Mapping[int, int]
) -> tuple[set[int], list[tuple[int, int]]]:
    """Those of ``records`` (the event, by node) behind which the same event is recorded again, and edges for what is
    ordered by way of these alone. Nodes are numbered up to ``count``; ``edges`` are (earlier, later)."""
    waits: list[set[int]] = [set() for _ in range(count)]
    for earlier, later in edges:
        waits[later].add(earlier)
    before = Order.of(waits).before
    dropped = {
        record
        for record, event in records.items()
        if any(before[other] >> record & 1 for other, another in records.items() if another == event)
    }
    passed: list[set[int]] = []
    for waited in waits:
        passed.append(waited - dropped)
        passed[-1].update(*(passed[record] for record in waited & dropped))
    order = Order.of([set() if node in dropped else found for node, found in enumerate(passed)])
    instead = [(earlier, later) for later in range(count) for earlier in order.edges[later]]
    return dropped, [(earlier, later) for earlier, later in instead if earlier not in waits[later]]
