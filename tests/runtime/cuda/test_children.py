"""Child graphs replaced by their nodes: order and edges, by their definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import CaptureError
from pygraph.runtime.cuda import children as children_module
from pygraph.runtime.cuda import edges as edges_module
from pygraph.runtime.cuda.children import Inlined, inline
from pygraph.runtime.cuda.edges import Edge
from tests.runtime.branches import Branched, branched, closure
from tests.runtime.cuda.fake import FakeGraphs, child, memset

PROGRAMMATIC = bytes((1, 0, 1))
LAUNCH_ORDER = bytes((2, 0, 0))


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges_module, "edge_query", lambda: None)


def inlined(driver: FakeGraphs, graph: int) -> Inlined:
    """``inline``, with the edges of ``driver``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "edge_query", driver.edge_query)
        return inline(driver, graph)  # type: ignore[arg-type]


def named(handles: Sequence[Any]) -> list[int]:
    """What fills are told apart by: their destinations."""
    return [handle.node.params.dst for handle in handles]


def order_of(driver: FakeGraphs, graph: int) -> set[tuple[int, int]]:
    """The edges of a graph of fills, by their destinations."""
    name = {int(handle): handle.node.params.dst for handle in driver.members[graph]}
    return {(name[a], name[b]) for a, b in driver.arrows[graph]}


def fills(*names: int) -> list[SimpleNamespace]:
    return [memset(dst=name) for name in names]


def chain(count: int) -> set[tuple[int, int]]:
    return set(pairwise(range(count)))


def three(driver: FakeGraphs, middle: int, edges: set[tuple[int, int]] | None = None) -> int:
    """Fill 1, the child graph ``middle``, fill 3, in a chain."""
    return driver.make([memset(dst=1), child(middle), memset(dst=3)], chain(3) if edges is None else edges)


# -- order and edges ----------------------------------------------------------------------------------------------


def test_a_graph_without_child_graphs_stays_as_it_is() -> None:
    driver = FakeGraphs()
    graph = driver.make(fills(1, 2, 3), chain(3))
    before = list(driver.members[graph])
    found = inlined(driver, graph)
    assert (found.handles, found.starts, found.kept) == (before, (), ())
    assert [int(kind) for kind in found.kinds] == [2, 2, 2]
    assert set(driver.calls) == {"cuGraphGetNodes", "cuGraphNodeGetType"}


def test_a_child_in_a_chain() -> None:
    driver = FakeGraphs()
    graph = three(driver, driver.make(fills(21, 22), chain(2)))
    found = inlined(driver, graph)
    assert named(found.handles) == [1, 21, 22, 3]
    assert found.starts == (0, 1, 3, 4)
    assert order_of(driver, graph) == {(1, 21), (21, 22), (22, 3)}
    assert [int(kind) for kind in found.kinds] == [2] * 4


def test_a_child_with_branches_in_a_branch() -> None:
    """Its roots are 21 and 22, its sinks 21 and 23; fill 3 is the other branch."""
    driver = FakeGraphs()
    inner = driver.make(fills(21, 22, 23), {(1, 2)})
    nodes = [memset(dst=1), child(inner), memset(dst=3), memset(dst=4)]
    graph = driver.make(nodes, {(0, 1), (0, 2), (1, 3), (2, 3)})
    found = inlined(driver, graph)
    assert named(found.handles) == [1, 21, 22, 23, 3, 4]
    assert found.starts == (0, 1, 4, 5, 6)
    assert order_of(driver, graph) == {(1, 21), (1, 22), (22, 23), (21, 4), (23, 4), (1, 3), (3, 4)}


def test_a_child_of_a_child() -> None:
    driver = FakeGraphs()
    innermost = driver.make(fills(211, 212), ())
    inner = driver.make([child(innermost), memset(dst=22)], chain(2))
    graph = three(driver, inner)
    found = inlined(driver, graph)
    assert named(found.handles) == [1, 211, 212, 22, 3]
    assert found.starts == (0, 1, 4, 5)
    assert order_of(driver, graph) == {(1, 211), (1, 212), (211, 22), (212, 22), (22, 3)}
    assert list(driver.members) == [graph], "the child graphs went with their nodes"


def test_an_empty_child_hands_on_what_it_waited_for() -> None:
    driver = FakeGraphs()
    nothing = driver.make([], ())
    hollow = driver.make([child(driver.make([], ())), child(nothing)], chain(2))
    for inner in (driver.make([], ()), hollow):
        graph = three(driver, inner)
        found = inlined(driver, graph)
        assert named(found.handles) == [1, 3]
        assert found.starts == (0, 1, 1, 2)
        assert order_of(driver, graph) == {(1, 3)}
    alone = driver.make([child(driver.make([], ()))], ())
    found = inlined(driver, alone)
    assert (found.handles, found.starts) == ([], (0, 0))


def test_an_edge_that_an_empty_child_would_repeat_is_there_once() -> None:
    driver = FakeGraphs()
    graph = three(driver, driver.make([], ()), {(0, 1), (1, 2), (0, 2)})
    inlined(driver, graph)
    assert order_of(driver, graph) == {(1, 3)}


def test_child_graphs_come_one_after_the_other() -> None:
    """Two launches of one executable graph never overlap, but are captured as two children that may."""
    driver = FakeGraphs()
    nodes = [memset(dst=1), child(driver.make(fills(2), ())), child(driver.make(fills(3), ())), memset(dst=4)]
    graph = driver.make(nodes, {(0, 1), (0, 2), (1, 3), (2, 3)})
    inlined(driver, graph)
    assert order_of(driver, graph) == {(1, 2), (1, 3), (2, 3), (2, 4), (3, 4)}
    nodes = [child(driver.make(fills(1), ())), memset(dst=2), child(driver.make(fills(3), ()))]
    graph = driver.make(nodes, chain(3))
    inlined(driver, graph)
    assert order_of(driver, graph) == {(1, 2), (2, 3)}, "they are in turn already"
    nodes = [child(driver.make(fills(1), ())), child(driver.make(fills(2), ())), child(driver.make(fills(3), ()))]
    graph = driver.make(nodes, {(0, 2)})
    inlined(driver, graph)
    assert order_of(driver, graph) == {(1, 2), (1, 3), (2, 3)}


def test_a_child_listed_against_its_edges_is_put_in_order() -> None:
    driver = FakeGraphs()
    inner = driver.make(fills(21, 22, 23, 24), {(0, 1), (1, 2), (0, 3)}, listed=(2, 3, 1, 0))
    found = inlined(driver, three(driver, inner))
    assert named(found.handles) == [1, 21, 24, 22, 23, 3]


def test_a_graph_listed_against_its_edges_is_refused() -> None:
    driver = FakeGraphs()
    with pytest.raises(CaptureError) as caught:
        inlined(driver, three(driver, driver.make(fills(2), ()), {(1, 0), (1, 2)}))
    assert caught.value.reason == "unordered-nodes"


@pytest.mark.parametrize("data", [PROGRAMMATIC, LAUNCH_ORDER])
def test_edges_of_child_graphs_wait_for_completion(data: bytes) -> None:
    """Those to and from one, and those inside; edges elsewhere are left alone."""
    driver = FakeGraphs()
    inner = driver.make(fills(21, 22), chain(2))
    nodes = [*fills(1, 2), child(inner), memset(dst=3)]
    graph = driver.make(nodes, chain(4))
    driver.marks = dict.fromkeys(driver.arrows[graph] | driver.arrows[inner], data)
    kept = min(driver.arrows[graph])
    inlined(driver, graph)
    assert order_of(driver, graph) == {(1, 2), (2, 21), (21, 22), (22, 3)}
    assert {edge for edge in driver.arrows[graph] if edge in driver.marks} == {kept}


def test_a_wait_for_completion_is_not_lost_beside_one_for_less() -> None:
    """What an empty child stands for here is a second edge between two nodes: this driver has none such."""
    driver = FakeGraphs()
    graph = three(driver, driver.make([], ()), {(0, 1), (1, 2), (0, 2)})
    first, middle, last = map(int, driver.members[graph])
    for early in ({(first, last)}, {(first, last), (first, middle)}, {(first, last), (middle, last)}):
        driver.marks = dict.fromkeys(early, PROGRAMMATIC)
        with pytest.raises(CaptureError, match="cuGraphAddDependencies"):
            inlined(driver, graph)


def test_two_edges_inside_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeGraphs()
    inner = driver.make(fills(21, 22), chain(2))
    graph = three(driver, inner)

    def edges_of(asked: int) -> list[Edge]:
        kinds = (bytes(8), PROGRAMMATIC + bytes(5)) if asked == inner else (bytes(8),)
        return [Edge(a, b, data) for a, b in sorted(driver.arrows[asked]) for data in kinds]

    monkeypatch.setattr(children_module, "read_edges", edges_of)
    inline(driver, graph)  # type: ignore[arg-type]
    assert order_of(driver, graph) == {(1, 21), (21, 22), (22, 3)}


@dataclass(frozen=True)
class Tree:
    """A graph, the graphs inside of some of its nodes, and the order in which its nodes are listed."""

    graph: Branched
    children: dict[int, Tree]
    listed: tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn, depth: int = 0) -> Tree:
    graph = draw(branched(6 if depth == 0 else 4))
    numbers = st.integers(0, max(graph.count - 1, 0))
    inside = draw(st.sets(numbers, max_size=graph.count)) if graph.count and depth < 2 else set()
    listed = range(graph.count) if depth == 0 else draw(st.permutations(range(graph.count)))
    return Tree(graph, {node: draw(trees(depth + 1)) for node in sorted(inside)}, tuple(listed))


def built(driver: FakeGraphs, tree: Tree, names: list[int], *, top: bool) -> tuple[int, list[list[int]], set[Any]]:
    """A graph like ``tree``, the fills that each of its nodes comes to, and which of them come before which: all of one
    node before all of another that it comes before, and likewise inside of each."""
    nodes: list[Any] = []
    own: list[list[int]] = []
    before: set[tuple[int, int]] = set()
    for number in range(tree.graph.count):
        if number in tree.children:
            graph, inner, within = built(driver, tree.children[number], names, top=False)
            nodes.append(child(graph))
            own.append([name for each in inner for name in each])
            before |= within
        else:
            names.append(len(names))
            nodes.append(memset(dst=names[-1]))
            own.append([names[-1]])
    turns = set(pairwise(sorted(tree.children))) if top else set()
    for a, b in closure(tree.graph.edges | turns):
        before |= set(product(own[a], own[b]))
    return driver.make(nodes, tree.graph.edges, tree.listed), own, before


@settings(deadline=None, max_examples=300)
@given(trees())
def test_what_comes_before_what_is_as_it_was(tree: Tree) -> None:
    driver, names = FakeGraphs(), list[int]()
    graph, own, before = built(driver, tree, names, top=True)
    found = inlined(driver, graph)
    listed = named(found.handles)
    assert closure(order_of(driver, graph)) == before
    assert sorted(listed) == names
    assert sorted(int(handle) for handle in found.handles) == sorted(int(node) for node in driver.members[graph])
    place = {name: index for index, name in enumerate(listed)}
    assert all(place[a] < place[b] for a, b in before)
    starts = found.starts or tuple(range(tree.graph.count + 1))
    assert [sorted(listed[a:b]) for a, b in pairwise(starts)] == [sorted(each) for each in own]
    assert len(found.kept) == len(driver.clones) == len(tree.children)
    assert list(driver.members) == [graph]
