"""The nodes of a captured CUDA graph as launches: parameter words that may be addresses, and all that must not change.

A node's parameters belong to the node and die with its next update, so that everything is copied at once. Which
words are addresses is found elsewhere, by comparing two captures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.bindings import call, succeeded
from pygraph.runtime.recording import WORD, Launch, LaunchKind

__all__ = [
    "CopyNode",
    "EmptyNode",
    "FillNode",
    "GraphNode",
    "KernelNode",
    "handles",
    "kind_name",
    "kinds_of",
    "read_nodes",
]

_BUFFER_POINTER = 1
_BUFFER_SIZE = 2
"""Keys of a packed ``extra`` list: CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE."""

_PIECE = 4
"""Bytes of the largest piece that cannot be an address."""


@dataclass(frozen=True, slots=True)
class KernelNode:
    """A kernel. ``blob`` is its parameter buffer, ``layout`` the (offset, size) of each parameter in it, in bytes, and
    ``places`` the (offset, size) of each of the launch's words. An address fills a whole word; the pieces of
    parameters that do not fill one count as words of at most 4 bytes, since structs leave such bytes unset, and what
    then lies there differs from one capture to the next."""

    handle: int
    blob: bytes
    layout: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CopyNode:
    """A one-dimensional copy from device to device; its words are destination and source."""

    handle: int


@dataclass(frozen=True, slots=True)
class FillNode:
    """A one-dimensional fill; its word is the destination."""

    handle: int


@dataclass(frozen=True, slots=True)
class EmptyNode:
    """A node that does nothing: it only orders others."""

    handle: int


GraphNode = KernelNode | CopyNode | FillNode | EmptyNode


def read_nodes(driver: ModuleType, found: Sequence[Any], kinds: Sequence[Any]) -> tuple[list[GraphNode], list[Launch]]:
    """Every node of ``found``, which are those of a graph in the order of capture, and the launch that it is. ``kinds``
    are theirs.

    Raises CaptureError: ``unsupported-node`` for a kind of node that cannot be patched, by name; ``host-memcpy`` for a
    copy from or to host memory; ``unsupported-copy`` and ``unsupported-fill`` for ones of two dimensions.
    """
    reader = _Reader(driver)
    nodes: list[GraphNode] = []
    launches: list[Launch] = []
    for index, (handle, kind) in enumerate(zip(found, kinds, strict=True)):
        node, launch = reader.read(index, handle, kind)
        nodes.append(node)
        launches.append(launch)
    return nodes, launches


def handles(driver: ModuleType, graph: int) -> list[Any]:
    """The nodes of a graph in the order in which they were added to it."""
    raw = driver.CUgraph(graph)
    _, count = call(driver.cuGraphGetNodes, raw)
    return list(call(driver.cuGraphGetNodes, raw, count)[0]) if count else []


def kinds_of(driver: ModuleType, found: Sequence[Any]) -> list[Any]:
    """What each node is, as the driver numbers the kinds of nodes."""
    return [call(driver.cuGraphNodeGetType, handle) for handle in found]


def kind_name(kind: Any) -> str:
    """What a kind of node is called, such as ``host``."""
    return str(getattr(kind, "name", kind)).removeprefix("CU_GRAPH_NODE_TYPE_").lower()


class _Reader:
    """Reads nodes; what was asked about a function is remembered."""

    def __init__(self, driver: ModuleType) -> None:
        self._driver = driver
        kinds = driver.CUgraphNodeType
        self._kinds = {
            int(kinds.CU_GRAPH_NODE_TYPE_KERNEL): self._kernel,
            int(kinds.CU_GRAPH_NODE_TYPE_MEMCPY): self._copy,
            int(kinds.CU_GRAPH_NODE_TYPE_MEMSET): self._fill,
            int(kinds.CU_GRAPH_NODE_TYPE_EMPTY): self._empty,
        }
        self._functions: dict[int, tuple[str, tuple[tuple[int, int], ...]]] = {}

    def read(self, index: int, handle: Any, kind: Any) -> tuple[GraphNode, Launch]:
        reader = self._kinds.get(int(kind))
        if reader is None:
            said = f"launch {index} is a node of kind {kind_name(kind)}"
            raise CaptureError("unsupported-node", said, launch=index)
        return reader(index, handle)

    def _kernel(self, index: int, handle: Any) -> tuple[GraphNode, Launch]:
        params = call(self._driver.cuGraphKernelNodeGetParams, handle)
        identity, name, layout = self._function(params)
        blob = _parameters(params, layout, name)
        places = _split(layout)
        words = tuple(int.from_bytes(blob[place : place + size], "little") for place, size in places)
        shape = (
            (params.gridDimX, params.gridDimY, params.gridDimZ),
            (params.blockDimX, params.blockDimY, params.blockDimZ),
            params.sharedMemBytes,
        )
        signature = (identity, shape, layout)
        node = KernelNode(int(handle), blob, layout, places)
        return node, Launch(index, LaunchKind.KERNEL, name, words, signature)

    def _function(self, params: Any) -> tuple[int, str, tuple[tuple[int, int], ...]]:
        """The identity, name and parameter layout of a kernel node's function."""
        function = params.func
        if not int(function):
            function = call(self._driver.cuKernelGetFunction, params.kern)
        identity = int(function)
        known = self._functions.get(identity)
        if known is None:
            name = call(self._driver.cuFuncGetName, function).decode()
            known = self._functions[identity] = (name, self._layout(function))
        return (identity, *known)

    def _layout(self, function: Any) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        while True:
            result = self._driver.cuFuncGetParamInfo(function, len(found))
            if not succeeded(result):
                return tuple(found)
            found.append((int(result[1]), int(result[2])))

    def _copy(self, index: int, handle: Any) -> tuple[GraphNode, Launch]:
        params = call(self._driver.cuGraphMemcpyNodeGetParams, handle)
        kinds = self._driver.CUmemorytype
        on_device = {int(kinds.CU_MEMORYTYPE_DEVICE), int(kinds.CU_MEMORYTYPE_UNIFIED)}
        if int(params.srcMemoryType) not in on_device or int(params.dstMemoryType) not in on_device:
            raise CaptureError("host-memcpy", f"launch {index} copies from or to host memory", launch=index)
        shape = (int(params.WidthInBytes), int(params.Height), int(params.Depth))
        if shape[1:] != (1, 1):
            raise CaptureError("unsupported-copy", f"launch {index} copies {shape[1]} by {shape[2]} rows", launch=index)
        words = (
            int(params.dstDevice) + int(params.dstXInBytes),
            int(params.srcDevice) + int(params.srcXInBytes),
        )
        return CopyNode(int(handle)), Launch(index, LaunchKind.MEMCPY, "memcpy", words, shape)

    def _fill(self, index: int, handle: Any) -> tuple[GraphNode, Launch]:
        params = call(self._driver.cuGraphMemsetNodeGetParams, handle)
        if int(params.height) != 1:
            raise CaptureError("unsupported-fill", f"launch {index} fills {int(params.height)} rows", launch=index)
        signature = (int(params.value), int(params.elementSize), int(params.width))
        launch = Launch(index, LaunchKind.MEMSET, "memset", (int(params.dst),), signature)
        return FillNode(int(handle)), launch

    def _empty(self, index: int, handle: Any) -> tuple[GraphNode, Launch]:
        return EmptyNode(int(handle)), Launch(index, LaunchKind.OPERATOR, "empty", (), ())


def _parameters(params: Any, layout: Sequence[tuple[int, int]], name: str) -> bytes:
    """A copy of a kernel's parameter buffer, whichever way the node holds it."""
    size = max((offset + nbytes for offset, nbytes in layout), default=0)
    if not size:
        return b""
    if params.kernelParams:
        pointers = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        blob = bytearray(size)
        for index, (offset, nbytes) in enumerate(layout):
            blob[offset : offset + nbytes] = ctypes.string_at(pointers[index], nbytes)
        return bytes(blob)
    if not params.extra:
        raise CaptureError("unknown-parameters", f"{name} has no parameters to be read")
    return _packed(int(params.extra), size, name)


def _packed(extra: int, size: int, name: str) -> bytes:
    """Parameters packed in one buffer: a list of keys and values in any order, ended by a null key."""
    entries = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
    values: dict[int, int | None] = {}
    position = 0
    while entries[position]:
        values[int(entries[position] or 0)] = entries[position + 1]
        position += 2
    pointer, length = values.get(_BUFFER_POINTER), values.get(_BUFFER_SIZE)
    if not pointer:
        raise CaptureError("unknown-parameters", f"{name} has packed parameters without a buffer")
    held = ctypes.cast(length, ctypes.POINTER(ctypes.c_size_t))[0] if length else size
    return ctypes.string_at(pointer, min(held, size)).ljust(size, b"\0")


def _split(layout: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The (offset, size) of the words of the parameters: 8 bytes where they are aligned, the pieces between those.

    A word never crosses from one parameter into the next, and padding between parameters is nobody's.
    """
    places: list[tuple[int, int]] = []
    for offset, nbytes in layout:
        end = offset + nbytes
        while offset < end:
            whole = offset % WORD == 0 and end - offset >= WORD
            size = WORD if whole else min(_PIECE - offset % _PIECE, end - offset)
            places.append((offset, size))
            offset += size
    return tuple(places)
