"""Graphs with conditional nodes, as they are made of a program: nodes, edges, and the places that addresses go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.default import DEFAULT_PASSES, as_captured, undecided
from pygraph.program.loops import LoopPasses, looped
from pygraph.program.program import Program, Slot
from pygraph.program.recording import AllocationKind, LaunchKind
from pygraph.runtime.cuda import nested
from pygraph.runtime.cuda.capture import CudaCapture
from pygraph.runtime.cuda.nodes import CopyNode, FillNode, KernelNode
from tests.runtime.captures import Capture, reads, writes

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
WORDS = ((0, 8), (8, 8))
GRAPH, BODY, CAPTURED = 10, 20, 1


class Driver:
    """Adds nodes to graphs by number, and remembers each: the graph, and what it is a copy of, or its parameters."""

    CUgraph = CUgraphNode = int
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def __init__(self) -> None:
        self.added: list[tuple[int, Any]] = []

    def _add(self, graph: int, what: Any) -> tuple[int, int]:
        self.added.append((graph, what))
        return 0, 1000 + len(self.added) - 1

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, 77

    def cuGraphConditionalHandleCreate(self, *_: Any) -> tuple[int, int]:
        return 0, 500

    def cuModuleLoadData(self, _: bytes) -> tuple[int, int]:
        return 0, 1

    def cuModuleGetFunction(self, *_: Any) -> tuple[int, int]:
        return 0, 2

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(of=node)

    def cuGraphMemsetNodeGetParams(self, node: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(of=node)

    def cuGraphKernelNodeCopyAttributes(self, *_: Any) -> tuple[int]:
        return (0,)

    def cuGraphAddKernelNode(self, graph: int, _: None, count: int, params: Any) -> tuple[int, int]:
        assert count == 0
        return self._add(graph, getattr(params, "of", "set"))

    def cuGraphAddMemsetNode(self, graph: int, _: None, count: int, params: Any, context: int) -> Any:
        assert (count, context) == (0, 77)
        return self._add(graph, params.of)


class Native:
    """Description that the native half is given."""

    def KernelNode(self, handle: int, segment: int, blob: bytes, layout: Any) -> Any:
        return handle, segment, blob, layout

    def FillNode(self, handle: int, segment: int) -> Any:
        return handle, segment

    def CudaRegion(self, described: Any, **facts: Any) -> Any:
        return SimpleNamespace(described=described, **facts)

    def advances(self, _: Any) -> int:
        return 12

    def Stop(self) -> Any:
        return SimpleNamespace(address=0x700)


def held(nodes: Sequence[Any], arguments: Sequence[Any], *, random: bool = False) -> CudaCapture:
    """The driver's handle on a capture of these."""
    graph: Any = SimpleNamespace(raw_cuda_graph=lambda: CAPTURED)
    lease: Any = None
    return CudaCapture(graph, tuple(nodes), tuple(arguments), 0, random, (), lease, (0x600, 0x608))


def program(*, random: bool = False) -> Program:
    """A loop over a kernel that fills t of x, one that fills half of t again, and one that writes x of t."""
    capture = Capture()
    x, control = capture.input(64), capture.input(24)
    t = capture.pool(64)
    capture.launch(x, t, name="first", uses=[reads(0, 64), writes(1, 64)], random=random)
    capture.launch(t + 32, name="memset", kind=LaunchKind.MEMSET, uses=[writes(0, 32)])
    capture.launch(t, x, name="last", uses=[reads(0, 64), writes(1, 64)])
    nodes = (KernelNode(100, bytes(16), WORDS, WORDS), FillNode(101), KernelNode(102, bytes(16), WORDS, WORDS))
    arguments = (torch.empty(16), torch.empty(3, dtype=torch.int64))
    payload = held(nodes, arguments, random=random)
    slots = (
        Slot(0, 0, INPUT, 0, 0),
        Slot(0, 1, POOL, 0, 0),
        Slot(1, 0, POOL, 0, 32),
        Slot(2, 0, POOL, 0, 0),
        Slot(2, 1, INPUT, 0, 0),
    )
    recording = capture.recording(payload=payload, device="cuda")
    assert control == recording.allocations[1].address
    return looped(DEFAULT_PASSES(as_captured(recording, slots), "program"), 1)


def copying(order: str) -> Program:
    """A loop over a kernel that makes t of x, a copy of t to x, and a kernel that writes y of x."""
    capture = Capture()
    x, t, control, y = capture.input(64), capture.pool(64), capture.input(24), capture.input(64)
    capture.launch(x, t, name="first", uses=[reads(0, 64), writes(1, 64)], in_place=frozenset({(INPUT, 0)}))
    capture.launch(x, t, name="memcpy", kind=LaunchKind.MEMCPY, uses=[writes(0, 64), reads(1, 64)])
    capture.launch(x, y, name="last", uses=[reads(0, 64), writes(1, 64)])
    nodes = (KernelNode(100, bytes(16), WORDS, WORDS), CopyNode(101, 64), KernelNode(102, bytes(16), WORDS, WORDS))
    arguments = (torch.empty(16), torch.empty(3, dtype=torch.int64), torch.empty(16))
    slots = (
        Slot(0, 0, INPUT, 0, 0),
        Slot(0, 1, POOL, 0, 0),
        Slot(1, 0, INPUT, 0, 0),
        Slot(1, 1, POOL, 0, 0),
        Slot(2, 0, INPUT, 0, 0),
        Slot(2, 1, INPUT, 2, 0),
    )
    recording = capture.recording(payload=held(nodes, arguments), device="cuda")
    assert control == recording.allocations[2].address
    return LoopPasses(1)(undecided(recording, slots), order)


def made(
    monkeypatch: pytest.MonkeyPatch, of: Program, drawn: int = 0
) -> tuple[Driver, list[tuple[int, list[tuple[int, int]]]], Any]:
    """The driver's nodes, edges, and the native region."""
    edges: list[tuple[int, list[tuple[int, int]]]] = []

    def conditional(graph: int, context: int, handle: int, *, loop: bool, bodies: int) -> tuple[int, list[int]]:
        assert (context, handle) == (77, 500)
        _, node = driver._add(graph, "while" if loop else "if")
        return node, [BODY + number for number in range(bodies)]

    def captured(graph: int) -> list[tuple[int, int, bytes]]:
        assert graph == CAPTURED
        return [(100, 101, bytes(8)), (101, 102, bytes(8))]

    monkeypatch.setattr(nested, "add_conditional", conditional)
    monkeypatch.setattr(nested, "add_edges", lambda graph, found: edges.append((graph, list(found))))
    monkeypatch.setattr(nested, "read_edges", captured)
    monkeypatch.setattr(nested, "anchor_copies", lambda *_: None)
    driver = Driver()
    device: Any = SimpleNamespace(driver=driver, native=Native())
    graph = nested._Nested(device, drawn)
    graph.fill(GRAPH, of, ())
    capture: Any = of.recording.payload
    return driver, edges, graph.region(of, capture, of.steps, [(GRAPH, 99)])


def numbers(blob: bytes) -> Sequence[int]:
    return [int.from_bytes(blob[at : at + 8], "little") for at in range(0, len(blob), 8)]


def test_a_loop_is_decided_before_it_and_after_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, edges, region = made(monkeypatch, program(), drawn=12)
    assert driver.added == [(GRAPH, "set"), (GRAPH, "while"), (BODY, 100), (BODY, 101), (BODY, 102), (BODY, "set")]
    assert edges == [
        (GRAPH, [(1000, 1001)]),
        (BODY, [(1002, 1003), (1003, 1004)]),
        (BODY, [(1004, 1005)]),
        (GRAPH, []),
    ]
    found = {node[0]: node for node in region.nodes}
    assert set(found) == {1000, 1002, 1003, 1004, 1005}
    assert numbers(found[1000][2]) == [500, 0, nested._FIRST, 0, 0, 0x700]
    assert numbers(found[1005][2]) == [500, 0, nested._AGAIN, 0x608, 12, 0x700]
    assert (region.segments, region.random, region.advancing) == ([(GRAPH, 99)], True, (0x600, 0x608))
    assert region.advances


def test_addresses_go_to_the_nodes_of_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, region = made(monkeypatch, program())
    handles = [node[0] for node in region.nodes]

    def places(patches: Any) -> set[tuple[int, int, int]]:
        return {(handles[patch.launch], patch.place, patch.delta) for patch in patches}

    x, control = region.described.arguments
    (step,) = region.described.steps
    (block,) = step.blocks
    assert places(x.patches) == {(1002, 0, 0), (1004, 8, 0)}
    assert places(control.patches) == {(1000, 8, 0), (1005, 8, 0)}
    assert places(block.patches) == {(1002, 8, 0), (1003, 0, 32), (1004, 0, 0)}
    assert (x.written, control.written, block.nbytes) == (True, True, 64)
    assert (region.random, region.advancing, region.advances) == (False, (0, 0), False)


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_copies_that_are_not_needed_have_no_nodes(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Those that waited for one wait for all that it waited for."""
    driver, edges, region = made(monkeypatch, copying(order))
    assert driver.added == [(GRAPH, "set"), (GRAPH, "while"), (BODY, 100), (BODY, 102), (BODY, "set")]
    assert edges[1:3] == [(BODY, [(1002, 1003)]), (BODY, [(1003, 1004)])]
    handles = [node[0] for node in region.nodes]
    x = region.described.arguments[0]
    assert {(handles[patch.launch], patch.place) for patch in x.patches} == {(1002, 0), (1002, 8), (1003, 0)}
    assert x.written


def test_a_branch_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = program()
    (launch,) = loop.recording.launches
    branch = replace(launch, kind=LaunchKind.IF, bodies=launch.bodies * 2)
    driver, _, region = made(monkeypatch, replace(loop, recording=replace(loop.recording, launches=(branch,))))
    copies = [(graph, of) for graph in (BODY, BODY + 1) for of in (100, 101, 102)]
    assert driver.added == [(GRAPH, "set"), (GRAPH, "if"), *copies]
    assert numbers(region.nodes[0][2])[2] == nested._BRANCH


def test_only_a_loop_by_itself_may_draw() -> None:
    device: Any = SimpleNamespace(native=Native())
    alone = program(random=True)
    capture: Any = alone.recording.payload
    assert nested._drawn(device, program(), capture) == 0
    assert nested._drawn(device, alone, capture) == 12
    with pytest.raises(CaptureError, match="draws random numbers"):
        nested._drawn(device, looped(alone, 1), capture)
    capture.graph = None
    with pytest.raises(CaptureError, match="one executable"):
        nested._drawn(device, alone, capture)


def test_launches_beside_a_loop_may_draw_which_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = program()
    (launch,) = loop.recording.launches
    drawing = replace(loop, recording=replace(loop.recording, launches=(replace(launch, random=True),)))
    _, _, region = made(monkeypatch, drawing)
    assert (region.random, region.advancing, region.advances) == (True, (0x600, 0x608), False)
