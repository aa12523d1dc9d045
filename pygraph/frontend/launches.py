"""Lifts a recorded region to the IR: one node per launch, whose operands are the byte ranges that it touches.

Memory is the graph's inputs (arguments, constants, outputs, intermediates); launches return no values. Order between
launches follows from what they read and write, as ``pygraph.ir.order`` derives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pygraph.ir import Arg, BufferType, Cost, Device, Effects, Graph, KernelNode, Location, Stage, Value
from pygraph.runtime.driver import Layout, Slot
from pygraph.runtime.recording import (
    Access,
    Allocation,
    AllocationKind,
    Launch,
    LaunchKind,
    Output,
    OutputKind,
    Recording,
)

__all__ = ["lift_launches"]

_ROLES = {AllocationKind.INPUT: "input", AllocationKind.POOL: "buffer", AllocationKind.CONSTANT: "constant"}
_NAMES = {AllocationKind.INPUT: "arg", AllocationKind.POOL: "pool", AllocationKind.CONSTANT: "constant"}
_ORDER = (AllocationKind.INPUT, AllocationKind.CONSTANT, AllocationKind.POOL)
_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?=,|$)")
"""The first of the lines that a launch is said to come from."""


def lift_launches(
    recording: Recording,
    slots: Sequence[Slot],
    layout: Layout | None = None,
    *,
    device: Device | None = None,
    name: str = "main",
    disjoint_arguments: bool = False,
) -> Graph:
    """The launches of ``recording`` as a graph of stage RECORDED on ``device`` (the CPU unless told).

    Each launch is called ``launch<i>``; its ``ranges`` attribute gives (start, nbytes) for each operand. With a
    ``layout``, intermediates lie in one ``workspace``, so that reuse of its bytes shows as dependences; without, each
    has memory of its own and only true dependences are left. A launch whose accesses are unknown is a barrier. Unless
    ``disjoint_arguments``, a caller may pass overlapping tensors: writes to one argument are then ordered with every
    access to any argument.
    """
    graph = Graph(name, "launches", Stage.RECORDED)
    memory = _Memory(recording, slots, layout, device or Device("cpu"))
    memory.declare(graph)
    for launch in recording.launches:
        _add(graph, memory, launch)
    if not disjoint_arguments:
        _order_arguments(graph)
    graph.set_outputs(memory.returned(output) for output in recording.outputs)
    return graph


@dataclass(frozen=True, slots=True)
class _Operand:
    """Bytes of one buffer that a launch touches; ``nbytes`` is None where nobody knows how far."""

    buffer: Value
    start: int
    nbytes: int | None
    reads: bool
    writes: bool


class _Memory:
    """The buffers of a region, and where its launches' words point in them."""

    def __init__(self, recording: Recording, slots: Sequence[Slot], layout: Layout | None, device: Device) -> None:
        self.recording = recording
        self.slots: dict[int, dict[int, Slot]] = {launch.index: {} for launch in recording.launches}
        for slot in slots:
            self.slots[slot.launch][slot.word] = slot
        self.layout = layout
        self.device = device
        self.buffers: dict[tuple[AllocationKind, int], Value] = {}
        self.workspace: Value | None = None
        self.fixed: list[tuple[int, int, Value]] = []

    def declare(self, graph: Graph) -> None:
        """Make the buffers inputs of ``graph``."""
        allocations = sorted(self.recording.allocations, key=lambda a: (_ORDER.index(a.kind), a.index))
        for allocation in allocations:
            if not self._in_workspace(allocation):
                self.buffers[allocation.key] = self._declare(graph, allocation)
        if self.layout is not None and self.layout.offsets:
            type = BufferType(self.layout.nbytes, self.device)
            self.workspace = graph.add_input(type, "workspace", role="buffer", static=True)
        for number, (start, end) in enumerate(_merged(self.unowned())):
            type = BufferType(end - start, self.device)
            value = graph.add_input(type, f"fixed{number}", role="constant", static=True)
            self.fixed.append((start, end, value))

    def _declare(self, graph: Graph, allocation: Allocation) -> Value:
        return graph.add_input(
            BufferType(allocation.nbytes, self.device),
            f"{_NAMES[allocation.kind]}{allocation.index}",
            role=_ROLES[allocation.kind],
            static=allocation.kind is AllocationKind.CONSTANT,
        )

    def _in_workspace(self, allocation: Allocation) -> bool:
        placed = self.layout is not None and allocation.index in self.layout.offsets
        return placed and allocation.kind is AllocationKind.POOL

    def locate(self, slot: Slot) -> tuple[Value, int]:
        """The buffer that ``slot`` points into, and how many bytes into it."""
        if (slot.kind, slot.index) in self.buffers:
            return self.buffers[slot.kind, slot.index], slot.offset
        assert self.layout is not None
        assert self.workspace is not None
        return self.workspace, self.layout.offsets[slot.index] + slot.offset

    def operand(self, launch: Launch, access: Access) -> _Operand:
        """What ``access`` touches. A word that is no slot is an address that no allocation owns."""
        slot = self.slots[launch.index].get(access.word)
        if slot is not None:
            buffer, offset = self.locate(slot)
            return _Operand(buffer, offset + access.start, access.nbytes, access.reads, access.writes)
        address = launch.words[access.word] + access.start
        start, _, buffer = next(entry for entry in self.fixed if entry[0] <= address < entry[1])
        return _Operand(buffer, address - start, access.nbytes, access.reads, access.writes)

    def unowned(self) -> Iterator[tuple[int, int]]:
        """The ranges accessed at addresses that no allocation owns."""
        for launch in self.recording.launches:
            for access in filter(_touches, launch.accesses or ()):
                if access.word not in self.slots[launch.index]:
                    start = launch.words[access.word] + access.start
                    yield start, start + access.nbytes

    def returned(self, output: Output) -> Arg:
        """What stands for one result of the region: its buffer, a literal, or None for a tensor of the module."""
        if output.kind is OutputKind.FRESH:
            return self.buffers[AllocationKind.POOL, output.allocation]
        if output.kind is not OutputKind.SCALAR:
            return self.buffers.get((AllocationKind.INPUT, output.argument))
        return output.value if isinstance(output.value, (bool, int, float, complex, str)) else None


# -- launches ----------------------------------------------------------------------------------------------------------


def _add(graph: Graph, memory: _Memory, launch: Launch) -> None:
    operands = _operands(memory, launch)
    known = launch.accesses is not None
    ranges = tuple(None if o.nbytes is None else (o.start, o.nbytes) for o in operands)
    graph.add(
        _op(launch),
        tuple(operand.buffer for operand in operands),
        attrs={"ranges": ranges},
        name=_name(launch),
        effects=Effects(
            writes=tuple(i for i, operand in enumerate(operands) if operand.writes),
            reads=tuple(i for i, operand in enumerate(operands) if operand.reads),
            rng=str(memory.device) if launch.random else None,
            barrier=not known,
        ),
        cost=_cost(operands, known),
        loc=_location(launch.loc),
    )


def _operands(memory: _Memory, launch: Launch) -> list[_Operand]:
    if launch.accesses is not None:
        return [memory.operand(launch, access) for access in launch.accesses if _touches(access)]
    buffers = dict.fromkeys(memory.locate(slot)[0] for slot in memory.slots[launch.index].values())
    return [_Operand(buffer, 0, None, True, True) for buffer in buffers]


def _touches(access: Access) -> bool:
    return access.nbytes > 0 and (access.reads or access.writes)


def _op(launch: Launch) -> str:
    named = launch.kind in (LaunchKind.KERNEL, LaunchKind.OPERATOR)
    return f"{launch.kind.value}.{launch.name}" if named else launch.kind.value


def _name(launch: Launch) -> str:
    return f"launch{launch.index}"


def _cost(operands: Iterable[_Operand], known: bool) -> Cost:
    """Bytes as accessed; what is computed with them, no recording says."""
    if not known:
        return Cost(launches=1, host_us=0)
    touched = list(operands)
    read = sum(operand.nbytes or 0 for operand in touched if operand.reads)
    written = sum(operand.nbytes or 0 for operand in touched if operand.writes)
    return Cost(None, read, written, 1, 0)


def _location(loc: str | None) -> Location | None:
    match = _PLACE.match(loc or "")
    return Location(match["file"], int(match["line"])) if match else None


# -- addresses that no allocation owns, arguments that may overlap -----------------------------------------------------


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of ``ranges`` as sorted, disjoint ones; those that touch are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _order_arguments(graph: Graph) -> None:
    """Order a write to any argument with every earlier and later access to arguments, as if they were one buffer."""
    writer: KernelNode | None = None
    readers: list[KernelNode] = []
    for node in graph.nodes:
        arguments = [i for i, value in enumerate(node.inputs) if value.role == _ROLES[AllocationKind.INPUT]]
        if not arguments:
            continue
        writes = any(i in node.effects.writes for i in arguments)
        earlier = [*([writer] if writer is not None else []), *(readers if writes else [])]
        for before in earlier:
            graph.add_order(before, node)
        writer, readers = (node, []) if writes else (writer, [*readers, node])
