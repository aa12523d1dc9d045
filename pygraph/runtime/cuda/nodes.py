"""The kinds of nodes of a captured CUDA graph: one class each, mirrored by one struct of ``nodes.h`` that patches it.

A class reads a node as a launch: its parameter words, which may be addresses, the memory that they use, and everything
that must not change. It prepares the node for patching, and names the struct that patches it::

    cuGraphKernelNodeGetParams ─ KernelNode.read ─ Launch(words, uses) ─ slots ─ KernelNode.native ─ struct KernelNode

A new kind is a class here, a struct in ``nodes.h``, its functions in ``driver_api.h``, and a ``LaunchKind``.

Addresses among the words are identified elsewhere, by comparing two captures. A node owns its parameters until its next
update, so everything is copied at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

from pygraph.errors import CaptureError
from pygraph.program.recording import WORD, Geometry, Launch, LaunchKind, Use
from pygraph.runtime.cuda.bindings import call, succeeded

__all__ = ["CopyNode", "EmptyNode", "EventNode", "FillNode", "KernelNode", "Node", "handles", "read_nodes"]

_BUFFER_POINTER = 1
_BUFFER_SIZE = 2
"""Keys of a packed ``extra`` list: CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE."""

_CODE = ("NUM_REGS", "SHARED_SIZE_BYTES", "CONST_SIZE_BYTES", "LOCAL_SIZE_BYTES", "PTX_VERSION", "BINARY_VERSION")
"""Attributes of a function, ``CU_FUNC_ATTRIBUTE_…``, that follow from its code."""

_FORMATS = {WORD: "Q", 4: "I", 2: "H", 1: "B"}
"""``struct`` formats of numbers, by size in bytes: only the largest may be an address."""


class Reader:
    """Driver access for reading nodes. Caches each kernel's name and parameter layout."""

    def __init__(self, driver: ModuleType) -> None:
        self.driver = driver
        self._functions: dict[int, Function] = {}

    def function(self, params: Any) -> Function:
        """The function of a kernel node."""
        function = params.func
        if not int(function):
            function = call(self.driver.cuKernelGetFunction, params.kern)
        identity = int(function)
        if identity not in self._functions:
            layout: list[tuple[int, int]] = []
            while succeeded(result := self.driver.cuFuncGetParamInfo(function, len(layout))):
                layout.append((int(result[1]), int(result[2])))
            attributes = self.driver.CUfunction_attribute
            wanted = (getattr(attributes, f"CU_FUNC_ATTRIBUTE_{name}") for name in _CODE)
            code = tuple(int(call(self.driver.cuFuncGetAttribute, each, function)) for each in wanted)
            name = call(self.driver.cuFuncGetName, function).decode()
            self._functions[identity] = Function(identity, name, tuple(layout), code)
        return self._functions[identity]


@dataclass(frozen=True)
class Function:
    """A kernel's function, as the driver knows it.

    Args:
        identity: handle
        name: symbol
        layout: (offset, size) of each parameter, in bytes
        attributes: the driver's attributes of its code; run-time compilation may load one kernel many times
    """

    identity: int
    name: str
    layout: tuple[tuple[int, int], ...]
    attributes: tuple[int, ...]

    @cached_property
    def code(self) -> str:
        """Hash of layout and attributes: equal in all processes that load the same code."""
        return hashlib.sha256(repr((self.layout, self.attributes)).encode()).hexdigest()

    @cached_property
    def size(self) -> int:
        """Bytes of its parameters, including padding between them."""
        return max((offset + nbytes for offset, nbytes in self.layout), default=0)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The (offset, size) of the words of its parameters: aligned pieces of 8 bytes, and 4, 2 or 1 for the rest.

        A word never crosses from one parameter into the next, and padding between parameters belongs to no word.
        """
        places: list[tuple[int, int]] = []
        for offset, nbytes in self.layout:
            end = offset + nbytes
            while offset < end:
                size = next(size for size in _FORMATS if offset % size == 0 and size <= end - offset)
                places.append((offset, size))
                offset += size
        return tuple(places)

    @cached_property
    def _numbers(self) -> struct.Struct:
        """Format of the words in a buffer of its parameters."""
        text, end = "<", 0
        for offset, size in self.places:
            text += f"{offset - end}x{_FORMATS[size]}"
            end = offset + size
        return struct.Struct(text)

    def words(self, blob: bytes) -> tuple[int, ...]:
        """The words in ``blob``, its parameters in one buffer."""
        return self._numbers.unpack(blob)


@dataclass(frozen=True, slots=True)
class Node(ABC):
    """A node of a captured graph. Its copies in clones of the graph have other handles."""

    handle: int

    @classmethod
    @abstractmethod
    def read(cls, reader: Reader, index: int, handle: Any) -> tuple[Node, Launch]:
        """Node ``handle``, and its launch, number ``index``. Raises CaptureError if the node cannot be patched."""

    @abstractmethod
    def native(self, module: Any, handle: int, segment: int) -> Any:
        """The native ``module``'s patcher for node ``handle`` of ``segment``, a copy of this node."""

    @abstractmethod
    def add_to(self, driver: ModuleType, graph: Any, context: Any) -> int:
        """Add a copy of this node to another ``graph``, without edges. Returns its handle."""

    def place(self, word: int) -> int:
        """Where the native struct writes word ``word``: an operand's number, or a byte of a kernel's parameters."""
        return word


@dataclass(frozen=True, slots=True)
class KernelNode(Node):
    """A kernel. ``blob`` is its parameter buffer, ``layout`` the (offset, size) of each parameter in it, in bytes, and
    ``places`` the (offset, size) of each of the launch's words. An address fills a whole word; parts of
    parameters that do not fill one are words of at most 4 bytes, as structs may leave such bytes unset, with contents
    that differ between captures. The memory that the kernel uses is unknown."""

    blob: bytes
    layout: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, reader: Reader, index: int, handle: Any) -> tuple[KernelNode, Launch]:
        params = call(reader.driver.cuGraphKernelNodeGetParams, handle)
        function = reader.function(params)
        blob = _parameters(params, function)
        geometry = Geometry(
            (int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ)),
            (int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ)),
            int(params.sharedMemBytes),
        )
        known = (LaunchKind.KERNEL, function.name, function.words(blob), (function.identity, function.layout))
        launch = Launch(index, *known, geometry=geometry, code=(function.code, geometry.block))
        return cls(int(handle), blob, function.layout, function.places), launch

    def native(self, module: Any, handle: int, segment: int) -> Any:
        return module.KernelNode(handle, segment, self.blob, list(self.layout))

    def add_to(self, driver: ModuleType, graph: Any, context: Any) -> int:  # noqa: ARG002
        own = driver.CUgraphNode(self.handle)
        made = call(driver.cuGraphAddKernelNode, graph, None, 0, call(driver.cuGraphKernelNodeGetParams, own))
        call(driver.cuGraphKernelNodeCopyAttributes, made, own)
        return int(made)

    def place(self, word: int) -> int:
        place, size = self.places[word]
        if size != WORD:
            raise CaptureError("invalid-program", f"an address in {size} bytes")
        return place

    @staticmethod
    def hurry(driver: ModuleType, handle: int) -> None:
        """Give the kernel of node ``handle`` the highest priority: it starts before others that are ready as well."""
        value = driver.CUkernelNodeAttrValue()
        _, value.priority = call(driver.cuCtxGetStreamPriorityRange)
        priority = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
        call(driver.cuGraphKernelNodeSetAttribute, driver.CUgraphNode(handle), priority, value)

    def with_word(self, word: int, value: int) -> KernelNode:
        """This node with another value for a word; the node's first patch sets it."""
        place = self.place(word)
        blob = self.blob[:place] + value.to_bytes(WORD, "little") + self.blob[place + WORD :]
        return replace(self, blob=blob)


@dataclass(frozen=True, slots=True)
class CopyNode(Node):
    """A one-dimensional copy of ``nbytes`` from device to device; its words are destination and source."""

    nbytes: int

    @classmethod
    def read(cls, reader: Reader, index: int, handle: Any) -> tuple[CopyNode, Launch]:
        params = call(reader.driver.cuGraphMemcpyNodeGetParams, handle)
        kinds = reader.driver.CUmemorytype
        on_device = {int(kinds.CU_MEMORYTYPE_DEVICE), int(kinds.CU_MEMORYTYPE_UNIFIED)}
        if int(params.srcMemoryType) not in on_device or int(params.dstMemoryType) not in on_device:
            raise CaptureError("host-memcpy", f"launch {index} copies from or to host memory", launch=index)
        nbytes, rows = int(params.WidthInBytes), (int(params.Height), int(params.Depth))
        if rows != (1, 1):
            raise CaptureError("unsupported-copy", f"launch {index} copies {rows[0]} by {rows[1]} rows", launch=index)
        words = (
            int(params.dstDevice) + int(params.dstXInBytes),
            int(params.srcDevice) + int(params.srcXInBytes),
        )
        uses = (Use(0, 0, nbytes, reads=False, writes=True), Use(1, 0, nbytes, reads=True, writes=False))
        return cls(int(handle), nbytes), Launch(index, LaunchKind.MEMCPY, "memcpy", words, nbytes, uses)

    def native(self, module: Any, handle: int, segment: int) -> Any:
        return module.CopyNode(handle, segment)

    def add_to(self, driver: ModuleType, graph: Any, context: Any) -> int:
        params = call(driver.cuGraphMemcpyNodeGetParams, driver.CUgraphNode(self.handle))
        return int(call(driver.cuGraphAddMemcpyNode, graph, None, 0, params, context))

    def anchor(self, driver: ModuleType, words: Collection[int], memory: Sequence[int]) -> None:
        """Point ``words``, which will be patched later, at ``memory`` (an address for each operand): an instantiated
        copy accepts only addresses of the kind of memory that it was made with."""
        node = driver.CUgraphNode(self.handle)
        params = call(driver.cuGraphMemcpyNodeGetParams, node)
        if 0 in words:
            params.dstDevice, params.dstXInBytes = driver.CUdeviceptr(memory[0]), 0
        if 1 in words:
            params.srcDevice, params.srcXInBytes = driver.CUdeviceptr(memory[1]), 0
        call(driver.cuGraphMemcpyNodeSetParams, node, params)


@dataclass(frozen=True, slots=True)
class FillNode(Node):
    """A one-dimensional fill; its word is the destination."""

    @classmethod
    def read(cls, reader: Reader, index: int, handle: Any) -> tuple[FillNode, Launch]:
        params = call(reader.driver.cuGraphMemsetNodeGetParams, handle)
        if int(params.height) != 1:
            raise CaptureError("unsupported-fill", f"launch {index} fills {int(params.height)} rows", launch=index)
        signature = (int(params.value), int(params.elementSize), int(params.width))
        uses = (Use(0, 0, signature[1] * signature[2], reads=False, writes=True),)
        return cls(int(handle)), Launch(index, LaunchKind.MEMSET, "memset", (int(params.dst),), signature, uses)

    def native(self, module: Any, handle: int, segment: int) -> Any:
        return module.FillNode(handle, segment)

    def add_to(self, driver: ModuleType, graph: Any, context: Any) -> int:
        params = call(driver.cuGraphMemsetNodeGetParams, driver.CUgraphNode(self.handle))
        return int(call(driver.cuGraphAddMemsetNode, graph, None, 0, params, context))


@dataclass(frozen=True, slots=True)
class EmptyNode(Node):
    """A node that does nothing but order others."""

    @classmethod
    def read(cls, reader: Reader, index: int, handle: Any) -> tuple[EmptyNode, Launch]:  # noqa: ARG003
        return cls(int(handle)), Launch(index, LaunchKind.OPERATOR, "empty", (), (), ())

    def native(self, module: Any, handle: int, segment: int) -> Any:  # noqa: ARG002
        raise CaptureError("invalid-program", "a slot in a node without parameters")

    def add_to(self, driver: ModuleType, graph: Any, context: Any) -> int:  # noqa: ARG002
        return int(call(driver.cuGraphAddEmptyNode, graph, None, 0))


@dataclass(frozen=True, slots=True)
class EventNode(EmptyNode):
    """A node that ``records`` an ``event`` of a library, or waits for it. With such events, NCCL makes a captured
    collective wait for earlier ones on the same communicator."""

    event: int
    records: bool

    @classmethod
    def read(cls, reader: Reader, index: int, handle: Any) -> tuple[EventNode, Launch]:
        kinds = reader.driver.CUgraphNodeType
        records = call(reader.driver.cuGraphNodeGetType, handle) == kinds.CU_GRAPH_NODE_TYPE_EVENT_RECORD
        get = reader.driver.cuGraphEventRecordNodeGetEvent if records else reader.driver.cuGraphEventWaitNodeGetEvent
        event = int(call(get, handle))
        name = "event record" if records else "event wait"
        return cls(int(handle), event, records), Launch(index, LaunchKind.OPERATOR, name, (), (event,), ())

    def add_to(self, driver: ModuleType, graph: Any, context: Any) -> int:  # noqa: ARG002
        raise CaptureError("host-loop", "a body waits for an event")


_KINDS: dict[str, type[Node]] = {
    "KERNEL": KernelNode,
    "MEMCPY": CopyNode,
    "MEMSET": FillNode,
    "EMPTY": EmptyNode,
    "EVENT_RECORD": EventNode,
    "WAIT_EVENT": EventNode,
}
"""Classes of nodes by the driver's name, ``CU_GRAPH_NODE_TYPE_…``. Any other kind is refused."""


def handles(driver: ModuleType, graph: int) -> list[Any]:
    """The nodes of a graph in the order in which they were added to it."""
    raw = driver.CUgraph(graph)
    _, count = call(driver.cuGraphGetNodes, raw)
    return list(call(driver.cuGraphGetNodes, raw, count)[0]) if count else []


def read_nodes(
    driver: ModuleType, found: Sequence[Any], *, collectives: bool = False
) -> tuple[list[Node], list[Launch]]:
    """Nodes and launches for the handles ``found``, all nodes of a graph in the order of capture. Events are accepted
    if ``collectives`` were captured: the events of a communicator live as long as it does.

    Raises CaptureError: ``unsupported-node`` for a kind of node that cannot be patched; ``host-memcpy`` for a copy from
    or to host memory; ``unsupported-copy`` and ``unsupported-fill`` for copies and fills of two dimensions.
    """
    reader = Reader(driver)
    nodes: list[Node] = []
    launches: list[Launch] = []
    for index, handle in enumerate(found):
        number = call(driver.cuGraphNodeGetType, handle)
        name = str(getattr(number, "name", number)).removeprefix("CU_GRAPH_NODE_TYPE_")
        if name not in _KINDS or (_KINDS[name] is EventNode and not collectives):
            raise CaptureError("unsupported-node", f"launch {index} is a node of kind {name.lower()}", launch=index)
        node, launch = _KINDS[name].read(reader, index, handle)
        nodes.append(node)
        launches.append(launch)
    return nodes, launches


def _parameters(params: Any, function: Function) -> bytes:
    """A copy of a kernel's parameters, in either form in which a node holds them."""
    size = function.size
    if not size:
        return b""
    if params.kernelParams:
        pointers = (ctypes.c_void_p * len(function.layout)).from_address(int(params.kernelParams))
        blob = bytearray(size)
        for pointer, (offset, nbytes) in zip(pointers, function.layout, strict=True):
            blob[offset : offset + nbytes] = ctypes.string_at(pointer, nbytes)
        return bytes(blob)
    if not params.extra:
        raise CaptureError("unknown-parameters", f"{function.name} has no parameters to be read")
    return _packed(int(params.extra), size, function.name)


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
