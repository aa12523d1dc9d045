"""Records of a communicator's event that a later one makes superfluous: which go, and that all else keeps its order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings.driver import CUgraphNodeType
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.cuda import events
from pygraph.runtime.cuda.events import drop_superseded, superseded
from tests.runtime.branches import Branched, branched, closure

COMPLETE, PROGRAMMATIC = bytes(8), bytes((1, 0, 1, 0, 0, 0, 0, 0))
RECORD, KERNEL = CUgraphNodeType.CU_GRAPH_NODE_TYPE_EVENT_RECORD, CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL

CHAIN = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]
"""Reduce, record, a kernel, reduce, record: the kernel waits for the reduction before it, and not for the record."""


def test_what_a_kernel_orders_needs_no_other_edge() -> None:
    assert superseded(5, CHAIN, {1: 7, 4: 7}) == ({1}, [])


def test_collectives_that_only_a_record_orders_keep_their_order() -> None:
    assert superseded(4, [(0, 1), (1, 2), (2, 3)], {1: 7, 3: 7}) == ({1}, [(0, 2)])
    assert superseded(5, [(0, 1), (1, 2), (2, 3), (3, 4)], {1: 7, 2: 7, 4: 7}) == ({1, 2}, [(0, 3)])


@pytest.mark.parametrize(
    ("edges", "records"),
    [
        (CHAIN, {1: 7, 4: 8}),
        ([(0, 1), (0, 2), (2, 3)], {1: 7, 3: 7}),
        ([(0, 1)], {1: 7}),
        (CHAIN, {}),
    ],
    ids=["two events", "side by side", "one record", "none"],
)
def test_a_record_without_a_later_one_of_its_event_stays(edges: list[tuple[int, int]], records: dict[int, int]) -> None:
    assert superseded(5, edges, records) == (set(), [])


@settings(deadline=None, max_examples=200)
@given(branched(), st.data())
def test_all_else_is_ordered_as_before_and_the_last_record_comes_behind_all(
    graph: Branched, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.sampled_from(range(graph.count)))) if graph.count else set()
    records = {node: data.draw(st.integers(0, 1)) for node in sorted(chosen)}
    dropped, instead = superseded(graph.count, graph.edges, records)
    before = graph.before()
    left = {edge for edge in graph.edges if not dropped.intersection(edge)}
    assert left.isdisjoint(instead)
    assert closure(left.union(instead)) == {pair for pair in before if not dropped.intersection(pair)}
    followed = {a for a, b in before if a in records and b in records and records[a] == records[b]}
    assert dropped == followed


class Graph:
    """A captured graph of kernels and records of events, as the CUDA driver tells it."""

    CUgraphNodeType = CUgraphNodeType

    def __init__(self, count: int, edges: dict[tuple[int, int], bytes], records: dict[int, int]) -> None:
        self.nodes = [100 + place for place in range(count)]
        self.edges, self.records = edges, records
        self.destroyed: list[int] = []
        self.added: list[tuple[int, int]] = []

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        return 0, RECORD if node - 100 in self.records else KERNEL

    def cuGraphEventRecordNodeGetEvent(self, node: int) -> tuple[Any, ...]:
        return 0, self.records[node - 100]

    def cuGraphDestroyNode(self, node: int) -> tuple[Any, ...]:
        self.destroyed.append(node - 100)
        return (0,)

    def drop(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        told = [(100 + a, 100 + b, data) for (a, b), data in self.edges.items()]
        monkeypatch.setattr(events, "read_edges", lambda graph: told if graph == 5 else [])
        monkeypatch.setattr(events, "add_edges", lambda graph, edges: self.added.extend(edges))
        facts: Any = SimpleNamespace(
            **{name: getattr(self, name) for name in dir(self) if name.startswith(("cu", "CU"))}
        )
        return [node - 100 for node in drop_superseded(facts, 5, self.nodes)]


def test_the_graph_loses_superseded_records_and_gets_the_edges_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(4, dict.fromkeys([(0, 1), (1, 2), (2, 3)], COMPLETE), {1: 7, 3: 7})
    assert graph.drop(monkeypatch) == [0, 2, 3]
    assert (graph.destroyed, graph.added) == ([1], [(100, 102)])


@pytest.mark.parametrize(
    "edges",
    [
        {(0, 1): PROGRAMMATIC, (1, 2): COMPLETE, (2, 3): COMPLETE},
        {(0, 1): COMPLETE, (1, 2): COMPLETE, (2, 3): COMPLETE, (0, 2): PROGRAMMATIC},
        {(0, 1): COMPLETE, (1, 2): COMPLETE, (2, 3): PROGRAMMATIC},
    ],
    ids=["into a record", "beside a record", "into the last record"],
)
def test_a_kernel_that_may_start_early_keeps_the_records_about_it(
    edges: dict[tuple[int, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph(4, edges, {1: 7, 3: 7})
    assert graph.drop(monkeypatch) == [0, 1, 2, 3]
    assert (graph.destroyed, graph.added) == ([], [])
