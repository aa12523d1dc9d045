"""Makes the executable of a Program: cuts the captured graph into segments, and accounts for each of its addresses.

Words that point at memory of others are replaced, copies are pointed at ordinary memory, each segment is instantiated
and uploaded, and the native region gets the source of the address in each patched word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.program.order import Order
from pygraph.program.program import GraphSegment, Program, Slot
from pygraph.program.verify import verify, verify_edges
from pygraph.runtime.contract import Executable
from pygraph.runtime.cuda.addresses import ALIGNMENT
from pygraph.runtime.cuda.bindings import add_edges, call, read_edges, replace_edges
from pygraph.runtime.cuda.capture import CudaCapture, DeviceCapture
from pygraph.runtime.cuda.nodes import CopyNode, EventNode, KernelNode, Node
from pygraph.runtime.cuda.phases import without
from pygraph.runtime.description import describe_region

__all__ = ["Part", "anchor_copies", "device_bytes", "drop_superseded", "make_executable", "split", "with_scratch"]


def make_executable(device: DeviceCapture, program: Program, capture: CudaCapture) -> Executable:
    """Instantiate ``program``, and take ``capture.graph``.

    Raises CaptureError if the program breaks a rule, or the capture was instantiated before.
    """
    verify(program)
    nodes = with_scratch(program, capture.nodes)
    graph, capture.graph = capture.graph, None
    if graph is None:
        raise CaptureError("already-instantiated", "a capture makes one executable")
    segments = [(step.begin, step.end) for step in program.steps if isinstance(step, GraphSegment)]
    with torch.cuda.device(capture.device):
        torch.cuda.set_device(capture.device)  # a thread that has not used the device yet has no context
        anchor_copies(device.driver, program, nodes)
        dropped = drop_superseded(device.driver, graph.raw_cuda_graph(), nodes)
        nodes = [None if launch in dropped else node for launch, node in enumerate(nodes)]
        order = None if program.order is None else program.order.without(dropped)
        parts = split(device.driver, graph, nodes, segments, order)
        region = _native_region(device, graph, program, capture, nodes, parts)
        if program.order is not None:
            verify_edges(program, _edges(parts, graph.raw_cuda_graph()), dropped)
    return Executable(region, capture.kept, nbytes=device_bytes(nodes, len(parts)))


_GRAPH_BYTES = 2 << 20
_NODE_BYTES = 8 << 10
"""Bytes of device memory, outside of torch's allocator, of an instance, and of each node without its parameters. The
driver does not report them, and allocates in pieces: these are upper bounds (``tests/gpu/test_room.py`` measures)."""


def device_bytes(nodes: Iterable[Node | None], instances: int) -> int:
    """Upper bound, in bytes, on the device memory of ``instances`` graph instances that hold ``nodes`` together."""
    sizes = [
        _NODE_BYTES + (len(node.blob) if isinstance(node, KernelNode) else 0) for node in nodes if node is not None
    ]
    return _GRAPH_BYTES * instances + sum(sizes)


# -- words --------------------------------------------------------------------------------------------------------


def with_scratch(program: Program, nodes: Sequence[Node | None]) -> list[Node | None]:
    """``nodes`` whose inert words that pointed at memory of others point at scratch memory.

    The graph itself is not changed: a kernel's first patch, before it first runs, sets all of its parameters. Raises
    CaptureError: ``foreign-address`` for a kernel that is never patched, ``invalid-program`` for a word of anything but
    a kernel, and without scratch memory.
    """
    recording, made = program.recording, list(nodes)
    sizes = {a.key: a.nbytes for a in recording.allocations}
    patched = {slot.launch for slot in program.slots if sizes[slot.kind, slot.index]}
    for inert in program.non_pointers:
        if not inert.scratch:
            continue
        node, launch = made[inert.launch], recording.launches[inert.launch]
        if not recording.scratch or not isinstance(node, KernelNode):
            raise CaptureError("invalid-program", f"word {inert.word} of {launch.name} cannot point at scratch memory")
        address = recording.scratch + (launch.words[inert.word] - recording.scratch) % ALIGNMENT
        made[inert.launch] = node.with_word(inert.word, address)
        if inert.launch not in patched:
            said = f"{launch.name}: word {inert.word} is the only address of its kernel"
            raise CaptureError("foreign-address", said, launch=inert.launch)
    return made


def anchor_copies(driver: ModuleType, program: Program, nodes: Sequence[Node | None]) -> None:
    """Point the operands of copies that will be patched at ordinary memory before the graph is instantiated.

    An instantiated copy node accepts only addresses of the kind of memory that it was made with, and stand-ins are
    mapped memory, unlike (as a rule) ordinary memory. Nothing runs on these addresses: the first replay replaces them.
    """
    moved: dict[CopyNode, set[int]] = {}
    for slot in program.slots:
        node = nodes[slot.launch]
        if isinstance(node, CopyNode):
            moved.setdefault(node, set()).add(slot.word)
    if not moved:
        return
    size = max(node.nbytes for node in moved)
    size += -size % ALIGNMENT
    memory = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
    for node, words in moved.items():
        node.anchor(driver, words, (memory.data_ptr(), memory.data_ptr() + size))


# -- graphs -------------------------------------------------------------------------------------------------------


def drop_superseded(driver: ModuleType, graph: int, nodes: Sequence[Node | None]) -> frozenset[int]:
    """Remove records of an event that a later record supersedes. ``nodes`` are all nodes of the graph, by launch.
    Orders by way of a removed record are kept. Returns the launches that were removed.

    before:  reduce ─► record ─► reduce ─► record          after:  reduce ─► reduce ─► record

    After each captured collective, NCCL records an event of its communicator, and collectives on other streams wait for
    the latest record of it. Between two kernels, such a node takes 7 µs (H200).
    """
    events = [(place, node) for place, node in enumerate(nodes) if isinstance(node, EventNode)]
    if not events:
        return frozenset()
    handles = [0 if node is None else node.handle for node in nodes]
    places = {handle: place for place, handle in enumerate(handles)}
    edges = read_edges(graph)
    early = {edge[:2] for edge in edges if any(edge[2][:3])}  # the later node need not wait for completion
    complete = [edge for edge in edges if edge[:2] not in early]
    waits: list[set[int]] = [set() for _ in nodes]
    for earlier, later, _ in complete:
        waits[places[later]].add(places[earlier])
    before = Order.of(waits).before
    dropped: list[int] = []
    for place, node in events:
        behind = [other.records for at, other in events if other.event == node.event and before[at] >> place & 1]
        if node.records and behind and all(behind):  # no wait in the graph is for this record
            dropped.append(place)
    passed = {edge[:2] for edge in without(complete, handles, dropped)[0]} - {edge[:2] for edge in complete}
    if any(pair in passed or any(places[handle] in dropped for handle in pair) for pair in early):
        return frozenset()
    for place in dropped:
        call(driver.cuGraphDestroyNode, driver.CUgraphNode(handles[place]))
    add_edges(graph, sorted(passed))
    return frozenset(dropped)


@dataclass(frozen=True)
class Part:
    """Graph and instance of one segment, as handles; both 0 for the first segment, which torch's own object holds.
    ``handles`` are those of its nodes, by launch."""

    graph: int
    instance: int
    handles: dict[int, int]


def split(
    driver: ModuleType,
    graph: torch.cuda.CUDAGraph,
    nodes: Sequence[Node | None],
    bounds: Sequence[tuple[int, int]],
    order: Order | None = None,
) -> list[Part]:
    """Cut ``graph`` at ``bounds`` (begin and end of each segment, by launch) and instantiate every part. ``nodes`` are
    its nodes by launch, with None for eager calls and removed events. Nodes wait for each other as captured, or by
    ``order`` if it is given.

    Each part is a clone without the nodes of the other parts; torch's own graph becomes the first part. The caller
    owns the instances.

    Instances are uploaded before they are first patched. A kernel patched before its first upload takes 0.3 µs longer
    at every later launch (H200, driver 580), and nothing later repairs that; one patched after the upload does not.
    """
    clones = [_clone(driver, graph.raw_cuda_graph(), nodes, *bound, order) for bound in bounds[1:]]
    begin, end = bounds[0]
    for node in filter(None, nodes[end:]):
        call(driver.cuGraphDestroyNode, driver.CUgraphNode(node.handle))
    first = {i: node.handle for i, node in enumerate(nodes[begin:end], begin) if node is not None}
    _reorder(driver, graph.raw_cuda_graph(), nodes, first, order)
    graph.instantiate()
    stream = torch.cuda.current_stream()
    for instance in (graph.raw_cuda_graph_exec(), *(part.instance for part in clones)):
        call(driver.cuGraphUpload, driver.CUgraphExec(instance), driver.CUstream(stream.cuda_stream))
    stream.synchronize()  # the first patch may follow at once; a comparison then waits for the stream anyway
    return [Part(0, 0, first), *clones]


def _clone(
    driver: ModuleType, graph: int, nodes: Sequence[Node | None], begin: int, end: int, order: Order | None
) -> Part:
    """An instantiated copy of launches ``begin`` to ``end`` of a graph."""
    copy = call(driver.cuGraphClone, driver.CUgraph(graph))
    handles: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node is None:
            continue
        found = call(driver.cuGraphNodeFindInClone, driver.CUgraphNode(node.handle), copy)
        if begin <= index < end:
            handles[index] = int(found)
        else:
            call(driver.cuGraphDestroyNode, found)
    _reorder(driver, int(copy), nodes, handles, order)
    instance: Any = call(driver.cuGraphInstantiate, copy, 0)
    return Part(int(copy), int(instance), handles)


def _edges(parts: Sequence[Part], first: int) -> list[tuple[int, int]]:
    """The edges of all ``parts``, by launch, read from the CUDA driver; ``first`` is the graph of the first part."""
    found: list[tuple[int, int]] = []
    for part in parts:
        launches = {handle: launch for launch, handle in part.handles.items()}
        edges = read_edges(part.graph or first)
        found += [(launches[earlier], launches[later]) for earlier, later, data in edges if not any(data[:3])]
    return found


def _reorder(
    driver: ModuleType, graph: int, nodes: Sequence[Node | None], handles: Mapping[int, int], order: Order | None
) -> None:
    """Replace the edges of ``graph`` by those of ``order``, if there is one; ``handles`` are its nodes, by launch.
    Kernels on the longest path of the order start first."""
    if order is None:
        return
    pairs = ((earlier, later) for later in handles for earlier in order.edges[later] if earlier in handles)
    replace_edges(graph, [(handles[earlier], handles[later]) for earlier, later in pairs])
    for launch in order.critical().intersection(handles):
        node = nodes[launch]
        if isinstance(node, KernelNode):
            node.hurry(driver, handles[launch])


# -- the native region --------------------------------------------------------------------------------------------


def _native_region(
    device: DeviceCapture,
    graph: torch.cuda.CUDAGraph,
    program: Program,
    capture: CudaCapture,
    nodes: Sequence[Node | None],
    parts: Sequence[Part],
) -> Any:
    """The region that replays ``parts``, one for each segment, and owns them. After any exception, the parts are
    destroyed. ``nodes`` are given by launch."""
    native, driver = device.native, device.driver
    where = {launch: (part.handles[launch], number) for number, part in enumerate(parts) for launch in part.handles}
    patched = dict.fromkeys(slot.launch for slot in program.slots)

    def places(slot: Slot) -> list[tuple[int, int, int]]:
        node = nodes[slot.launch]
        return [] if node is None else [(numbers[slot.launch], node.place(slot.word), slot.offset)]

    try:
        made = {
            launch: node.native(native, *where[launch]) for launch in patched if (node := nodes[launch]) is not None
        }
        numbers = {launch: number for number, launch in enumerate(made)}
        return native.CudaRegion(
            describe_region(program, capture.arguments, places),
            graph=graph,
            device=capture.device,
            random=capture.random,
            offset=capture.random_memory[1] if program.calls else 0,
            segments=[(part.graph, part.instance) for part in parts],
            nodes=list(made.values()),
            advancing=(0, 0),
            advances=False,
            stop=None,
        )
    except BaseException:
        for part in parts:
            if part.graph:
                call(driver.cuGraphExecDestroy, driver.CUgraphExec(part.instance))
                call(driver.cuGraphDestroy, driver.CUgraph(part.graph))
        raise
