"""Nodes of captured graphs read as launches: every way of holding parameters, every kind refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.nodes import CopyNode, FillNode, KernelNode, Node
from pygraph.runtime.cuda.nodes import read_nodes as read_found
from pygraph.runtime.recording import Launch, LaunchKind
from tests.runtime.captures import reads, writes
from tests.runtime.cuda.fake import (
    A,
    B,
    CUgraphNodeType,
    CUmemorytype,
    FakeDriver,
    kernel,
    memcpy,
    memset,
    packed_kernel,
)


def read_nodes(driver: FakeDriver) -> tuple[list[Node], list[Launch]]:
    return read_found(driver, driver.nodes)  # type: ignore[arg-type]


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


LAYOUT = {7: [(0, 8), (8, 4), (12, 4), (16, 24), (40, 5)]}
PARAMS = (word(A), b"\x01\x00\x00\x00", b"\x02\x00\x00\x00", word(3) + word(B) + word(4), b"abcde")


@pytest.mark.parametrize("form", ["pointers", "packed", "packed, size first"])
def test_a_kernel_reads_the_same_however_it_holds_its_parameters(form: str) -> None:
    blob = b"".join(PARAMS)
    node = kernel(*PARAMS) if form == "pointers" else packed_kernel(blob, size_first="first" in form)
    (read,), (launch,) = read_nodes(FakeDriver(node, layouts=LAYOUT))
    assert isinstance(read, KernelNode)
    assert read.blob == blob
    assert read.places == ((0, 8), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 4), (44, 1))
    assert launch.words == (A, 1, 2, 3, B, 4, int.from_bytes(b"abcd", "little"), ord("e"))
    assert launch.kind is LaunchKind.KERNEL
    assert launch.name == "kernel_7"
    identity, dims, layout = launch.signature  # type: ignore[misc]
    assert identity == 7
    assert dims == ((1, 1, 1), (1, 1, 1), 0)
    assert layout == tuple(LAYOUT[7])


def test_a_kernel_without_a_function_is_asked_for_its_kernel() -> None:
    (_,), (launch,) = read_nodes(FakeDriver(kernel(word(A), func=0, kern=9), layouts={9: [(0, 8)]}))
    assert launch.name == "kernel_9"
    assert launch.words == (A,)


def test_an_unaligned_struct_gives_whole_words_only_where_they_are_aligned() -> None:
    blob = b"\x05\x00\x00\x00" + word(A) + b"\x06\x00\x00\x00"
    (read,), (launch,) = read_nodes(FakeDriver(kernel(b"\x00" * 4, blob), layouts={7: [(0, 4), (4, 16)]}))
    assert isinstance(read, KernelNode)
    assert read.places == ((0, 4), (4, 4), (8, 8), (16, 4))
    assert launch.words == (0, 5, int.from_bytes(blob[4:12], "little"), 6)


def test_a_kernel_without_parameters() -> None:
    (read,), (launch,) = read_nodes(FakeDriver(kernel(), layouts={7: []}))
    assert isinstance(read, KernelNode)
    assert (read.blob, read.places, launch.words) == (b"", (), ())


def test_copies_and_fills() -> None:
    nodes, launches = read_nodes(FakeDriver(memcpy(), memset()))
    assert [type(node) for node in nodes] == [CopyNode, FillNode]
    assert launches[0].words == (B + 16, A)
    assert launches[0].uses == (writes(0, 64), reads(1, 64))
    assert launches[0].signature == 64
    assert launches[1].words == (A,)
    assert launches[1].uses == (writes(0, 40),)
    assert launches[1].signature == (0, 4, 10)
    assert [launch.index for launch in launches] == [0, 1]


REFUSED = {
    "unsupported-node": SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST),
    "host-memcpy": memcpy(srcMemoryType=CUmemorytype.CU_MEMORYTYPE_HOST),
    "unsupported-copy": memcpy(Height=3),
    "unsupported-fill": memset(height=2),
    "unknown-parameters": kernel(word(1), kernelParams=0),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_patched_is_refused(reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        read_nodes(FakeDriver(REFUSED[reason], layouts={7: [(0, 8)]}))
    assert caught.value.reason == reason


def test_an_unsupported_node_is_named() -> None:
    for kind, name in (
        (CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH, "graph"),
        (CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST, "host"),
    ):
        with pytest.raises(CaptureError, match=f"launch 1 is a node of kind {name}"):
            read_nodes(FakeDriver(memset(), SimpleNamespace(kind=kind)))
