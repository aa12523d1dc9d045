"""Phases of a captured graph: by their definition, and by the edges that the CUDA driver tells."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import CaptureError
from pygraph.runtime.cuda import phases as module
from pygraph.runtime.cuda.bindings import edge_query
from pygraph.runtime.cuda.phases import phases, phases_of, read_edges
from tests.runtime.branches import Branched, branched, closure
from tests.runtime.cuda.fake import CUgraphNodeType, FakeDriver

PROGRAMMATIC = bytes((1, 0, 1))
LAUNCH_ORDER = bytes((2, 0, 0))
DIAMOND = {(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)}


def numbered(phases_: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Stages with the short form written out."""
    return phases_ or tuple(range(count))


def by_definition(count: int, before: set[tuple[int, int]]) -> tuple[int, ...]:
    """As many runs as there can be, such that all of an earlier one comes before all of a later one."""
    found, phase = list[int](), 0
    for node in range(count):
        if node and all((a, b) in before for a in range(node) for b in range(node, count)):
            phase += 1
        found.append(phase)
    return tuple(found)


# -- phases -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(branched())
def test_phases_are_as_defined(graph: Branched) -> None:
    assert numbered(phases(graph.count, graph.edges), graph.count) == by_definition(graph.count, graph.before())


def completed_first(count: int, edges: Iterable[tuple[int, int]], early: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Pairs of which the first has completed before the second starts. Start and end of node n are 2 n and 2 n + 1."""
    facts = {(2 * n, 2 * n + 1) for n in range(count)}
    for a, b in edges:
        if (a, b) in early:
            facts |= {(2 * a, 2 * b), (2 * a + 1, 2 * b + 1)}
        else:
            facts.add((2 * a + 1, 2 * b))
    return {(a // 2, b // 2) for a, b in closure(facts) if a % 2 and not b % 2}


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_kernel_that_starts_early_is_not_relied_on(data: st.DataObject) -> None:
    graph = data.draw(branched())
    early = data.draw(st.sets(st.sampled_from(sorted(graph.edges)))) if graph.edges else set()
    found = numbered(phases(graph.count, graph.edges, early), graph.count)
    before = completed_first(graph.count, graph.edges, early)
    for a in range(graph.count):
        assert all((a, b) in before for b in range(a, graph.count) if found[b] > found[a])
    if not any(b - a > 1 for a, b in graph.edges):  # no path runs beside an early edge
        assert found == by_definition(graph.count, before)


def test_branches_are_one_phase_and_what_surrounds_them_is_not() -> None:
    assert phases(5, DIAMOND) == (0, 1, 1, 2, 3)
    assert phases(3, {(0, 1)}) == (0, 0, 0), "a node that nobody waits for may run at any time"
    assert phases(4, {(0, 1), (2, 3)}) == (0, 0, 0, 0)
    assert phases(4, {(0, 2), (0, 3), (1, 2), (1, 3)}) == (0, 0, 1, 1)
    assert phases(4, {(0, 2), (0, 3), (1, 2)}) == (0, 0, 0, 0)


def test_large_graphs_take_no_time_to_speak_of() -> None:
    """16 branches of three, 1,000 times over, and 2,000 launches in one chain: 50,000 launches."""
    edges = {(i, i + 1) for i in range(1999)}
    for start in range(1999, 49_999, 48):
        roots = [start] if start == 1999 else range(start - 15, start + 1)
        for branch in range(1, 17):
            edges |= {(root, start + branch) for root in roots}
            edges |= {(start + branch, start + branch + 16), (start + branch + 16, start + branch + 32)}
    begin = time.process_time()
    found = phases(50_000, edges)
    assert time.process_time() - begin < 5
    assert max(found) == 1999 + 1000
    assert found[2000:2049] == (2000,) * 48 + (2001,)


# -- what is done with a graph ------------------------------------------------------------------------------------


def graph_of(count: int, edges: Iterable[tuple[int, int]], **data: Any) -> FakeDriver:
    driver = FakeDriver(*[SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY) for _ in range(count)])
    driver.edges = set(edges)
    driver.data = dict(data.get("data", {}))
    return driver


def settled(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> tuple[int, ...]:
    monkeypatch.setattr(module, "edge_query", driver.edge_query)
    return phases_of(1, driver.nodes)


def test_edges_are_read_with_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = graph_of(3, {(0, 1), (0, 2)}, data={(0, 2): PROGRAMMATIC})
    monkeypatch.setattr(module, "edge_query", driver.edge_query)
    assert read_edges(1) == [(100, 101, bytes(8)), (100, 102, PROGRAMMATIC + bytes(5))]
    driver.edges = set()
    assert read_edges(1) == []


@pytest.mark.parametrize(("edges", "expected"), [(DIAMOND, (0, 1, 1, 2, 3)), ({(0, 1), (1, 2)}, ()), (set(), (0, 0))])
def test_phases_of_a_graph(
    monkeypatch: pytest.MonkeyPatch, edges: set[tuple[int, int]], expected: tuple[int, ...]
) -> None:
    count = 1 + max((later for _, later in edges), default=1)
    assert settled(monkeypatch, graph_of(count, edges)) == expected


def test_edges_that_cannot_be_read_refuse_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "edge_query", lambda: lambda *_: 1)
    with pytest.raises(CaptureError) as caught:
        phases_of(1, graph_of(2, ()).nodes)
    assert caught.value.reason == "driver-error"


def test_an_early_start_in_a_branch_is_no_end_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = graph_of(5, DIAMOND, data={(0, 2): PROGRAMMATIC})
    assert settled(monkeypatch, driver) == (0, 0, 0, 1, 2)
    driver = graph_of(5, DIAMOND, data={(3, 4): PROGRAMMATIC, (2, 3): PROGRAMMATIC})
    assert settled(monkeypatch, driver) == (0, 1, 1, 2, 3)


def test_an_edge_that_waits_for_less_still_orders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later kernel starts once all blocks of the earlier one have begun, so that the two may share no memory."""
    driver = graph_of(5, {*DIAMOND, (1, 4)}, data={(3, 4): LAUNCH_ORDER})
    assert settled(monkeypatch, driver) == (0, 1, 1, 1, 1)
    driver = graph_of(3, {(0, 1), (1, 2)}, data={(0, 1): LAUNCH_ORDER})
    assert settled(monkeypatch, driver) == (0, 0, 0), "nor does anything come behind launch 0"
    driver = graph_of(3, {(0, 1), (1, 2), (0, 2)}, data={(0, 1): LAUNCH_ORDER})
    assert settled(monkeypatch, driver) == (0, 0, 1)


def test_nodes_listed_against_their_edges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for edges in ({(1, 0)}, {(1, 1)}):
        with pytest.raises(CaptureError) as caught:
            settled(monkeypatch, graph_of(2, edges))
        assert caught.value.reason == "unordered-nodes"


def test_a_driver_without_that_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    for library in (missing, lambda _: SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", library)
        with pytest.raises(CaptureError) as caught:
            edge_query.__wrapped__()
        assert caught.value.reason == "driver-error"
