"""A stand-in for ``cuda.bindings.driver``: graphs made of plain objects, and address space that is only counted."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

__all__ = ["FakeDriver", "FakeGraphs", "child", "kernel", "memcpy", "memset", "packed_kernel"]

A, B = 0x7F00_0000_1000, 0x7F00_0000_2000
OK = (0,)
INVALID = (1,)


class CUgraphNodeType(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13


class CUmemorytype(IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2
    CU_MEMORYTYPE_ARRAY = 3
    CU_MEMORYTYPE_UNIFIED = 4


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class CUpointer_attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11
    CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12


def shape(**changes: Any) -> dict[str, Any]:
    facts = dict.fromkeys(("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"), 1)
    return {**facts, "sharedMemBytes": 0, "func": 7, "kern": 0, "kernelParams": 0, "extra": 0, **changes}


def kernel(*params: bytes, **changes: Any) -> SimpleNamespace:
    """A kernel node that holds a pointer to each of its parameters."""
    buffers = [ctypes.create_string_buffer(p, len(p)) for p in params]
    pointers = (ctypes.c_void_p * max(len(buffers), 1))(*(ctypes.addressof(b) for b in buffers))
    facts = shape(**{"kernelParams": ctypes.addressof(pointers), **changes})
    return SimpleNamespace(
        kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL,
        params=SimpleNamespace(**facts),
        buffers=buffers,
        held=pointers,
    )


def packed_kernel(blob: bytes, *, size_first: bool, **changes: Any) -> SimpleNamespace:
    """A kernel node whose parameters are packed in one buffer, described by keys in either order."""
    buffer = ctypes.create_string_buffer(blob, len(blob))
    size = ctypes.c_size_t(len(blob))
    pairs = [(1, ctypes.addressof(buffer)), (2, ctypes.addressof(size))]
    flat = [value for pair in (reversed(pairs) if size_first else pairs) for value in pair]
    extra = (ctypes.c_void_p * 5)(*flat, None)
    facts = shape(extra=ctypes.addressof(extra), **changes)
    return SimpleNamespace(
        kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL,
        params=SimpleNamespace(**facts),
        buffers=[buffer],
        held=(size, extra),
    )


def memcpy(**changes: Any) -> SimpleNamespace:
    device = CUmemorytype.CU_MEMORYTYPE_DEVICE
    facts = {
        "srcMemoryType": device,
        "dstMemoryType": device,
        "srcDevice": A,
        "dstDevice": B,
        "srcXInBytes": 0,
        "dstXInBytes": 16,
        "WidthInBytes": 64,
        "Height": 1,
        "Depth": 1,
        **changes,
    }
    return SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY, params=SimpleNamespace(**facts))


def memset(**changes: Any) -> SimpleNamespace:
    facts = {"dst": A, "value": 0, "elementSize": 4, "width": 10, "height": 1, "pitch": 0, **changes}
    return SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET, params=SimpleNamespace(**facts))


def child(graph: int) -> SimpleNamespace:
    """A child graph node that holds ``graph``."""
    return SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH, graph=graph)


class Node:
    """A handle: a number for ``int``, and the object behind it."""

    def __init__(self, number: int, node: Any) -> None:
        self.number, self.node = number, node

    def __int__(self) -> int:
        return self.number


class FakeDriver:
    """The functions that the CUDA driver uses, over ``nodes`` and the parameter ``layouts`` of functions by number."""

    CUgraphNodeType = CUgraphNodeType
    CUmemorytype = CUmemorytype
    CUpointer_attribute = CUpointer_attribute
    CUstreamCaptureMode = CUstreamCaptureMode
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace
    CUgraph = CUdeviceptr = staticmethod(int)
    CUgraphEdgeData = SimpleNamespace

    def __init__(self, *nodes: Any, layouts: dict[int, list[tuple[int, int]]] | None = None) -> None:
        self.nodes = [Node(100 + i, node) for i, node in enumerate(nodes)]
        self.edges = {(i, i + 1) for i in range(len(nodes) - 1)}
        self.data: dict[tuple[int, int], bytes] = {}
        self.layouts = layouts or {}
        self.live: set[range] = set()

    def index(self, handle: Any) -> int:
        return int(handle) - 100

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        return (0, self.nodes[:count], len(self.nodes))

    def cuGraphNodeGetType(self, node: Node) -> tuple[Any, ...]:
        return (0, node.node.kind)

    def cuGraphKernelNodeGetParams(self, node: Node) -> tuple[Any, ...]:
        return (0, node.node.params)

    cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = cuGraphKernelNodeGetParams

    def cuKernelGetFunction(self, kern: int) -> tuple[Any, ...]:
        return (0, kern)

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:
        return (0, f"kernel_{function}".encode())

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[Any, ...]:
        layout = self.layouts.get(int(function), [])
        return (0, *layout[index]) if index < len(layout) else INVALID

    def cuGraphNodeGetDependencies(self, node: Node, count: int = 0) -> tuple[Any, ...]:
        before = [self.nodes[a] for a, b in sorted(self.edges) if b == self.index(node)]
        return (0, before[:count], [], len(before))

    def cuGraphAddDependencies(
        self, graph: int, earlier: list[Node], later: list[Node], data: Any, count: int
    ) -> tuple[Any, ...]:
        self.edges.update(zip(map(self.index, earlier), map(self.index, later), strict=True))
        return OK

    def edge_query(self) -> Any:
        """``cuGraphGetEdges`` of C, with ``data`` for the edges that have any."""

        def answer(graph: int, earlier: int | None, later: int | None, data: int | None, count: Any) -> int:
            edges = sorted(self.edges)
            if earlier and later and data:
                for i, (a, b) in enumerate(edges[: count[0]]):
                    ctypes.c_void_p.from_address(earlier + 8 * i).value = 100 + a
                    ctypes.c_void_p.from_address(later + 8 * i).value = 100 + b
                    ctypes.memmove(data + 8 * i, self.data.get((a, b), b"").ljust(8, b"\0"), 8)
            count[0] = len(edges)
            return 0

        pointers = [ctypes.c_void_p] * 4
        return ctypes.CFUNCTYPE(ctypes.c_int, *pointers, ctypes.POINTER(ctypes.c_size_t))(answer)

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[Any, ...]:
        live = next((live for live in self.live if address in live), None)
        if live is None:
            return INVALID
        kinds = CUpointer_attribute
        answers = {
            kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: CUmemorytype.CU_MEMORYTYPE_DEVICE,
            kinds.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: live.start,
            kinds.CU_POINTER_ATTRIBUTE_RANGE_SIZE: len(live),
        }
        return (0, answers[kinds(attribute)])


class FakeGraphs(FakeDriver):
    """Several graphs, some of them inside of nodes of others. Handles are numbers that no two nodes share; a node that
    is destroyed takes its parameters and the graph inside of it along."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        self.members: dict[int, list[Node]] = {}
        self.arrows: dict[int, set[tuple[int, int]]] = {}
        self.marks: dict[tuple[int, int], bytes] = {}
        self.clones: set[int] = set()
        self.calls: Counter[str] = Counter()
        self.mode = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self._made = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            self.calls[name] += 1
        return super().__getattribute__(name)

    def make(self, nodes: Sequence[Any], edges: Iterable[tuple[int, int]], listed: Sequence[int] = ()) -> int:
        """A new graph of ``nodes``, with ``edges`` between their numbers, listed in the order ``listed``."""
        graph = self._number()
        made = [Node(self._number(), node) for node in nodes]
        self.members[graph] = [made[i] for i in listed or range(len(made))]
        self.arrows[graph] = {(int(made[a]), int(made[b])) for a, b in edges}
        return graph

    def _number(self) -> int:
        self._made += 1
        return 1000 + self._made

    def _owner(self, *nodes: Node) -> int:
        (graph,) = {graph for graph, held in self.members.items() for node in nodes if node in held}
        assert all(node in self.members[graph] for node in nodes)
        return graph

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        return (0, self.members[graph][:count], len(self.members[graph]))

    def CUgraphNode(self, handle: Any) -> Node:
        (found,) = [node for held in self.members.values() for node in held if int(node) == int(handle)]
        return found

    def cuGraphNodeGetDependencies(self, node: Node, count: int = 0) -> tuple[Any, ...]:
        graph = self._owner(node)
        before = [other for other in self.members[graph] if (int(other), int(node)) in self.arrows[graph]]
        return (0, before[:count], [], len(before))

    def cuGraphAddDependencies(
        self, graph: int, earlier: list[Node], later: list[Node], data: Any, count: int
    ) -> tuple[Any, ...]:
        pairs = {(int(a), int(b)) for a, b in zip(earlier, later, strict=True)}
        if pairs & self.arrows[graph] or self._owner(*earlier, *later) != graph:
            return INVALID
        self.arrows[graph] |= pairs
        return OK

    def edge_query(self) -> Any:
        def answer(graph: int, earlier: int | None, later: int | None, data: int | None, count: Any) -> int:
            edges = sorted(self.arrows[graph])
            if earlier and later and data:
                for i, (a, b) in enumerate(edges[: count[0]]):
                    ctypes.c_void_p.from_address(earlier + 8 * i).value = a
                    ctypes.c_void_p.from_address(later + 8 * i).value = b
                    ctypes.memmove(data + 8 * i, self.marks.get((a, b), b"").ljust(8, b"\0"), 8)
            count[0] = len(edges)
            return 0

        pointers = [ctypes.c_void_p] * 4
        return ctypes.CFUNCTYPE(ctypes.c_int, *pointers, ctypes.POINTER(ctypes.c_size_t))(answer)

    # -- graphs inside of nodes -------------------------------------------------------------------------------------

    def cuGraphChildGraphNodeGetGraph(self, node: Node) -> tuple[Any, ...]:
        return (0, node.node.graph)

    def cuGraphClone(self, graph: int) -> tuple[Any, ...]:
        assert graph in self.members
        clone = self._number()
        self.clones.add(clone)
        return (0, clone)

    def cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        self.clones.remove(graph)
        return OK

    def cuGraphDestroyNode(self, node: Node) -> tuple[Any, ...]:
        graph = self._owner(node)
        self.members[graph].remove(node)
        self.arrows[graph] = {pair for pair in self.arrows[graph] if int(node) not in pair}
        inside = getattr(node.node, "graph", None)
        if inside is not None:
            for other in list(self.members[inside]):
                self.cuGraphDestroyNode(other)
            del self.members[inside], self.arrows[inside]
        vars(getattr(node.node, "params", SimpleNamespace())).clear()
        for buffer in getattr(node.node, "buffers", ()):
            ctypes.memset(buffer, 0xDD, len(buffer))
        node.node = None
        return OK

    # -- new nodes --------------------------------------------------------------------------------------------------

    def _add(self, graph: int, dependencies: list[Node], count: int, kind: CUgraphNodeType, params: Any) -> Any:
        assert (dependencies, count) == ([], 0)
        return self._own(graph, SimpleNamespace(kind=kind, params=SimpleNamespace(**vars(params))))

    def _own(self, graph: int, node: Any) -> Any:
        self.members[graph].append(Node(self._number(), node))
        return (0, self.members[graph][-1])

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return (0, 77)

    def cuGraphAddKernelNode(self, graph: int, dependencies: Any, count: int, params: Any) -> Any:
        """Holds a copy of each parameter, wherever it was."""
        assert (dependencies, count) == ([], 0)
        facts = {**vars(params)}
        start, layout = facts.pop("kernelParams"), self.layouts[params.func]
        if start:
            places = [ctypes.c_void_p.from_address(start + 8 * i).value or 0 for i in range(len(layout))]
        else:
            first = ctypes.c_void_p.from_address(facts.pop("extra") + 8).value or 0  # the pointer comes first here
            places = [first + offset for offset, _ in layout]
        copies = [ctypes.string_at(place, nbytes) for place, (_, nbytes) in zip(places, layout, strict=True)]
        return self._own(graph, kernel(*copies, **facts))

    def cuGraphKernelNodeCopyAttributes(self, to: Node, source: Node) -> tuple[Any, ...]:
        to.node.attributes = source.node.attributes
        return OK

    def cuGraphAddMemcpyNode(self, graph: int, dependencies: Any, count: int, params: Any, context: int) -> Any:
        assert context == 77
        return self._add(graph, dependencies, count, CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY, params)

    def cuGraphAddMemsetNode(self, graph: int, dependencies: Any, count: int, params: Any, context: int) -> Any:
        assert context == 77
        return self._add(graph, dependencies, count, CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET, params)

    def cuGraphAddEmptyNode(self, graph: int, dependencies: Any, count: int) -> Any:
        return self._add(graph, dependencies, count, CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY, SimpleNamespace())

    # -- code -------------------------------------------------------------------------------------------------------

    def cuThreadExchangeStreamCaptureMode(self, mode: CUstreamCaptureMode) -> tuple[Any, ...]:
        before, self.mode = self.mode, mode
        return (0, before)

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        assert self.mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert image.endswith(b"\0")
        return (0, image)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        """Function 900 is the only one of a module."""
        return (0, 900) if b".visible .entry " + name + b"(" in module else INVALID
