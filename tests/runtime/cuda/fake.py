"""A stand-in for ``cuda.bindings.driver``: graphs made of plain objects, and address space that is only counted."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

__all__ = ["FakeDriver", "kernel", "memcpy", "memset", "packed_kernel"]

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
