"""Which copies of a graph become kernels, where the graph's edges and the patches go then, and what stays."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.cuda import copies as copies_module
from pygraph.runtime.cuda import edges as edges_module
from pygraph.runtime.cuda import instantiate as instantiate_module
from pygraph.runtime.cuda.capture import CudaCapture
from pygraph.runtime.cuda.copies import SMALL, copies_as_kernels
from pygraph.runtime.cuda.edges import ordered
from pygraph.runtime.cuda.instantiate import make_region
from pygraph.runtime.cuda.nodes import CopyNode, GraphNode, KernelNode, kinds_of, read_nodes
from pygraph.runtime.cuda.parts import Part, _clone
from pygraph.runtime.cuda.patching import patchable
from pygraph.runtime.driver import Inert, Layout, Program, Slot
from pygraph.runtime.recording import Allocation, AllocationKind, Recording
from tests.runtime.branches import Branched, branched
from tests.runtime.cuda.fake import CUgraphNodeType, CUmemorytype, FakeGraphs, Node, child, kernel, memcpy, memset
from tests.runtime.cuda.test_children import inlined

KERNEL, COPY = CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
FUNCTION = 900
X, Y, SPACE = 0x6100_0000_0000, 0x6200_0000_0000, 1 << 20
"""Two arguments, and their bytes."""

INPUT = AllocationKind.INPUT
LAUNCH_ORDER = bytes((2, 0, 0))
PROGRAMMATIC = bytes((1, 0, 1))


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_functions", {})


class Device(FakeGraphs):
    """A driver with the package's kernel, which can clone graphs."""

    def __init__(self) -> None:
        super().__init__(layouts={FUNCTION: [(0, 8), (8, 8), (16, 8)], 7: [(0, 8)]})
        self.twins: dict[tuple[int, int], Node] = {}

    CUgraphExec = staticmethod(int)

    def cuGraphClone(self, graph: int) -> tuple[Any, ...]:
        _, clone = super().cuGraphClone(graph)
        self.members[clone] = []
        for node in self.members[graph]:
            self.members[clone].append(Node(self._number(), node.node))
            self.twins[int(node), clone] = self.members[clone][-1]
        self.arrows[clone] = {(int(self.twins[a, clone]), int(self.twins[b, clone])) for a, b in self.arrows[graph]}
        return (0, clone)

    def cuGraphNodeFindInClone(self, node: Node, clone: int) -> tuple[Any, ...]:
        return (0, self.twins[int(node), clone])

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        return (0, 5)


def copy(to: int = 0, source: int = 0, nbytes: int = 64, **changes: Any) -> SimpleNamespace:
    """A copy from the second argument to the first, to and from these bytes of them."""
    places = {"dstDevice": X, "dstXInBytes": to, "srcDevice": Y + source, "srcXInBytes": 0}
    return memcpy(**{**places, "WidthInBytes": nbytes, **changes})


def program_of(device: Device, handles: Sequence[Node], payload: Any = None) -> tuple[Program, list[GraphNode]]:
    """What is known of a graph: a slot for each word that lies in an argument."""
    nodes, launches = read_nodes(device, handles, kinds_of(device, handles))  # type: ignore[arg-type]
    allocations = (Allocation(INPUT, 0, X, SPACE), Allocation(INPUT, 1, Y, SPACE))
    recording = Recording(tuple(launches), allocations, (), payload)
    slots = [
        Slot(launch.index, word, INPUT, a.index, address - a.address)
        for launch in launches
        for word, address in enumerate(launch.words)
        for a in allocations
        if a.address <= address < a.address + a.nbytes
    ]
    return Program(recording, tuple(slots), Layout(0, {}, ()), tuple(range(len(launches))), {}), nodes


def exchanged(device: Device, graph: int, program: Program, nodes: Sequence[GraphNode]) -> tuple[GraphNode, ...]:
    """``copies_as_kernels``, with the edges of ``device``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "edge_query", device.edge_query)
        return copies_as_kernels(device, graph, program, nodes)  # type: ignore[arg-type]


def kinds(device: Device, graph: int) -> list[int]:
    return sorted(int(node.node.kind) for node in device.members[graph])


def replaced(*nodes: Any, slots: Iterable[int] | None = None, inert: Iterable[Inert] = ()) -> tuple[bool, ...]:
    """Which nodes of a chain become kernels; of the slots, those of words ``slots`` are kept."""
    device = Device()
    graph = device.make(nodes, pairwise(range(len(nodes))))
    program, found = program_of(device, device.members[graph])
    words = {0, 1} if slots is None else set(slots)
    kept = tuple(slot for slot in program.slots if slot.word in words)
    program = Program(program.recording, kept, program.layout, program.order, {}, tuple(inert))
    made = exchanged(device, graph, program, found)
    assert len(device.members[graph]) == len(nodes)
    return tuple(a != b for a, b in zip(made, found, strict=True))


# -- which ----------------------------------------------------------------------------------------------------------


def test_copies_up_to_a_size() -> None:
    sizes = (0, 1, 4096, SMALL - 1, SMALL, SMALL + 1, SMALL + 16, 1 << 18)
    found = replaced(*(copy(nbytes=nbytes) for nbytes in sizes))
    assert dict(zip(sizes, found, strict=True)) == {n: 0 < n <= 65536 for n in sizes}


def test_nothing_but_copies() -> None:
    empty = SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY)
    assert replaced(kernel(X.to_bytes(8, "little")), copy(), memset(dst=X), empty) == (False, True, False, False)


@pytest.mark.parametrize("words", [(), (0,), (1,)])
def test_a_copy_of_which_an_operand_is_not_patched_stays(words: tuple[int, ...]) -> None:
    """Where the other one lies, a constant for example, may be another device."""
    assert replaced(copy(), slots=words) == (False,)


def test_a_copy_with_a_word_that_is_no_operand_stays() -> None:
    assert replaced(copy(), slots=(0,), inert=(Inert(0, 1),)) == (False,)


def test_memory_that_is_of_this_device_by_its_address_alone() -> None:
    unified = CUmemorytype.CU_MEMORYTYPE_UNIFIED
    assert replaced(copy(srcMemoryType=unified, dstMemoryType=unified)) == (True,)


@pytest.mark.parametrize("data", [PROGRAMMATIC, LAUNCH_ORDER])
@pytest.mark.parametrize("edge", [(0, 1), (1, 2)])
def test_a_copy_with_an_edge_that_waits_for_less_stays(data: bytes, edge: tuple[int, int]) -> None:
    device = Device()
    graph = device.make([copy(), copy(), copy(), copy()], pairwise(range(4)))
    handles = [int(node) for node in device.members[graph]]
    device.marks[handles[edge[0]], handles[edge[1]]] = data
    before = set(device.arrows[graph])
    program, nodes = program_of(device, device.members[graph])
    made = exchanged(device, graph, program, nodes)
    assert {i for i in range(4) if made[i] == nodes[i]} == set(edge)
    names = dict(zip((node.handle for node in made), handles, strict=True))
    assert {(names[a], names[b]) for a, b in device.arrows[graph]} == before
    assert (handles[edge[0]], handles[edge[1]]) in device.arrows[graph], "the edge with data is the one that was there"


def test_without_edges_everything_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges_module, "edge_query", lambda: None)
    device = Device()
    graph = device.make([copy(), copy()], [(0, 1)])
    program, nodes = program_of(device, device.members[graph])
    assert copies_as_kernels(device, graph, program, nodes) == tuple(nodes)  # type: ignore[arg-type]
    assert kinds(device, graph) == [COPY, COPY]


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_driver_that_refuses_the_kernel(
    function: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies stay, which is said once, and the thread is left as it was."""
    asked: list[Any] = []

    def refuse(self: Device, *args: Any) -> tuple[Any, ...]:
        asked.append(args)
        return (218,)

    monkeypatch.setattr(Device, function, refuse)
    caplog.set_level(logging.DEBUG, "pygraph.cuda")
    monkeypatch.setattr(logging.getLogger("pygraph"), "propagate", True)
    for _ in range(2):
        device = Device()
        graph = device.make([copy(), copy()], [(0, 1)])
        program, nodes = program_of(device, device.members[graph])
        before = device.arrows[graph]
        assert exchanged(device, graph, program, nodes) == tuple(nodes)
        assert (kinds(device, graph), device.arrows[graph]) == ([COPY, COPY], before)
        assert device.mode == device.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert len(asked) == 1
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


def test_the_kernel_is_loaded_once() -> None:
    device = Device()
    for _ in range(3):
        graph = device.make([copy(), copy()], [(0, 1)])
        exchanged(device, graph, *program_of(device, device.members[graph]))
    assert (device.calls["cuModuleLoadData"], device.calls["cuModuleGetFunction"]) == (1, 1)
    assert device.mode == device.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_a_graph_without_small_copies_is_not_looked_at() -> None:
    device = Device()
    graph = device.make([copy(nbytes=SMALL + 1), memset(dst=X)], [(0, 1)])
    program, nodes = program_of(device, device.members[graph])
    before = dict(device.calls)
    assert exchanged(device, graph, program, nodes) == tuple(nodes)
    assert {name: n for name, n in device.calls.items() if n != before.get(name, 0)} == {}


# -- what it becomes ------------------------------------------------------------------------------------------------


def parameters(node: Node) -> list[int]:
    return [int.from_bytes(buffer.raw, "little") for buffer in node.node.buffers]


def test_the_kernel_does_what_the_copy_did() -> None:
    device = Device()
    graph = device.make([copy(48, 32, 100), copy(1, 4, 1000), copy(4, 12, 1025)], [(0, 1), (1, 2)])
    program, nodes = program_of(device, device.members[graph])
    made = exchanged(device, graph, program, nodes)
    found = [device.CUgraphNode(node.handle) for node in made]
    assert [parameters(node) for node in found] == [[X + 48, Y + 32, 100], [X + 1, Y + 4, 1000], [X + 4, Y + 12, 1025]]
    grids = [(node.node.params.gridDimX, node.node.params.blockDimX) for node in found]
    assert grids == [(1, 256), (4, 256), (2, 256)]
    for node, each in zip(made, found, strict=True):
        assert isinstance(node, KernelNode)
        assert node.blob == b"".join(word.to_bytes(8, "little") for word in parameters(each))
        (again,), (launch,) = read_nodes(device, [each], [KERNEL])  # type: ignore[arg-type]
        assert again == node, "as if it had been captured"
        assert launch.words == tuple(parameters(each))


@settings(deadline=None, max_examples=60)
@given(graph=branched(), chosen=st.sets(st.integers(0, 13)))
def test_edges_are_those_of_before(graph: Branched, chosen: set[int]) -> None:
    """With stages as before, in every graph, whichever nodes are small copies."""
    copies_module._functions.clear()
    device = Device()
    kinds_ = [copy() if i in chosen else memset(dst=X + i) for i in range(graph.count)]
    raw = device.make(kinds_, graph.edges)
    handles = list(device.members[raw])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "edge_query", device.edge_query)
        before = ordered(device, raw, handles)  # type: ignore[arg-type]
        made = copies_as_kernels(device, raw, *program_of(device, handles))  # type: ignore[arg-type]
        after = [device.CUgraphNode(node.handle) for node in made]
        assert ordered(device, raw, after) == before  # type: ignore[arg-type]
    place = {int(node): i for i, node in enumerate(after)}
    assert {(place[a], place[b]) for a, b in device.arrows[raw]} == graph.edges
    assert {place[int(node)] for node in device.members[raw]} == set(range(graph.count))
    assert {i for i, node in enumerate(after) if node.node.kind == KERNEL} == {i for i in chosen if i < graph.count}


def test_copies_of_child_graphs_are_replaced_too() -> None:
    device = Device()
    inner = device.make([copy(0, 0), copy(64, 64)], [(0, 1)])
    graph = device.make([memset(dst=X), child(inner), memset(dst=Y)], [(0, 1), (1, 2)])
    handles = inlined(device, graph).handles
    made = exchanged(device, graph, *program_of(device, handles))
    assert [type(node).__name__ for node in made] == ["FillNode", "KernelNode", "KernelNode", "FillNode"]
    place = {node.handle: i for i, node in enumerate(made)}
    assert {(place[a], place[b]) for a, b in device.arrows[graph]} == {(0, 1), (1, 2), (2, 3)}


def test_a_segment_has_the_new_nodes() -> None:
    device = Device()
    graph = device.make([copy(0, 0), copy(64, 64), copy(128, 128), memset(dst=X)], [(0, 1), (1, 2), (2, 3)])
    made = exchanged(device, graph, *program_of(device, device.members[graph]))
    part = _clone(cast(Any, device), graph, made, 1, 3)
    members = {int(node): node for node in device.members[part.graph]}
    assert list(part.handles) == [1, 2]
    assert [parameters(members[part.handles[i]]) for i in (1, 2)] == [[X + 64, Y + 64, 64], [X + 128, Y + 128, 64]]
    assert device.arrows[part.graph] == {(part.handles[1], part.handles[2])}


# -- as part of a region ----------------------------------------------------------------------------------------------


class Region:
    """Notes the nodes that it is told, and the places that are patched."""

    def __init__(self, *facts: Any) -> None:
        self.nodes: list[tuple[Any, ...]] = []
        self.patches: list[tuple[Any, ...]] = []
        self._sources = iter(range(100))

    def add_segment(self, *facts: Any) -> None:
        """Nothing is noted of it."""

    set_name = add_segment

    def add_piece(self, *facts: Any) -> int:
        return next(self._sources)

    add_tensor_argument = add_value_argument = add_piece

    def add_kernel(self, handle: int, blob: bytes, layout: list[tuple[int, int]], segment: int) -> int:
        self.nodes.append(("kernel", handle, blob, tuple(layout)))
        return len(self.nodes) - 1

    def add_copy(self, handle: int, segment: int) -> int:
        self.nodes.append(("copy", handle))
        return len(self.nodes) - 1

    def add_patch(self, *patch: int) -> None:
        self.patches.append(patch)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[list[GraphNode]]:
    """What would need a device is left out. The nodes of each graph whose copies were anchored, and that was split."""
    seen: list[list[GraphNode]] = []

    def anchor(driver: Any, program: Program, capture: CudaCapture) -> None:
        seen.append(list(capture.nodes))

    def split(driver: Any, graph: Any, nodes: Sequence[GraphNode], bounds: Sequence[tuple[int, int]]) -> list[Part]:
        seen.append(list(nodes))
        return [Part(0, 0, {i: node.handle for i, node in enumerate(nodes)})]

    monkeypatch.setattr(instantiate_module, "anchor_copies", anchor)
    monkeypatch.setattr(instantiate_module, "split", split)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return seen


def test_a_region_patches_the_words_of_the_kernel(
    on_device: list[list[GraphNode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what steps through the program later, on another capture of it, finds copies where that has them."""
    device = Device()
    monkeypatch.setattr(edges_module, "edge_query", device.edge_query)
    raw = device.make([copy(48, 32, 100), copy(0, 16, SMALL + 1)], [(0, 1)])
    graph = SimpleNamespace(raw_cuda_graph=lambda: raw)
    arguments = tuple(torch.empty(0, dtype=torch.uint8) for _ in range(2))
    payload = CudaCapture(cast(Any, graph), (), arguments, {}, 0, False, (), cast(Any, None))
    program, nodes = program_of(device, list(device.members[raw]), payload)
    payload.nodes = tuple(nodes)
    native = SimpleNamespace(OutputKind=None, CudaRegion=Region)
    machine = SimpleNamespace(driver=device, native=native)
    region = make_region(cast(Any, machine), program, payload)
    (small, large), told = on_device[0], on_device[1]
    assert isinstance(small, KernelNode)
    assert isinstance(large, CopyNode)
    assert told == [small, large]
    assert region.nodes == [("kernel", small.handle, small.blob, small.layout), ("copy", large.handle)]
    to, source = 1, 2  # sources: the segment's workspace comes first
    assert region.patches == [(0, 0, to, 48), (0, 8, source, 32), (1, 0, to, 0), (1, 1, source, 16)]
    assert payload.nodes == tuple(nodes)
    assert all(isinstance(node, CopyNode) for node in payload.nodes)


def test_a_step_writes_the_same_words() -> None:
    device = Device()
    graph = device.make([copy(48, 32, 100)], [])
    (node,) = exchanged(device, graph, *program_of(device, device.members[graph]))
    device.CUgraphNode(node.handle).node.params.ctx = 0
    patched = patchable(device, node, node.handle)
    patched.write(instantiate_module.byte_of(node, 0), X + 5)
    patched.write(instantiate_module.byte_of(node, 1), Y + 6)
    assert bytes(patched._blob) == b"".join(word.to_bytes(8, "little") for word in (X + 5, Y + 6, 100))  # type: ignore[union-attr]
