"""Records of a communicator's event that a later one makes superfluous: which go, and that all else keeps its order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.cuda import events
from pygraph.runtime.cuda.events import drop_superseded, superseded
from pygraph.runtime.cuda.nodes import EmptyNode, EventNode, Node
from tests.runtime.branches import Branched, branched, closure

COMPLETE, PROGRAMMATIC = bytes(8), bytes((1, 0, 1, 0, 0, 0, 0, 0))

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


def drop(
    monkeypatch: pytest.MonkeyPatch, edges: dict[tuple[int, int], bytes], nodes: list[Node | None]
) -> tuple[list[Node | None], list[int], list[tuple[int, int]]]:
    """What is left of the ``nodes`` of a graph, which nodes it loses, and which edges it gets, by launch."""
    handles = {place: node.handle for place, node in enumerate(nodes) if node is not None}
    places = {handle: place for place, handle in handles.items()}
    told = [(handles[a], handles[b], data) for (a, b), data in edges.items()]
    destroyed: list[int] = []
    added: list[tuple[int, int]] = []

    def destroy(node: int) -> tuple[Any, ...]:
        destroyed.append(places[node])
        return (0,)

    monkeypatch.setattr(events, "read_edges", lambda graph: told if graph == 5 else [])
    monkeypatch.setattr(events, "add_edges", lambda graph, new: added.extend((places[a], places[b]) for a, b in new))
    driver: Any = SimpleNamespace(CUgraphNode=int, cuGraphDestroyNode=destroy)
    return drop_superseded(driver, 5, nodes), destroyed, added


KERNELS: list[Node | None] = [
    EmptyNode(100),
    EventNode(101, 7, records=True),
    EmptyNode(102),
    EventNode(103, 7, records=True),
]


def test_the_graph_loses_superseded_records_and_gets_the_edges_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = dict.fromkeys([(0, 1), (1, 2), (2, 3)], COMPLETE)
    first, _, second, last = KERNELS
    assert drop(monkeypatch, chain, KERNELS) == ([first, None, second, last], [1], [(0, 2)])


def test_a_record_that_the_graph_waits_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    record, wait, last = (EventNode(100 + n, 7, records=n != 1) for n in range(3))
    chain = dict.fromkeys([(0, 1), (1, 2)], COMPLETE)
    assert drop(monkeypatch, chain, [record, wait, last]) == ([record, wait, last], [], [])
    other = EventNode(101, 8, records=False)
    assert drop(monkeypatch, chain, [record, other, last]) == ([None, other, last], [0], [])


def test_a_wait_and_an_eager_call_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[Node | None] = [EventNode(100, 7, records=False), EmptyNode(101), None, EventNode(102, 7, records=True)]
    assert drop(monkeypatch, dict.fromkeys([(0, 1), (1, 3)], COMPLETE), nodes) == (nodes, [], [])


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
    assert drop(monkeypatch, edges, KERNELS) == (KERNELS, [], [])
