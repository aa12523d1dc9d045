"""Nodes of captured graphs read as launches: every way of holding parameters, every kind refused by name."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings.driver import CUgraphNodeType, CUmemorytype

from pygraph.errors import CaptureError
from pygraph.program.recording import Geometry, Launch, LaunchKind
from pygraph.runtime.cuda.nodes import (
    _CODE,
    CopyNode,
    EventNode,
    FillNode,
    Function,
    KernelNode,
    Node,
    read_nodes,
)
from tests.runtime.captures import reads, writes

A, B = 0x7F00_0000_1000, 0x7F00_0000_2000

KINDS = {kind.name.removeprefix("CU_GRAPH_NODE_TYPE_"): kind for kind in CUgraphNodeType}


def node(kind: str, **params: Any) -> SimpleNamespace:
    return SimpleNamespace(kind=KINDS[kind], params=SimpleNamespace(**params))


def kernel(*params: bytes, packed: tuple[int, ...] = (), **changes: Any) -> SimpleNamespace:
    """A kernel that holds a pointer to each of its parameters, or all of them in one buffer, of which pointer (1) and
    size (2) are given in the order ``packed``."""
    facts = dict.fromkeys(("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"), 1)
    blobs = [b"".join(params)] if packed else params
    buffers = [ctypes.create_string_buffer(blob, len(blob)) for blob in blobs]
    pointers, extra, size = (
        [ctypes.addressof(b) for b in buffers],
        list[int](),
        ctypes.c_size_t(len(blobs[0]) if blobs else 0),
    )
    for key in packed:
        extra += [key, pointers[0] if key == 1 else ctypes.addressof(size)]
    held = (ctypes.c_void_p * (len(pointers) + len(extra) + 1))(*(extra or pointers), None)
    where = {"kernelParams": 0 if packed else ctypes.addressof(held), "extra": ctypes.addressof(held) if packed else 0}
    made = node("KERNEL", **{**facts, "sharedMemBytes": 0, "func": 7, "kern": 0, **where, **changes})
    made.kept = (buffers, size, held)
    return made


def memcpy(**changes: Any) -> SimpleNamespace:
    device = CUmemorytype.CU_MEMORYTYPE_DEVICE
    places = {"srcDevice": A, "dstDevice": B, "srcXInBytes": 0, "dstXInBytes": 16}
    shape = {"WidthInBytes": 64, "Height": 1, "Depth": 1}
    return node("MEMCPY", **{"srcMemoryType": device, "dstMemoryType": device, **places, **shape, **changes})


def memset(**changes: Any) -> SimpleNamespace:
    return node("MEMSET", **{"dst": A, "value": 0, "elementSize": 4, "width": 10, "height": 1, **changes})


class Handle:
    """A number for ``int``, and the node behind it."""

    def __init__(self, node: SimpleNamespace) -> None:
        self.kind, self.params = node.kind, node.params

    def __int__(self) -> int:
        return 100


class Driver:
    """A stand-in for ``cuda.bindings.driver``, over plain objects and the parameter ``layouts`` of functions."""

    CUmemorytype = CUmemorytype
    CUgraphNodeType = CUgraphNodeType

    def __init__(self, layouts: dict[int, list[tuple[int, int]]]) -> None:
        self._layouts = layouts

    def cuGraphNodeGetType(self, handle: Handle) -> tuple[Any, ...]:
        return (0, handle.kind)

    def cuGraphKernelNodeGetParams(self, handle: Handle) -> tuple[Any, ...]:
        return (0, handle.params)

    cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = cuGraphKernelNodeGetParams

    def cuGraphEventRecordNodeGetEvent(self, handle: Handle) -> tuple[Any, ...]:
        return (0, handle.params.recorded)

    def cuGraphEventWaitNodeGetEvent(self, handle: Handle) -> tuple[Any, ...]:
        return (0, handle.params.waited)

    def cuKernelGetFunction(self, kern: int) -> tuple[Any, ...]:
        return (0, kern)

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:
        return (0, f"kernel_{function}".encode())

    CUfunction_attribute = SimpleNamespace(**{f"CU_FUNC_ATTRIBUTE_{name}": name for name in _CODE})

    def cuFuncGetAttribute(self, attribute: str, function: int) -> tuple[Any, ...]:
        return (0, len(attribute) + function)

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[Any, ...]:
        layout = self._layouts[function]
        return (0, *layout[index]) if index < len(layout) else (1,)


def read(
    *nodes: SimpleNamespace, layouts: dict[int, list[tuple[int, int]]], **options: bool
) -> tuple[list[Node], list[Launch]]:
    return read_nodes(Driver(layouts), [Handle(node) for node in nodes], **options)  # type: ignore[arg-type]


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


LAYOUT = {7: [(0, 8), (8, 4), (12, 4), (16, 24), (40, 5)]}
PARAMS = (word(A), b"\x01\x00\x00\x00", b"\x02\x00\x00\x00", word(3) + word(B) + word(4), b"abcde")


@pytest.mark.parametrize("packed", [(), (1, 2), (2, 1)])
def test_a_kernel_reads_the_same_however_it_holds_its_parameters(packed: tuple[int, ...]) -> None:
    (found,), (launch,) = read(kernel(*PARAMS, packed=packed), layouts=LAYOUT)
    assert isinstance(found, KernelNode)
    assert found.blob == b"".join(PARAMS)
    assert found.places == ((0, 8), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 4), (44, 1))
    assert launch.words == (A, 1, 2, 3, B, 4, int.from_bytes(b"abcd", "little"), ord("e"))
    assert launch.kind is LaunchKind.KERNEL
    assert launch.name == "kernel_7"
    assert launch.signature == (7, tuple(LAYOUT[7]))
    attributes = tuple(len(name) + 7 for name in _CODE)
    assert launch.code == (Function(8, "another handle", tuple(LAYOUT[7]), attributes).code, (1, 1, 1))
    assert launch.code != (Function(7, "kernel_7", tuple(LAYOUT[7]), (*attributes[1:], 0)).code, (1, 1, 1))
    assert launch.geometry == Geometry((1, 1, 1), (1, 1, 1), 0)


def test_a_kernel_without_a_function_is_asked_for_its_kernel() -> None:
    (_,), (launch,) = read(kernel(word(A), func=0, kern=9), layouts={9: [(0, 8)]})
    assert launch.name == "kernel_9"
    assert launch.words == (A,)


def test_an_unaligned_struct_gives_whole_words_only_where_they_are_aligned() -> None:
    blob = b"\x05\x00\x00\x00" + word(A) + b"\x06\x00\x00\x00" + b"\x07\x00\x08"
    (found,), (launch,) = read(kernel(b"\x00" * 4, blob), layouts={7: [(0, 4), (4, 19)]})
    assert isinstance(found, KernelNode)
    assert found.places == ((0, 4), (4, 4), (8, 8), (16, 4), (20, 2), (22, 1))
    assert launch.words == (0, 5, int.from_bytes(blob[4:12], "little"), 6, 7, 8)


def test_padding_between_parameters_is_no_word() -> None:
    held = [b"\x01\x00\x00\x00", word(A)]
    (found,), (launch,) = read(kernel(*held), layouts={7: [(4, 4), (16, 8)]})
    assert isinstance(found, KernelNode)
    assert found.blob == b"\x00" * 4 + held[0] + b"\x00" * 8 + held[1]
    assert (found.places, launch.words) == (((4, 4), (16, 8)), (1, A))


def test_a_kernel_without_parameters() -> None:
    (found,), (launch,) = read(kernel(), layouts={7: []})
    assert isinstance(found, KernelNode)
    assert (found.blob, found.places, launch.words) == (b"", (), ())


def test_copies_and_fills() -> None:
    nodes, launches = read(memcpy(), memset(), layouts={})
    assert [type(node) for node in nodes] == [CopyNode, FillNode]
    assert launches[0].words == (B + 16, A)
    assert launches[0].uses == (writes(0, 64), reads(1, 64))
    assert launches[0].signature == 64
    assert launches[1].words == (A,)
    assert launches[1].uses == (writes(0, 40),)
    assert launches[1].signature == (0, 4, 10)
    assert [launch.index for launch in launches] == [0, 1]


REFUSED = {
    "unsupported-node": node("HOST"),
    "host-memcpy": memcpy(srcMemoryType=CUmemorytype.CU_MEMORYTYPE_HOST),
    "unsupported-copy": memcpy(Height=3),
    "unsupported-fill": memset(height=2),
    "unknown-parameters": kernel(word(1), kernelParams=0),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_patched_is_refused(reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        read(REFUSED[reason], layouts={7: [(0, 8)]})
    assert caught.value.reason == reason


@pytest.mark.parametrize("kind", ["GRAPH", "HOST", "CONDITIONAL", "MEM_ALLOC"])
def test_an_unsupported_node_is_named(kind: str) -> None:
    with pytest.raises(CaptureError, match=f"launch 1 is a node of kind {kind.lower()}"):
        read(memset(), node(kind), layouts={})


def test_events_of_a_communicator_are_part_of_what_must_not_change() -> None:
    events = node("WAIT_EVENT", waited=5), node("EVENT_RECORD", recorded=6)
    with pytest.raises(CaptureError, match="kind wait_event"):
        read(*events, layouts={})
    nodes, (wait, record) = read(*events, layouts={}, collectives=True)
    assert all(isinstance(each, EventNode) for each in nodes)
    assert (wait.name, wait.signature, wait.words, wait.uses) == ("event wait", (5,), (), ())
    assert (record.name, record.signature, record.words, record.uses) == ("event record", (6,), (), ())
