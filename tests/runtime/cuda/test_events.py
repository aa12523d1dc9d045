"""Records of a communicator's event that a later one makes superfluous: which go, and that all else keeps its order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraph.runtime.cuda import executable
from pygraph.runtime.cuda.executable import drop_superseded
from pygraph.runtime.cuda.nodes import EmptyNode, EventNode, Node
from tests.runtime.branches import Branched, branched, closure

COMPLETE, PROGRAMMATIC = bytes(8), bytes((1, 0, 1, 0, 0, 0, 0, 0))


def drop(
    monkeypatch: pytest.MonkeyPatch, edges: dict[tuple[int, int], bytes], nodes: list[Node | None]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Which of its ``nodes`` a graph loses, and which edges it gets, by launch."""
    handles = {place: node.handle for place, node in enumerate(nodes) if node is not None}
    places = {handle: place for place, handle in handles.items()}
    told = [(handles[a], handles[b], data) for (a, b), data in edges.items()]
    destroyed: list[int] = []
    added: list[tuple[int, int]] = []

    def destroy(node: int) -> tuple[Any, ...]:
        destroyed.append(places[node])
        return (0,)

    monkeypatch.setattr(executable, "read_edges", lambda graph: told if graph == 5 else [])
    monkeypatch.setattr(
        executable, "add_edges", lambda graph, new: added.extend((places[a], places[b]) for a, b in new)
    )
    driver: Any = SimpleNamespace(CUgraphNode=int, cuGraphDestroyNode=destroy)
    assert drop_superseded(driver, 5, nodes) == set(destroyed)
    return destroyed, added


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=branched(), data=st.data())
def test_all_else_is_ordered_as_before_and_the_last_record_comes_behind_all(
    monkeypatch: pytest.MonkeyPatch, graph: Branched, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.sampled_from(range(graph.count)))) if graph.count else set()
    events = {place: data.draw(st.integers(0, 1)) for place in sorted(chosen)}
    nodes = [
        EventNode(100 + place, events[place], records=True) if place in events else EmptyNode(100 + place)
        for place in range(graph.count)
    ]
    destroyed, added = drop(monkeypatch, dict.fromkeys(graph.edges, COMPLETE), nodes)
    before = graph.before()
    followed = {a for a, b in before if a in events and b in events and events[a] == events[b]}
    assert set(destroyed) == followed
    kept = {edge for edge in graph.edges if not followed.intersection(edge)}
    assert kept.isdisjoint(added)
    assert closure(kept.union(added)) == {pair for pair in before if not followed.intersection(pair)}


KERNELS: list[Node | None] = [
    EmptyNode(100),
    EventNode(101, 7, records=True),
    EmptyNode(102),
    EventNode(103, 7, records=True),
]


def test_the_graph_loses_superseded_records_and_gets_the_edges_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = dict.fromkeys([(0, 1), (1, 2), (2, 3)], COMPLETE)
    assert drop(monkeypatch, chain, KERNELS) == ([1], [(0, 2)])
    assert drop(monkeypatch, {**chain, (0, 2): COMPLETE}, KERNELS) == ([1], [])
    assert drop(monkeypatch, {(0, 1): COMPLETE, (2, 3): COMPLETE}, KERNELS) == ([], []), "side by side"


def test_a_record_that_the_graph_waits_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    record, wait, last = (EventNode(100 + n, 7, records=n != 1) for n in range(3))
    chain = dict.fromkeys([(0, 1), (1, 2)], COMPLETE)
    assert drop(monkeypatch, chain, [record, wait, last]) == ([], [])
    for other in (EventNode(101, 8, records=False), EventNode(101, 8, records=True)):
        assert drop(monkeypatch, chain, [record, other, last]) == ([0], [])


def test_a_wait_and_an_eager_call_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[Node | None] = [EventNode(100, 7, records=False), EmptyNode(101), None, EventNode(102, 7, records=True)]
    assert drop(monkeypatch, dict.fromkeys([(0, 1), (1, 3)], COMPLETE), nodes) == ([], [])


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
    assert drop(monkeypatch, edges, KERNELS) == ([], [])


def test_a_graph_of_nccls_loses_all_records_but_the_last_and_gets_no_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two all-reduces as NCCL 2.28 has them captured: it orders its kernels by edges of their own as well."""
    wait, records = (
        EventNode(101, 7, records=False),
        {place: EventNode(100 + place, 7, records=True) for place in (3, 7)},
    )
    nodes: list[Node | None] = [records.get(place, EmptyNode(100 + place)) for place in range(9)]
    nodes[1] = wait
    edges = [(0, 2), (0, 4), (1, 2), (2, 3), (2, 4), (2, 6), (3, 6), (4, 5), (5, 6), (5, 8), (6, 7), (6, 8)]
    assert drop(monkeypatch, dict.fromkeys(edges, COMPLETE), nodes) == ([3], [])
