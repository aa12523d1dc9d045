"""One capture of one region, from the arguments of a call to a Recording.

Captures run one at a time (a process has one state of each generator and one set of library workspaces), on a stream
of their own, in thread-local mode. Nothing executes, and only the metadata of ``args`` is read.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from pygraph.compat import clear_cublas_workspaces, storage_from_address
from pygraph.errors import CaptureError
from pygraph.program.recording import Allocation, AllocationKind, Launch, Recording
from pygraph.runtime.calls import OperatorCall
from pygraph.runtime.control import Bodies
from pygraph.runtime.critical import only_capture, unbroken
from pygraph.runtime.cuda.addresses import ALIGNMENT, Arena, Arenas, with_unowned
from pygraph.runtime.cuda.bindings import call, read_edges
from pygraph.runtime.cuda.nodes import EventNode, Node, handles, read_nodes
from pygraph.runtime.cuda.phases import phases_of
from pygraph.runtime.cuda.spans import (
    EagerCalls,
    Observer,
    calls_operators,
    observing,
    run_inside,
    with_calls,
    with_eager,
)
from pygraph.runtime.eager import RecordedCall, record_call
from pygraph.runtime.observe import SCALARS, describe_outputs, run_region
from pygraph.runtime.provenance import merged
from pygraph.runtime.slots import AddressMap
from pygraph.runtime.tensors import extent, module_constants

__all__ = ["CudaCapture", "DeviceCapture", "check_arguments", "payload_of"]

Function = Callable[[list[Any]], Sequence[Any]]

_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass
class CudaCapture:
    """The payload of a CUDA Recording. ``nodes`` match its launches, with None for eager calls; ``arguments`` are
    stand-ins and Python values. ``kept`` keeps the nodes' code and constants alive. ``graph`` is None once an
    executable has taken it. ``random_memory`` holds the addresses of the generator's seed and offset on the device."""

    graph: torch.cuda.CUDAGraph | None
    nodes: tuple[Node | None, ...]
    arguments: tuple[Any, ...]
    device: int
    random: bool
    kept: tuple[object, ...]
    lease: ArenaLease
    random_memory: tuple[int, int] = (0, 0)
    chained: bool = False
    """Each launch waits for the one before it, as the graph does not contain all launches."""

    def part(self, launches: Sequence[int | None]) -> CudaCapture:
        """See ``Payload.part``. The graph still has all nodes."""
        nodes = tuple(None if launch is None else self.nodes[launch] for launch in launches)
        return replace(self, nodes=nodes, chained=self.chained or None in launches)


def payload_of(recording: Recording) -> CudaCapture:
    """The payload of a CUDA recording. Raises CaptureError (``foreign-recording``) for any other."""
    payload = recording.payload
    if not isinstance(payload, CudaCapture):
        raise CaptureError("foreign-recording", f"a payload of type {type(payload).__name__}")
    return payload


class ArenaLease:
    """Holds an arena for as long as anything points into it."""

    def __init__(self, arenas: Arenas) -> None:
        self.arena = arenas.lease()
        self.idle: Callable[[], bool] = lambda: True
        """Returns true if no memory in the arena is held."""
        self._arenas = arenas

    def __del__(self) -> None:
        if hasattr(self, "_arenas"):  # else ``__init__`` raised
            self._arenas.give_back(self.arena, self.idle)


class DeviceCapture:
    """State shared by the captures on one device: address space and the capture stream."""

    def __init__(self, driver: ModuleType, native: ModuleType, index: int) -> None:
        self.driver, self.native, self.index = driver, native, index
        self.arenas = Arenas(driver, index)
        with torch.cuda.device(index):
            torch.cuda.set_device(index)  # a thread that did nothing on the device yet has no context
            # a stream of its own: torch hands out the same few streams repeatedly, and work that another thread puts
            # on a stream under capture would be captured as well
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self.stream = torch.cuda.ExternalStream(int(call(driver.cuStreamCreate, int(flags))), device=index)

    def capture(self, fn: Function, args: Sequence[Any], eager: Collection[str], *, collectives: bool) -> Recording:
        """Record ``fn``; replays call the operators ``eager``, and collectives unless they are captured. Raises
        CaptureError; errors for lack of memory pass through. After any exception, nothing of the capture is left."""
        with only_capture(), torch.cuda.device(self.index):
            torch.cuda.set_device(self.index)
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("outer-capture", "the caller's own stream is being captured")
            return _Attempt(self, fn, args, ArenaLease(self.arenas), eager, collectives).record()


# -- arguments and their stand-ins ----------------------------------------------------------------------------------


def check_arguments(args: Sequence[Any]) -> int:
    """Index of the one device of all tensors in ``args``; the current device if there are no tensors.

    Raises CaptureError: ``host-memory`` for a tensor on the CPU, ``several-devices``, ``unsupported-argument`` for
    anything but tensors, Python numbers and None.
    """
    devices: set[int] = set()
    for position, value in enumerate(args):
        if type(value) in _TENSORS:
            devices.add(_device(position, value))
        elif type(value) not in SCALARS:
            raise CaptureError("unsupported-argument", f"argument {position} is {type(value).__name__}")
    if len(devices) > 1:
        raise CaptureError("several-devices", f"arguments are on devices {sorted(devices)}")
    return devices.pop() if devices else torch.cuda.current_device()


def _device(position: int, value: torch.Tensor) -> int:
    if value.device.type == "cpu":
        raise CaptureError("host-memory", f"argument {position} is on the CPU")
    if value.device.type != "cuda" or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise CaptureError("unsupported-tensor", f"argument {position}: {value.layout} on {value.device}")
    end = value.storage_offset() * value.element_size() + extent(value)
    if end > value.untyped_storage().nbytes():
        raise CaptureError("unsupported-tensor", f"argument {position} has no memory for its elements")
    return int(value.device.index)


def _stand_ins(arena: Arena, device: int, args: Sequence[Any]) -> tuple[tuple[Any, ...], list[Allocation]]:
    """``args`` with a stand-in for each tensor, and the allocations of the stand-ins in ``arena``, at addresses
    congruent to those of the arguments modulo ALIGNMENT."""
    made, allocations, place = list(args), list[Allocation](), torch.device("cuda", device)
    for index, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            continue
        nbytes, front = extent(value), int(value.storage_offset()) * value.element_size()
        start = value.untyped_storage().data_ptr() + front if nbytes else 0
        base = arena.take(front + nbytes, (start - front) % ALIGNMENT)
        storage = storage_from_address(base, place, front + nbytes)
        made[index] = torch.empty(0, dtype=value.dtype, device=place)
        made[index].set_(storage, value.storage_offset(), value.size(), value.stride())
        allocations.append(Allocation(AllocationKind.INPUT, index, base + front, nbytes))
    return tuple(made), allocations


# -- one capture ------------------------------------------------------------------------------------------------------


class _Attempt:
    """The state of one capture."""

    def __init__(
        self,
        device: DeviceCapture,
        fn: Function,
        args: Sequence[Any],
        lease: ArenaLease,
        eager: Collection[str],
        collectives: bool,
    ) -> None:
        self._device, self._fn, self._lease, self._collectives = device, fn, lease, collectives
        self._constants = {n: t for n, t in module_constants(fn).items() if t.device.type == "cuda"}
        self._arguments, self._inputs = _stand_ins(lease.arena, device.index, args)
        arena, stream = lease.arena, device.stream.cuda_stream
        self._session: Any = device.native.Session(device.index, stream, arena.next, arena.end, arena.gap, arena.grow)
        lease.idle = self._session.idle
        calls = self._eager_calls(frozenset(eager), collectives)
        self._observer = Observer(self._session.nodes, device.native.wipe_stack, calls)
        self._bodies = Bodies(self._session.nodes, run_inside)
        self._random = (0, 0)

    def record(self) -> Recording:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        if calls_operators(self._fn):
            torch.cuda.current_blas_handle()  # cannot be made during a capture, and takes 66 MB of device memory
        clear_cublas_workspaces()
        try:
            with self._on_side_stream():
                returned = self._run(graph)
        finally:
            clear_cublas_workspaces()
        try:
            recording = self._read(graph, returned)
        except CaptureError as error:
            if error.launch is not None:
                self._observer.fail_at(error.launch)
            raise
        returned.clear()  # in case a debugger or a memory checker keeps frames alive
        self._refuse_survivors()
        return recording

    # -- running the region ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    @unbroken
    def _on_side_stream(self) -> Iterator[None]:
        """Run the body on the capture stream, with a turn at the generator's seed and offset on the device: captures
        share that memory in torch 2.11, and each capture and each replay refills it. The stream waits for the previous
        turn, and the next turn for the work of this one.

        Raises CaptureError (``generator-busy``) during another turn that may run Python code: waiting for it could
        take forever.
        """
        device = self._device
        current = torch.cuda.current_stream(device.index)
        device.stream.wait_stream(current)
        try:
            with device.native.RandomTurn(device.index, device.stream.cuda_stream) as mine:
                if not mine:
                    raise CaptureError("generator-busy", "another capture or replay fills the generator's memory")
                torch.cuda.set_stream(device.stream)
                yield
        finally:
            torch.cuda.set_stream(current)
            current.wait_stream(device.stream)

    def _run(self, graph: torch.cuda.CUDAGraph) -> list[Any]:
        def run() -> Any:
            with _recording(graph, self._session, self._device):
                seed, offset, _ = self._device.native.random_memory(self._device.index)
                self._random = int(seed), int(offset)
                with observing(self._observer, self._fn) as region, self._bodies.noted():
                    return region(list(self._arguments))

        def explain(error: Exception) -> tuple[str, str]:
            where = f"{self._observer.failed}: " if self._observer.failed else ""
            return "capture-failed", f"{where}{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

        return run_region(run, explain)

    # -- reading what was captured ----------------------------------------------------------------------------------

    def _read(self, graph: torch.cuda.CUDAGraph, returned: Sequence[Any]) -> Recording:
        device = self._device
        found = handles(device.driver, graph.raw_cuda_graph())
        nodes, launches = read_nodes(device.driver, found, collectives=self._collectives)
        idle = [index for index, node in enumerate(nodes) if isinstance(node, EventNode)]
        phases = phases_of(read_edges(graph.raw_cuda_graph()), found, idle)
        pieces = enumerate(self._session.pieces())
        pool = [Allocation(AllocationKind.POOL, i, address, nbytes, born) for i, (address, nbytes, born, _) in pieces]
        own = [*self._inputs, *pool]
        described = _Returned(self._arguments, self._constants, own)
        outputs = describe_outputs(returned, described)
        everything = (*own, *described.empty, *self._fixed())
        explained = with_calls(launches, self._observer.spans, everything, self._random)
        known = with_unowned(device.driver, explained, everything, self._lease.arena.covers, device.arenas.covers)
        merged = with_eager(known, nodes, phases, everything, self._observer.eager)
        payload = CudaCapture(
            graph,
            merged.nodes,
            self._arguments,
            device.index,
            self._draws(graph, known),
            (self._fn, *self._constants.values()),
            self._lease,
            self._random,
        )
        sensitive = frozenset(described.offset_sensitive | self._sensitive(own))
        scratch = device.arenas.scratch(device.stream.cuda_stream)
        facts = (merged.launches, merged.allocations, outputs, payload, sensitive, ALIGNMENT)
        python = tuple(self._observer.python)
        more: dict[str, Any] = {"phases": merged.phases, "python": python, "device": "cuda"}
        more["nests"] = tuple(each.moved(merged.place(each.bounds[0])) for each in self._bodies.nests)
        return Recording(*facts, out_of_range_pointers=True, scratch=scratch, **more)

    def _eager_calls(self, chosen: Collection[str], collectives: bool) -> EagerCalls:
        """Callbacks with which this capture records eager calls."""
        device = self._device
        index = device.index

        def is_constant(tensor: torch.Tensor) -> bool:
            address = tensor.untyped_storage().data_ptr()
            if not tensor.numel() or self._lease.arena.covers(address):
                return False
            if all(address != constant.untyped_storage().data_ptr() for constant in self._constants.values()):
                raise CaptureError("foreign-address", "an eager call is given memory that is nobody's")
            return True

        def allocate(fake: torch.Tensor) -> torch.Tensor:
            if fake.device.type != "cuda" or fake.device.index not in (None, index):
                raise CaptureError("foreign-device", f"an eager call returns a tensor on {fake.device}")
            return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=torch.device("cuda", index))

        def record(call: OperatorCall) -> RecordedCall:
            drawn = int(device.native.random_memory(index)[2])
            tensors = [value for value in self._arguments if isinstance(value, torch.Tensor)]
            for tensor in call.tensors():  # at replay, a view of the caller's own storage
                base = tensor.untyped_storage().data_ptr()
                sharing = (each for each in tensors if each.untyped_storage().data_ptr() == base)
                if any(each.element_size() != tensor.element_size() for each in sharing):
                    self._observer.absolute.append(tensor.data_ptr())
            return record_call(device.native, call, self._arguments, is_constant, allocate, drawn)

        return EagerCalls(chosen, not collectives, record, lambda: len(self._session.pieces()))

    def _draws(self, graph: torch.cuda.CUDAGraph, launches: Sequence[Launch]) -> bool:
        """True if a launch draws random numbers, or the capture advanced the generator."""
        return any(launch.random for launch in launches) or bool(self._device.native.advances(graph))

    def _fixed(self) -> list[Allocation]:
        """Memory that never moves: the module's constants, then the generator's seed and offset."""
        places = [(t.data_ptr(), extent(t)) for t in self._constants.values()]
        places += [(address, 8) for address in self._random]
        return [Allocation(AllocationKind.CONSTANT, i, *place) for i, place in enumerate(places)]

    def _sensitive(self, own: Sequence[Allocation]) -> set[int]:
        """Arguments whose offset from the start of their storage is baked in."""
        addresses = AddressMap(own)
        owners = [addresses.inside(address) for address in self._observer.absolute]
        return {owner.index for owner in owners if owner is not None and owner.kind is AllocationKind.INPUT}

    def _refuse_survivors(self) -> None:
        """Raise CaptureError if memory of the capture is still held: its holder would take it for real memory."""
        if not self._session.idle():
            gc.collect()
        survivors = [
            (nbytes, born)
            for i, (address, nbytes, born, alive) in enumerate(self._session.pieces())
            if alive and not self._observer.sent(Allocation(AllocationKind.POOL, i, address, nbytes, born))
        ]
        if not survivors:
            return
        makers = [span for _, born in survivors for span in self._observer.makers(born)]
        if makers:
            names = " or ".join(dict.fromkeys(span.name for span in makers))
            self._observer.fail(names, merged([span.origin for span in makers]))
        sizes = ", ".join(f"{nbytes} bytes" for nbytes, _ in survivors[:3]) + (", …" if len(survivors) > 3 else "")
        raise CaptureError("survivor", f"{len(survivors)} allocations of the region outlive its capture: {sizes}")


@contextlib.contextmanager
@unbroken
def _recording(graph: torch.cuda.CUDAGraph, session: Any, device: DeviceCapture) -> Iterator[None]:
    """Capture the current stream in the block, with this thread's allocations from ``session``. The capture ends
    however the block is left. Raises RuntimeError if the capture is broken by then."""
    pool = torch.cuda.graph_pool_handle()  # stays empty; needed to end a broken capture
    end = partial(_end, graph, session, partial(device.native.end_broken_capture, device.index, pool))
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        session.begin()
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the original error is already being raised
            end()
        raise
    end()


@unbroken
def _end(graph: torch.cuda.CUDAGraph, session: Any, end_broken: Callable[[], None]) -> None:
    """End the capture. After a broken one, torch's allocators and the generator behave as if it went on: ``end_broken``
    repairs the allocators, and an empty capture the generator."""
    try:
        session.end()
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")  # a region may launch nothing
            try:
                graph.capture_end()
            except RuntimeError:
                end_broken()
                repair = torch.cuda.CUDAGraph(keep_graph=True)
                repair.capture_begin(capture_error_mode="thread_local")
                repair.capture_end()
                raise


# -- outputs of a region -------------------------------------------------------------------------------------------


class _Returned:
    """Memory of a region's outputs: a ``CaptureMemory``. ``empty`` are allocations made up for outputs without
    memory."""

    def __init__(
        self, arguments: Sequence[Any], constants: Mapping[str, torch.Tensor], allocations: Sequence[Allocation]
    ) -> None:
        self.arguments, self.constants = arguments, constants
        self.offset_sensitive: set[int] = set()
        self.empty: list[Allocation] = []
        self._addresses = AddressMap(allocations)
        self._pool = sum(a.kind is AllocationKind.POOL for a in allocations)

    def place(self, tensor: torch.Tensor) -> tuple[Allocation, int]:
        """See ``CaptureMemory.place``."""
        if type(tensor) not in _TENSORS or tensor.device.type != "cuda" or tensor.layout is not torch.strided:
            raise CaptureError("unsupported-output", f"the region returned {type(tensor).__name__}")
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError("unsupported-output", "a lazily conjugated or negated tensor")
        base, start = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.element_size()
        if not base:
            self.empty.append(Allocation(AllocationKind.POOL, self._pool + len(self.empty), 0, 0))
            return self.empty[-1], start
        address = base + start
        owner = self._addresses.inside(address) or self._addresses.inside(base) or self._empty_argument(base)
        if owner is None:
            raise CaptureError("unsupported-output", "a view of a constant, or memory of nobody's")
        distance = address - owner.address
        if tensor.numel() and not 0 <= distance <= owner.nbytes - extent(tensor):
            raise CaptureError("unsupported-output", "a tensor that reaches beyond its allocation")
        return owner, distance

    def _empty_argument(self, base: int) -> Allocation | None:
        """The argument without elements whose storage begins at ``base``."""
        for argument in self.arguments:
            if isinstance(argument, torch.Tensor) and argument.untyped_storage().data_ptr() == base:
                start = base + int(argument.storage_offset()) * argument.element_size()
                return self._addresses.empty(start) or self._addresses.inside(start)
        return None
