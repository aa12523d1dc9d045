"""Nodes of child graphs as launches of the region: parameters, numbers, what is refused, what it costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pygraph.errors import CaptureError
from pygraph.runtime.cuda import edges as edges_module
from pygraph.runtime.cuda.accesses import with_accesses
from pygraph.runtime.cuda.capture import _inlined
from pygraph.runtime.cuda.children import inline
from pygraph.runtime.cuda.edges import ordered
from pygraph.runtime.cuda.memory import SessionMemory
from pygraph.runtime.cuda.nodes import KernelNode, read_nodes
from pygraph.runtime.cuda.observation import Observer, Span
from pygraph.runtime.recording import Allocation, AllocationKind
from tests.runtime.cuda.fake import (
    A,
    B,
    CUgraphNodeType,
    CUmemorytype,
    FakeGraphs,
    child,
    kernel,
    memcpy,
    memset,
    packed_kernel,
)
from tests.runtime.cuda.test_children import chain, fills, inlined, named, three


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges_module, "edge_query", lambda: None)


# -- nodes --------------------------------------------------------------------------------------------------------

LAYOUTS = {7: [(0, 8), (8, 4), (12, 4)], 8: [(0, 8)]}


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def test_nodes_are_copied_with_all_that_they_have() -> None:
    driver = FakeGraphs(layouts=LAYOUTS)
    clustered = kernel(word(A), b"\1\0\0\0", b"\2\0\0\0", gridDimX=9, sharedMemBytes=64)
    clustered.attributes = {"cluster": (2, 1, 1)}
    packed = packed_kernel(word(B), size_first=False, func=8)
    packed.attributes = {"priority": -3}
    copy, fill, empty = (
        memcpy(WidthInBytes=48),
        memset(value=5),
        SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY),
    )
    inner = driver.make([clustered, packed, copy, fill, empty], chain(5))
    found = inlined(driver, three(driver, inner))
    nodes, launches = read_nodes(driver, found.handles, found.kinds)  # type: ignore[arg-type]
    assert [launch.name for launch in launches] == [
        "memset", "kernel_7", "kernel_8", "memcpy", "memset", "empty", "memset"
    ]  # fmt: skip
    assert [launch.words for launch in launches] == [(1,), (A, 1, 2), (B,), (B + 16, A), (A,), (), (3,)]
    assert launches[1].signature[1] == ((9, 1, 1), (1, 1, 1), 64)  # type: ignore[index]
    assert launches[3].signature == (48, 1, 1)
    assert launches[4].signature == (5, 4, 10)
    assert isinstance(nodes[1], KernelNode)
    assert nodes[1].blob == word(A) + b"\1\0\0\0\2\0\0\0"
    assert [handle.node.attributes for handle in found.handles[1:3]] == [{"cluster": (2, 1, 1)}, {"priority": -3}]
    assert [node.handle for node in nodes] == [int(handle) for handle in found.handles]


def test_a_clone_of_each_child_graph_is_kept_for_as_long_as_the_nodes() -> None:
    driver = FakeGraphs()
    nested = driver.make([child(driver.make(fills(2), ()))], ())
    found = inlined(driver, driver.make([child(nested), child(driver.make(fills(3), ()))], chain(2)))
    assert len(driver.clones) == 2
    handles, kept = found.handles, found.kept
    del found
    assert len(driver.clones) == 2
    del kept
    assert driver.clones == set()
    assert named(handles) == [2, 3]


KINDS = CUgraphNodeType
UNKNOWN = {
    "host": KINDS.CU_GRAPH_NODE_TYPE_HOST,
    "conditional": KINDS.CU_GRAPH_NODE_TYPE_CONDITIONAL,
    "mem_alloc": KINDS.CU_GRAPH_NODE_TYPE_MEM_ALLOC,
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_copied_is_refused_by_name(name: str, nested: bool) -> None:
    driver = FakeGraphs()
    inner = driver.make([memset(dst=2), SimpleNamespace(kind=UNKNOWN[name])], chain(2))
    graph = three(driver, driver.make([child(inner)], ()) if nested else inner)
    before = list(driver.members[graph])
    with pytest.raises(CaptureError, match=f"launch 1 is a child graph with a node of kind {name}") as caught:
        inlined(driver, graph)
    assert (caught.value.reason, caught.value.launch) == ("unsupported-node", 1)
    assert driver.members[graph] == before
    assert driver.clones == set()


@pytest.mark.parametrize(
    ("node", "reason"),
    [(memcpy(srcMemoryType=CUmemorytype.CU_MEMORYTYPE_HOST), "host-memcpy"), (memset(height=2), "unsupported-fill")],
)
def test_what_cannot_be_patched_is_refused_as_anywhere(node: Any, reason: str) -> None:
    driver = FakeGraphs()
    found = inlined(driver, three(driver, driver.make([memset(dst=2), node], chain(2))))
    with pytest.raises(CaptureError) as caught:
        read_nodes(driver, found.handles, found.kinds)  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.launch) == (reason, 2)


def test_a_host_node_beside_a_child_graph_is_refused_by_name() -> None:
    driver = FakeGraphs()
    host = SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST)
    found = inlined(driver, driver.make([child(driver.make(fills(1, 2), chain(2))), host], chain(2)))
    with pytest.raises(CaptureError, match="launch 2 is a node of kind host"):
        read_nodes(driver, found.handles, found.kinds)  # type: ignore[arg-type]


def test_a_child_graph_is_refused_where_edges_are_not_told() -> None:
    driver = FakeGraphs()
    with pytest.raises(CaptureError, match="child graph") as caught:
        inline(driver, three(driver, driver.make(fills(2), ())))  # type: ignore[arg-type]
    assert caught.value.reason == "unsupported-node"


# -- numbers ------------------------------------------------------------------------------------------------------


class Session:
    """What the native session noted: address, bytes, nodes at the time, held."""

    def __init__(self, *births: int) -> None:
        self._births = births

    def pieces(self) -> list[tuple[int, int, int, bool]]:
        return [(A + 4096 * i, 64, born, i % 2 == 1) for i, born in enumerate(self._births)]


def session_memory(*births: int) -> SessionMemory:
    native: Any = SimpleNamespace(Session=lambda *_: Session(*births))
    arena: Any = SimpleNamespace(next=0, end=0, gap=0)
    return SessionMemory(native, arena, 0, 0)


def observed(*spans: Span) -> Observer:
    observer = Observer(lambda: 0)
    for span in spans:
        (observer.spans if span.end > span.begin else observer.silent).append(span)
    return observer


def test_numbers_of_nodes_become_those_of_launches() -> None:
    """Captured: fill, a child of three, fill, an empty child, fill."""
    driver = FakeGraphs()
    inside = [child(driver.make(fills(20, 21, 22), ())), child(driver.make([], ()))]
    graph = driver.make([memset(dst=1), inside[0], memset(dst=3), inside[1], memset(dst=5)], chain(5))
    names = [(0, 1, "a"), (1, 1, "silent"), (1, 3, "b"), (3, 4, "launches nothing"), (4, 5, "c"), (5, 5, "last")]
    observer = observed(*[Span(begin, end, name, (), (), number=i) for i, (begin, end, name) in enumerate(names)])
    memory = session_memory(0, 1, 2, 3, 4, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "edge_query", driver.edge_query)
        found = _inlined(driver, graph, observer, memory)  # type: ignore[arg-type]
    assert found.starts == (0, 1, 4, 5, 5, 6)
    assert [(s.begin, s.end, s.name, s.number) for s in observer.spans] == [
        (0, 1, "a", 0),
        (1, 5, "b", 2),
        (5, 6, "c", 4),
    ]
    assert [(s.begin, s.end, s.name) for s in observer.silent] == [
        (1, 1, "silent"),
        (6, 6, "last"),
        (5, 5, "launches nothing"),
    ]
    assert [a.born for a in memory.allocations(())] == [0, 1, 4, 5, 5, 6]
    assert memory.births() == [1, 5, 6]
    assert [span.name for span in observer.makers(4)] == ["b"]
    _, launches = read_nodes(driver, found.handles, found.kinds)  # type: ignore[arg-type]
    claimed = with_accesses(launches, observer.spans, memory.allocations(launches), ())
    assert [launch.call for launch in claimed] == ["a", "b", "b", "b", "b", "c"]


def test_an_operator_reaches_what_it_allocates_behind_a_child_graph() -> None:
    driver = FakeGraphs(layouts={8: [(0, 8)]})
    made = kernel(word(A), func=8)
    graph = driver.make([child(driver.make(fills(1, 2, 3), chain(3))), made], chain(2))
    observer = observed(Span(1, 2, "aten.relu.default", (A + 4096,), ()))
    memory = session_memory(1, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "edge_query", driver.edge_query)
        found = _inlined(driver, graph, observer, memory)  # type: ignore[arg-type]
    _, launches = read_nodes(driver, found.handles, found.kinds)  # type: ignore[arg-type]
    own = memory.allocations(launches)
    assert own[0] == Allocation(AllocationKind.POOL, 0, A, 64, 3)
    explained = with_accesses(launches, observer.spans, own, ())
    assert [launch.reach for launch in explained] == [None] * 3 + [{own[0].key, own[1].key}]


def test_without_child_graphs_numbers_stay() -> None:
    driver = FakeGraphs()
    observer, memory = observed(Span(0, 2, "a", (), ())), session_memory(0, 2)
    spans = list(observer.spans)
    found = _inlined(driver, driver.make(fills(1, 2), chain(2)), observer, memory)  # type: ignore[arg-type]
    assert found.starts == ()
    assert observer.spans == spans
    assert [a.born for a in memory.allocations(())] == [0, 2]


# -- what it costs ------------------------------------------------------------------------------------------------


def test_graphs_without_child_graphs_take_no_more_calls() -> None:
    count, driver = 5000, FakeGraphs()
    graph = driver.make(fills(*range(count)), chain(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "edge_query", driver.edge_query)
        found = inline(driver, graph)  # type: ignore[arg-type]
        ordered(driver, graph, found.handles)  # type: ignore[arg-type]
        read_nodes(driver, found.handles, found.kinds)  # type: ignore[arg-type]
    assert {name: calls for name, calls in driver.calls.items() if name.startswith("cuGraph")} == {
        "cuGraphGetNodes": 2,
        "cuGraphNodeGetType": count,
        "cuGraphMemsetNodeGetParams": count,
    }
