"""Conditional nodes: graphs that run loops and branches on the device.

    graph    set ─► WHILE          set: a kernel that decides whether the body runs
               body   kernel ─► copy ─► set

The nodes of captured bodies are copied into the graphs that the driver makes for the bodies. There, they are patched
through the instance of the whole graph, like any other nodes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.program.nested import Path, bodies_of, words_at
from pygraph.program.program import GraphSegment, Program, Slot, Step
from pygraph.program.recording import Launch, LaunchKind
from pygraph.program.verify import verify, verify_edges
from pygraph.runtime.contract import Executable
from pygraph.runtime.cuda.bindings import add_conditional, add_edges, call, read_edges
from pygraph.runtime.cuda.capture import CudaCapture, DeviceCapture, payload_of
from pygraph.runtime.cuda.executable import anchor_copies, device_bytes, with_scratch
from pygraph.runtime.cuda.nodes import KernelNode, Node
from pygraph.runtime.cuda.phases import without
from pygraph.runtime.description import describe_region

__all__ = ["make_nested"]

_SET_CONDITION = b"""
.version 7.0
.target sm_70
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);

.visible .entry set_condition (
    .param .u64 condition, .param .u64 decides, .param .u64 kind, .param .u64 offset, .param .u64 drawn,
    .param .u64 asked)
{
    .reg .pred %branch, %again, %none, %below, %goes;
    .reg .b16 %byte;
    .reg .b32 %value, %ends;
    .reg .b64 %condition, %kind, %from, %to, %number, %more, %limit, %stop, %asked;

    ld.param.u64 %condition, [condition];
    ld.param.u64 %from, [decides];
    ld.param.u64 %kind, [kind];
    ld.param.u64 %to, [offset];
    ld.param.u64 %more, [drawn];
    cvta.to.global.u64 %from, %from;
    cvta.to.global.u64 %to, %to;

    setp.eq.u64 %none, %more, 0;
    @%none bra DECIDE;
    ld.global.u64 %number, [%to];
    add.u64 %number, %number, %more;
    st.global.u64 [%to], %number;
DECIDE:
    setp.eq.u64 %branch, %kind, 0;
    @%branch bra BYTE;
    ld.param.u64 %asked, [asked];
    ld.relaxed.sys.u32 %ends, [%asked];
    ld.global.s64 %number, [%from];
    setp.eq.u64 %again, %kind, 2;
    @!%again bra COMPARE;
    add.s64 %number, %number, 1;
    st.global.s64 [%from], %number;
COMPARE:
    ld.global.s64 %limit, [%from+8];
    ld.global.s64 %stop, [%from+16];
    setp.lt.s64 %below, %number, %limit;
    setp.eq.and.s64 %goes, %stop, 0, %below;
    setp.ne.and.u32 %goes, %ends, 1, %goes;
    bra SET;
BYTE:
    ld.global.u8 %byte, [%from];
    setp.ne.s16 %goes, %byte, 0;
SET:
    selp.u32 %value, 1, 0, %goes;
    {
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first], %condition;
        st.param.b32 [second], %value;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;
}
"""
"""The kernel that sets a condition, as ``nvcc -ptx -rdc=true`` compiles ``cudaGraphSetConditional(condition, …)``, a
function that the driver provides. By ``kind``, the condition is the byte of a branch (0), or ``count < limit`` and not
``stop``: before a loop (1), or after an iteration (2), which is counted first. If ``drawn`` is not 0, it is added to
the generator's ``offset``. The word of host memory at ``asked`` (see ``stop.h``) can end a loop."""

_BRANCH, _FIRST, _AGAIN = range(3)
_LAYOUT, _DECIDES = tuple((place, 8) for place in range(0, 48, 8)), ((8, 8),)
"""The (offset, size) of its parameters, and of the address ``decides``: word 0 of its launch."""


def make_nested(device: DeviceCapture, program: Program, capture: CudaCapture) -> Executable:
    """Instantiate ``program``, which has launches with bodies, as one graph per segment. Raises CaptureError."""
    verify(program)
    if program.calls and any(launch.random for launch in program.recording.launches):
        raise CaptureError("host-loop", "launches that draw stand beside a loop or branch, and calls of the host")
    payloads = [payload_of(each.recording) for each in (program, *bodies_of(program))]
    driver, segments = device.driver, [step for step in program.steps if isinstance(step, GraphSegment)]
    with torch.cuda.device(capture.device):
        torch.cuda.set_device(capture.device)  # a thread that has not used the device yet has no context
        graphs, instances = list[Any](), list[Any]()
        try:
            made = _Nested(device, _drawn(device, program, capture))
            stream = torch.cuda.current_stream()
            for step in segments:
                graphs.append(call(driver.cuGraphCreate, 0))
                made.fill(int(graphs[-1]), program, (), range(step.begin, step.end))
                instances.append(call(driver.cuGraphInstantiate, graphs[-1], 0))
                call(driver.cuGraphUpload, instances[-1], driver.CUstream(stream.cuda_stream))
            stream.synchronize()  # as ``split``
            owned = [(int(graph), int(instance)) for graph, instance in zip(graphs, instances, strict=True)]
            region = made.region(program, capture, segments, owned)
        except BaseException:
            for instance in instances:
                call(driver.cuGraphExecDestroy, instance)
            for graph in graphs:
                call(driver.cuGraphDestroy, graph)
            raise
    kept = [kept for each in payloads for kept in each.kept]
    return Executable(region, kept, nbytes=device_bytes(made.nodes, len(segments)))


def _drawn(device: DeviceCapture, program: Program, capture: CudaCapture) -> int:
    """How far an iteration advances the generator; 0 if no body draws. Raises CaptureError (``host-loop``) if a branch
    draws, or a loop among other launches."""
    launches = program.recording.launches
    alone = len(launches) == len(list(bodies_of(program))) == 1 and launches[0].kind is LaunchKind.WHILE
    inside = any(launch.random for body in bodies_of(program) for launch in body.recording.launches)
    if not inside and not (alone and payload_of(launches[0].bodies[0].recording).random):
        return 0
    if alone and capture.graph is None:
        raise CaptureError("already-instantiated", "a capture makes one executable")
    drawn = int(device.native.advances(capture.graph)) if alone else 0
    if not drawn:
        raise CaptureError("host-loop", "a branch, or a loop among other launches, draws random numbers")
    return drawn


@functools.cache
def _setter(driver: ModuleType, context: int) -> Any:  # noqa: ARG001 - each context has its own
    """The kernel that sets conditions, in a ``context``."""
    module = call(driver.cuModuleLoadData, _SET_CONDITION + b"\0")
    return call(driver.cuModuleGetFunction, module, b"set_condition")


class _Nested:
    """A graph under construction from a program. ``made`` are its nodes by launch, as (node, handle); those of a loop
    or branch are the kernels that set its condition. ``drawn``: how far an iteration advances the generator."""

    def __init__(self, device: DeviceCapture, drawn: int) -> None:
        self._device, self._driver, self._drawn = device, device.driver, drawn
        self._context = call(self._driver.cuCtxGetCurrent)
        self.made: dict[Path, list[tuple[Node, int]]] = {}
        self._stop: Any = None
        """Lets a signal end the loops; None if there are none."""

    @property
    def nodes(self) -> list[Node]:
        """All nodes except conditional ones."""
        return [node for nodes in self.made.values() for node, _ in nodes]

    def fill(self, graph: int, program: Program, path: Path, within: range | None = None) -> list[int]:
        """Add ``program``, which is at ``path``, or only its launches ``within``, to an empty graph. Returns the added
        nodes for which no other added node waits."""
        launches, payload = program.recording.launches, payload_of(program.recording)
        own = [None if launch.bodies else payload.nodes[launch.index] for launch in launches]
        own = with_scratch(program, own)
        anchor_copies(self._driver, program, own)
        first, last = dict[int, int](), dict[int, int]()  # by launch: the node that waits, and the node to wait for
        for index in range(len(launches)) if within is None else within:
            launch, node, at = launches[index], own[index], (*path, index)
            if node is None:
                begin, end = self._nest(graph, launch, at)
            else:
                begin = end = node.add_to(self._driver, self._driver.CUgraph(graph), self._context)
                self.made[at] = [(node, begin)]
            first[index], last[index] = begin, end
        pairs = [pair for pair in _waits(program, payload, own) if all(index in first for index in pair)]
        add_edges(graph, [(last[earlier], first[later]) for earlier, later in pairs])
        if program.order is not None:
            told = [edge[:2] for edge in read_edges(graph)]
            places = {(last[a], first[b]): (a, b) for a, b in pairs}
            verify_edges(program, [places[edge] for edge in told if edge in places])
        waited = {earlier for earlier, _ in pairs}
        return [node for launch, node in last.items() if launch not in waited]

    def _nest(self, graph: int, launch: Launch, path: Path) -> tuple[int, int]:
        """Add a loop or branch to a graph: the kernel that first sets its condition, and its conditional node."""
        driver, repeats = self._driver, launch.kind is LaunchKind.WHILE
        if not hasattr(driver, "cuGraphConditionalHandleCreate"):
            raise CaptureError("host-loop", "cuda.bindings has no conditional nodes")
        raw = driver.CUgraph(graph)
        handle = int(call(driver.cuGraphConditionalHandleCreate, raw, self._context, 0, 0))
        if repeats and self._stop is None:
            self._stop = self._device.native.Stop()
        setters = self.made.setdefault(path, [])
        begin = self._set(graph, handle, setters, _FIRST if repeats else _BRANCH)
        count = len(launch.bodies)
        node, graphs = add_conditional(graph, int(self._context), handle, loop=repeats, bodies=count)
        add_edges(graph, [(begin, node)])
        for number, (inner, body) in enumerate(zip(graphs, launch.bodies, strict=True)):
            ends = self.fill(inner, body, (*path, number))
            if repeats:
                offset = payload_of(body.recording).random_memory[1]
                again = self._set(inner, handle, setters, _AGAIN, (offset, self._drawn))
                add_edges(inner, [(end, again) for end in ends])
        return begin, node

    def _set(
        self,
        graph: int,
        handle: int,
        setters: list[tuple[Node, int]],
        kind: int,
        advances: tuple[int, int] = (0, 0),
    ) -> int:
        """Add the kernel that sets a condition. ``advances`` is (address, increment) of the generator's offset."""
        driver = self._driver
        asked = 0 if kind == _BRANCH else self._stop.address
        values = (ctypes.c_uint64 * 6)(handle, 0, kind, *advances, asked)
        pointers = (ctypes.c_void_p * 6)(*(ctypes.addressof(values) + place for place, _ in _LAYOUT))
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = _setter(driver, int(self._context))
        for axis in "XYZ":
            setattr(params, f"gridDim{axis}", 1)
            setattr(params, f"blockDim{axis}", 1)
        params.kernelParams = ctypes.addressof(pointers)
        made = int(call(driver.cuGraphAddKernelNode, driver.CUgraph(graph), None, 0, params))
        setters.append((KernelNode(made, bytes(values), _LAYOUT, _DECIDES), made))
        return made

    def region(
        self, program: Program, capture: CudaCapture, segments: Sequence[Step], owned: Sequence[tuple[int, int]]
    ) -> Any:
        """The native region that replays ``owned``, one pair of graph and instance for each of ``segments``."""
        native, torch_graph = self._device.native, capture.graph
        found = {slot: list(words_at(program, slot)) for slot in program.slots}
        patched = dict.fromkeys(path for words in found.values() for path, _, _ in words)
        numbers: dict[Path, list[int]] = {}
        nodes: list[Any] = []
        segment_of = {launch: n for n, step in enumerate(segments) for launch in range(step.begin, step.end)}
        for path in patched:
            made = self.made.get(path, [])  # an eager call has none
            numbers[path] = list(range(len(nodes), len(nodes) + len(made)))
            nodes += [node.native(native, handle, segment_of[path[0]]) for node, handle in made]

        def places(slot: Slot) -> list[tuple[int, int, int]]:
            return [
                (number, node.place(word), delta)
                for path, word, delta in found[slot]
                for number, (node, _) in zip(numbers[path], self.made.get(path, ()), strict=True)
            ]

        draws = bool(self._drawn) or any(launch.random for launch in program.recording.launches)
        region = native.CudaRegion(
            describe_region(program, capture.arguments, places),
            graph=torch_graph,
            device=capture.device,
            random=draws,
            offset=0,
            segments=owned,
            nodes=nodes,
            advancing=capture.random_memory if draws else (0, 0),
            advances=bool(self._drawn),
            stop=self._stop,
        )
        capture.graph = None
        return region


def _waits(program: Program, payload: CudaCapture, own: Sequence[Node | None]) -> list[tuple[int, int]]:
    """Pairs of launches (earlier, later) of which the later one waits: by the program's order, else as captured."""
    if program.order is not None:
        return [(earlier, later) for later, waited in enumerate(program.order.edges) for earlier in waited]
    if len(own) < 2 or payload.chained:
        return list(pairwise(range(len(own))))
    if payload.graph is None:
        raise CaptureError("already-instantiated", "a capture makes one executable")
    places = {node.handle: place for place, node in enumerate(own) if node is not None}
    edges = read_edges(payload.graph.raw_cuda_graph())
    dropped = list(dict.fromkeys(node for edge in edges for node in edge[:2] if node not in places))
    kept, _ = without(edges, dropped, range(len(dropped)))
    return sorted({(places[earlier], places[later]) for earlier, later, _ in kept})
