"""From a Program to what replays it, with every address of the capture accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.cuda.addresses import ALIGNMENT
from pygraph.runtime.cuda.bindings import call
from pygraph.runtime.cuda.capture import CudaCapture, Machine
from pygraph.runtime.cuda.nodes import CopyNode, FillNode, GraphNode, KernelNode
from pygraph.runtime.cuda.replay import PythonRegion
from pygraph.runtime.driver import Program, Slot
from pygraph.runtime.effects import written_arguments
from pygraph.runtime.recording import WORD, AllocationKind, Output, OutputKind

__all__ = ["make_region"]

_WORKSPACE = 0
"""The number of the workspace among the sources of addresses; arguments and fresh allocations come after it."""


def make_region(machine: Machine, program: Program, capture: CudaCapture) -> Any:
    """What replays ``program``: native, or in Python where there is no compiler. It takes the capture's graph.

    Raises CaptureError when an address would not be replaced or lie outside, for an order other than the recorded
    one, and when the capture was instantiated before.
    """
    _check_layout(program)
    _check_slots(program)
    graph = capture.graph
    if graph is None:
        raise CaptureError("already-instantiated", "a capture makes one executable")
    with torch.cuda.device(capture.device):
        _anchor_copies(machine.driver, program, capture)
        graph.instantiate()
        capture.graph = None
        native = machine.native if machine.replays_native else None
        if native is not None:
            region = native.CudaRegion(graph, capture.device, program.layout.nbytes, capture.random)
        else:
            region = PythonRegion(machine, graph, capture.device, program.layout.nbytes, capture.random)
        _Builder(native, region, program, capture).build()
    return region


# -- checks -------------------------------------------------------------------------------------------------------


def _check_layout(program: Program) -> None:
    layout, recording = program.layout, program.recording
    pool = {a.index: a for a in recording.allocations if a.kind is AllocationKind.POOL}
    if program.order != tuple(range(len(recording.launches))):
        raise CaptureError("invalid-program", "the launches of a CUDA graph run in the recorded order")
    for index, offset in layout.offsets.items():
        misplaced = offset < 0 or offset % recording.alignment
        if index not in pool or misplaced or offset + pool[index].nbytes > layout.nbytes:
            raise CaptureError("invalid-program", f"allocation {index} at byte {offset} of {layout.nbytes}")
    outputs = {o.allocation for o in recording.outputs if o.kind is OutputKind.FRESH}
    if not outputs <= set(layout.fresh) or not set(layout.fresh) <= set(pool):
        raise CaptureError("invalid-program", "the fresh allocations are not those of the outputs")


def _check_slots(program: Program) -> None:
    """Every address of the capture has to be replaced: nothing but a stand-in page lies there at replay."""
    addresses = AddressMap(program.recording.allocations)
    patched = {(slot.launch, slot.word) for slot in program.slots}
    for launch in program.recording.launches:
        for position, word in enumerate(launch.words):
            if addresses.inside(word) is not None and (launch.index, position) not in patched:
                raise CaptureError("invalid-program", f"word {position} of {launch.name} is an address without a slot")


# -- the graph ----------------------------------------------------------------------------------------------------


def _anchor_copies(driver: ModuleType, program: Program, capture: CudaCapture) -> None:
    """Point the operands of copies that will be patched at ordinary memory before the graph is instantiated.

    An instantiated copy node accepts only addresses of the kind of memory that it was made with, and stand-ins are
    mapped while ordinary memory (as a rule) is not. Nothing runs on these addresses: the first replay replaces them.
    """
    moved: dict[int, set[int]] = {}
    for slot in program.slots:
        if isinstance(capture.nodes[slot.launch], CopyNode):
            moved.setdefault(slot.launch, set()).add(slot.word)
    if not moved:
        return
    anchor = torch.empty(2 * ALIGNMENT, dtype=torch.uint8, device=torch.device("cuda", capture.device)).data_ptr()
    for launch, words in moved.items():
        node = driver.CUgraphNode(capture.nodes[launch].handle)
        params = call(driver.cuGraphMemcpyNodeGetParams(node))
        if 0 in words:
            params.dstDevice, params.dstXInBytes = driver.CUdeviceptr(anchor), 0
        if 1 in words:
            params.srcDevice, params.srcXInBytes = driver.CUdeviceptr(anchor + ALIGNMENT), 0
        call(driver.cuGraphMemcpyNodeSetParams(node, params))


# -- parts --------------------------------------------------------------------------------------------------------


@dataclass
class _Builder:
    native: ModuleType | None
    region: Any
    program: Program
    capture: CudaCapture

    def build(self) -> None:
        arguments = self._arguments()
        fresh = self._fresh()
        nodes: dict[int, int] = {}
        for slot in self.program.slots:
            node = self.capture.nodes[slot.launch]
            if slot.launch not in nodes:
                nodes[slot.launch] = self._node(node)
            source, delta = self._place(slot, arguments, fresh)
            self.region.add_patch(nodes[slot.launch], _byte(node, slot.word), source, delta)
        for position, output in enumerate(self.program.recording.outputs):
            self._output(output, self.capture.same.get(position))
        for position, origin in self.capture.origins.items():
            self.region.add_origin(position, *origin)

    def _arguments(self) -> dict[int, int]:
        """Argument ▸ number of its source."""
        recording = self.program.recording
        allocations = {a.index: a for a in recording.allocations if a.kind is AllocationKind.INPUT}
        written = written_arguments(recording, self.program.slots)
        sources: dict[int, int] = {}
        for index, argument in enumerate(self.capture.arguments):
            if not isinstance(argument, torch.Tensor):
                sources[index] = self.region.add_value_argument(argument)
                continue
            offset = argument.storage_offset() if index in recording.offset_sensitive else -1
            allocation, alignment = allocations[index], max(1, self.program.alignment.get(index, 1))
            sources[index] = self.region.add_tensor_argument(
                argument, index in written, offset, allocation.nbytes, alignment, allocation.address
            )
        return sources

    def _fresh(self) -> dict[int, int]:
        """POOL allocation that outlives the replay ▸ number of its source."""
        sizes = {a.index: a.nbytes for a in self.program.recording.allocations if a.kind is AllocationKind.POOL}
        return {index: self.region.add_fresh(sizes[index]) for index in self.program.layout.fresh}

    def _node(self, node: GraphNode) -> int:
        if isinstance(node, KernelNode):
            return int(self.region.add_kernel(node.handle, node.blob, list(node.layout)))
        if isinstance(node, CopyNode):
            return int(self.region.add_copy(node.handle))
        if isinstance(node, FillNode):
            return int(self.region.add_fill(node.handle))
        raise CaptureError("invalid-program", "a slot in a node without parameters")

    def _place(self, slot: Slot, arguments: dict[int, int], fresh: dict[int, int]) -> tuple[int, int]:
        """The source of a slot's address, and the bytes to add to it."""
        offsets = self.program.layout.offsets
        if slot.kind is AllocationKind.INPUT and slot.index in arguments:
            return arguments[slot.index], slot.offset
        if slot.kind is AllocationKind.POOL and slot.index in fresh:
            return fresh[slot.index], slot.offset
        if slot.kind is AllocationKind.POOL and slot.index in offsets:
            return _WORKSPACE, offsets[slot.index] + slot.offset
        raise CaptureError("invalid-program", f"a slot names {slot.kind.value} {slot.index}, which has no place")

    def _output(self, output: Output, same: int | None) -> None:
        kinds = PythonRegion.OutputKind if self.native is None else self.native.OutputKind
        add = self.region.add_output
        if same is not None:
            add(kinds.SAME, same, 0, [], [], None, None)
        elif output.kind is OutputKind.ARGUMENT:
            add(kinds.ARGUMENT, output.argument, 0, [], [], None, None)
        elif output.kind in (OutputKind.SCALAR, OutputKind.CONSTANT_TENSOR):
            add(kinds.OBJECT, 0, 0, [], [], None, output.value)
        else:
            is_view = output.kind is OutputKind.VIEW
            index = output.argument if is_view else self.program.layout.fresh.index(output.allocation)
            kind = kinds.VIEW if is_view else kinds.FRESH
            add(kind, index, output.offset, list(output.size), list(output.stride), output.dtype, None)


def _byte(node: GraphNode, word: int) -> int:
    """Where a word is written: a byte of a kernel's parameters, or the number of an operand."""
    if not isinstance(node, KernelNode):
        return word
    place, size = node.places[word]
    if size != WORD:
        raise CaptureError("invalid-program", f"a slot in {size} bytes")
    return place
