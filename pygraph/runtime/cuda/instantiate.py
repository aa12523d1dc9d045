"""From a Program to what replays it, with every address of the capture accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.assembling import add_arguments, add_outputs, check_layout
from pygraph.runtime.cuda.capture import CudaCapture, Machine
from pygraph.runtime.cuda.nodes import CopyNode, FillNode, GraphNode, KernelNode
from pygraph.runtime.cuda.parts import Part, anchor_copies, split, with_scratch
from pygraph.runtime.cuda.segments import Segments, cut
from pygraph.runtime.discover import written_arguments
from pygraph.runtime.driver import Program, Slot
from pygraph.runtime.recording import WORD, AllocationKind

__all__ = ["byte_of", "make_region"]


def make_region(machine: Machine, program: Program, capture: CudaCapture) -> Any:
    """The native region that replays ``program``. It takes the capture's graph.

    Raises CaptureError when an address would not be replaced or lie outside, for an order other than the recorded
    one, and when the capture was instantiated before.
    """
    if program.order != tuple(range(len(program.recording.launches))):
        raise CaptureError("invalid-program", "the launches of a CUDA graph run in the recorded order")
    check_layout(program, program.recording.alignment)
    _check_slots(program)
    capture.nodes = with_scratch(program, capture.nodes)
    graph, capture.graph = capture.graph, None
    if graph is None:
        raise CaptureError("already-instantiated", "a capture makes one executable")
    plan = cut(program)
    with torch.cuda.device(capture.device):
        torch.cuda.set_device(capture.device)  # a thread that did nothing on the device yet has no context
        anchor_copies(machine.driver, program, capture)
        parts = split(machine.driver, graph, capture.nodes, plan.bounds)
        region = machine.native.CudaRegion(graph, capture.device, capture.random)
        region.set_name(program.name)
        _Builder(machine.native, region, program, capture, plan, parts).build()
    return region


# -- checks -------------------------------------------------------------------------------------------------------


def _check_slots(program: Program) -> None:
    """Every address of the capture that is an operand has to be replaced: nothing but a stand-in page lies there at
    replay."""
    addresses = AddressMap(program.recording.allocations)
    patched = {(slot.launch, slot.word) for slot in program.slots} | {(w.launch, w.word) for w in program.inert}
    for launch in program.recording.launches:
        for position, word in enumerate(launch.words):
            if addresses.inside(word) is not None and (launch.index, position) not in patched:
                raise CaptureError("invalid-program", f"word {position} of {launch.name} is an address without a slot")


# -- parts --------------------------------------------------------------------------------------------------------


@dataclass
class _Builder:
    native: ModuleType
    region: Any
    program: Program
    capture: CudaCapture
    plan: Segments
    parts: Sequence[Part]

    def build(self) -> None:
        places = self._places()
        where = [s for s, (begin, end) in enumerate(self.plan.bounds) for _ in range(begin, end)]
        nodes: dict[int, int] = {}
        for slot in self.program.slots:
            node, segment = self.capture.nodes[slot.launch], where[slot.launch]
            if slot.launch not in nodes:
                nodes[slot.launch] = self._node(node, self.parts[segment].handles[slot.launch], segment)
            source, delta = self._place(slot, segment, places)
            self.region.add_patch(nodes[slot.launch], byte_of(node, slot.word), source, delta)
        add_outputs(self.region, self.native.OutputKind, self.program, self.capture.same)

    def _places(self) -> _Places:
        """Add every source of addresses, and say which number each got."""
        sizes = {a.index: a.nbytes for a in self.program.recording.allocations if a.kind is AllocationKind.POOL}
        workspaces = [self._workspace(segment) for segment in range(len(self.parts))]
        written = written_arguments(self.program.recording, self.program.slots)
        arguments = add_arguments(self.region, self.program, self.capture.arguments, written)
        fresh = {i: self.region.add_fresh(sizes[i], self.plan.fresh[i]) for i in self.program.layout.fresh}
        blocks = {b.index: self.region.add_block(b.nbytes, b.born, b.died) for b in self.plan.blocks}
        for argument, segment in self.plan.dead.items():
            if segment + 1 < len(self.parts):
                self.region.add_dead(segment, argument)
        return _Places(workspaces, arguments, {**fresh, **blocks})

    def _workspace(self, segment: int) -> dict[int, tuple[int, int]]:
        """Add a segment and its workspace: the source and the offset of each intermediate in that."""
        part = self.parts[segment]
        self.region.add_segment(part.graph, part.instance)
        found: dict[int, tuple[int, int]] = {}
        for piece in self.plan.workspaces[segment]:
            source = self.region.add_piece(piece.nbytes, segment)
            found.update((index, (source, offset)) for index, offset in piece.offsets.items())
        return found

    def _node(self, node: GraphNode, handle: int, segment: int) -> int:
        if isinstance(node, KernelNode):
            return int(self.region.add_kernel(handle, node.blob, list(node.layout), segment))
        if isinstance(node, CopyNode):
            return int(self.region.add_copy(handle, segment))
        if isinstance(node, FillNode):
            return int(self.region.add_fill(handle, segment))
        raise CaptureError("invalid-program", "a slot in a node without parameters")

    def _place(self, slot: Slot, segment: int, places: _Places) -> tuple[int, int]:
        """The source of a slot's address, and the bytes to add to it."""
        workspace = places.workspaces[segment]
        if slot.kind is AllocationKind.INPUT and slot.index in places.arguments:
            return places.arguments[slot.index], slot.offset
        if slot.kind is AllocationKind.POOL and slot.index in places.pool:
            return places.pool[slot.index], slot.offset
        if slot.kind is AllocationKind.POOL and slot.index in workspace:
            source, offset = workspace[slot.index]
            return source, offset + slot.offset
        raise CaptureError("invalid-program", f"a slot names {slot.kind.value} {slot.index}, which has no place")


@dataclass(frozen=True)
class _Places:
    """Numbers of sources: of arguments, of POOL allocations outside of workspaces, and for each segment those of what
    lies in its workspace, with the offset in bytes."""

    workspaces: list[dict[int, tuple[int, int]]]
    arguments: dict[int, int]
    pool: dict[int, int]


def byte_of(node: GraphNode, word: int) -> int:
    """Where a word is written: a byte of a kernel's parameters, or the number of an operand."""
    if not isinstance(node, KernelNode):
        return word
    place, size = node.places[word]
    if size != WORD:
        raise CaptureError("invalid-program", f"a slot in {size} bytes")
    return place
