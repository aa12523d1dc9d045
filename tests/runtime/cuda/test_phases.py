"""Phases of a captured graph: by their definition, and by the edges that the CUDA driver tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.phases import phases, phases_of
from tests.runtime.branches import Branched, branched, closure
from tests.work import work

PROGRAMMATIC = bytes((1, 0, 1))
LAUNCH_ORDER = bytes((2, 0, 0))
COMPLETE = bytes((0, 0, 0))
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


@settings(max_examples=100)
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


@settings(max_examples=100)
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


def forked(forks: int) -> tuple[int, set[tuple[int, int]]]:
    """2,000 launches in one chain, then 16 branches of three launches each, again and again: launches and edges."""
    count, edges = 2_000 + 48 * forks, {(i, i + 1) for i in range(1999)}
    for start in range(1999, count - 1, 48):
        roots = [start] if start == 1999 else range(start - 15, start + 1)
        for branch in range(1, 17):
            edges |= {(root, start + branch) for root in roots}
            edges |= {(start + branch, start + branch + 16), (start + branch + 16, start + branch + 32)}
    return count, edges


def test_the_work_of_phases_is_linear_in_the_edges() -> None:
    small, large = forked(50), forked(200)
    found = phases(*large)
    assert max(found) == 1999 + 200
    assert found[2000:2049] == (2000,) * 48 + (2001,)
    growth = len(large[1]) / len(small[1])
    assert work(lambda: phases(*large)) < 1.1 * growth * work(lambda: phases(*small))


# -- what is done with a graph ------------------------------------------------------------------------------------


def settled(
    count: int, edges: Iterable[tuple[int, int]], data: Mapping[tuple[int, int], bytes] = {}
) -> tuple[int, ...]:
    """The phases of a graph whose nodes have the handles 100 and up, with the ``data`` of edges that have any."""
    told = [(100 + a, 100 + b, data.get((a, b), b"").ljust(8, b"\0")) for a, b in edges]
    return phases_of(told, range(100, 100 + count))


def test_an_early_start_in_a_branch_is_no_end_of_a_phase() -> None:
    assert settled(5, DIAMOND) == (0, 1, 1, 2, 3)
    assert settled(5, DIAMOND, {(0, 2): PROGRAMMATIC}) == (0, 0, 0, 1, 2)
    assert settled(5, DIAMOND, {(3, 4): PROGRAMMATIC, (2, 3): PROGRAMMATIC}) == (0, 1, 1, 2, 3)


def test_an_edge_that_waits_for_less_still_orders_nothing() -> None:
    """The later kernel starts once all blocks of the earlier one have begun, so that the two may share no memory."""
    assert settled(5, {*DIAMOND, (1, 4)}, {(3, 4): LAUNCH_ORDER}) == (0, 1, 1, 1, 1)
    chain = {(0, 1), (1, 2)}
    assert settled(3, chain, {(0, 1): LAUNCH_ORDER}) == (0, 0, 0), "nor does anything come behind launch 0"
    assert settled(3, {*chain, (0, 2)}, {(0, 1): LAUNCH_ORDER}) == (0, 0, 1)


@pytest.mark.parametrize("edge", [(1, 0), (1, 1)])
def test_nodes_listed_against_their_edges_are_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(CaptureError) as caught:
        settled(2, {edge})
    assert caught.value.reason == "unordered-nodes"


# -- nodes that use no memory -------------------------------------------------------------------------------------


def test_what_uses_no_memory_holds_no_phase_open() -> None:
    """A collective waits for an event of its communicator's, and records one: neither orders anything else."""
    nodes = [10, 11, 12, 13, 14, 15, 16]
    kernels, wait, record = (10, 12, 14, 16), (11, 15), 13
    edges = [(a, b, COMPLETE) for a, b in pairwise(kernels)]
    edges += [(11, 12, COMPLETE), (12, record, COMPLETE), (15, 16, COMPLETE)]
    assert len(set(numbered(phases_of(edges, nodes), 7))) < 4
    assert phases_of(edges, nodes, [nodes.index(n) for n in (*wait, record)]) == (0, 0, 1, 1, 2, 2, 3)


@settings(max_examples=100)
@given(branched(), st.data())
def test_what_is_ordered_by_way_of_idle_nodes_is_ordered(graph: Branched, data: st.DataObject) -> None:
    idle = data.draw(st.sets(st.sampled_from(range(graph.count)))) if graph.count else set()
    nodes = [100 + n for n in range(graph.count)]
    found = phases_of([(100 + a, 100 + b, COMPLETE) for a, b in graph.edges], nodes, sorted(idle))
    busy = [n for n in range(graph.count) if n not in idle]
    before = {(busy.index(a), busy.index(b)) for a, b in graph.before() if not {a, b} & idle}
    assert [numbered(found, graph.count)[n] for n in busy] == list(by_definition(len(busy), before))
