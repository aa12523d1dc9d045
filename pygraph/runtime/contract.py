"""The contract between regions and whatever captures and replays them: programs, executables, drivers.

Everything above a driver (slots, layout, comparison, life of a region) is written against this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.recording import AllocationKind, Output, OutputKind, Recording

__all__ = [
    "Driver",
    "Executable",
    "Layout",
    "NonPointerWord",
    "Program",
    "ScratchPool",
    "Slot",
    "add_arguments",
    "add_outputs",
    "check_program",
    "describe_outputs",
    "make_driver",
    "start_build",
]

ScratchPool = Callable[[], AbstractContextManager[object]]
"""Within ``with scratch():``, entered as often as one likes, what this thread allocates is scratch memory."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A word that holds an address: word ``word`` of launch ``launch`` is ``offset`` bytes into an allocation."""

    launch: int
    word: int
    kind: AllocationKind
    index: int
    offset: int

    @property
    def key(self) -> tuple[AllocationKind, int]:
        """The name of the allocation."""
        return (self.kind, self.index)


@dataclass(frozen=True, slots=True)
class NonPointerWord:
    """A word that reads as an address, but is no operand's: a number, or bytes that nobody set. It stays as captured;
    with ``scratch``, it an address of scratch memory replaces it. ``call`` names the call that its launch came from."""

    launch: int
    word: int
    scratch: bool = False
    call: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where POOL allocations lie at replay: at ``offsets[index]`` bytes of one workspace of ``nbytes``; those of
    outputs (``fresh``) are allocated anew for each call."""

    nbytes: int
    offsets: dict[int, int]
    fresh: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """All that a driver needs to replay: the recording, which of its words are addresses, and where memory lies.

    Addresses of arguments stay congruent to the captured ones by ``alignment`` bytes, since kernels load vectors; an
    argument that is only read is copied otherwise. ``non_pointers`` are words that read as addresses and are no slots.
    Somebody else keeps the arguments ``held`` beyond the call, so that to let go of them early gains nothing, and those
    ``lent`` perhaps. ``name`` is what profilers call a replay.
    """

    recording: Recording
    slots: tuple[Slot, ...]
    layout: Layout
    non_pointers: tuple[NonPointerWord, ...] = ()
    held: frozenset[int] = frozenset()
    lent: frozenset[int] = frozenset()
    name: str = ""
    alignment: int = 16

    @property
    def written(self) -> frozenset[int]:
        """Positions of the arguments that a launch may write: exact where uses are known, else all that it is given and
        that is not known to be read only."""
        inputs, launches = [slot for slot in self.slots if slot.kind is AllocationKind.INPUT], self.recording.launches
        return frozenset(slot.index for slot in inputs if launches[slot.launch].may_write(slot.word, slot.key))


class Executable:
    """A captured region, ready to be replayed any number of times. ``kept`` is what the native ``region`` points into.

    ``replay`` is the native region's own method: there is no Python on the way. It runs the region on ``args`` and
    returns fresh outputs. The list is emptied, and each argument let go of as soon as it is dead. It returns None, with
    nothing written and ``args`` as it was, when these are not what was captured (scalars match by type and by bits), or
    when another replay of it is under way, of another thread or around it. Raises ReplayError, or what a kernel raised.
    """

    __slots__ = ("__weakref__", "_kept", "_region", "replay")

    replay: Callable[[list[Any]], list[Any] | None]

    def __init__(self, region: Any, kept: Sequence[object] = ()) -> None:
        self._region = region
        self._kept = tuple(kept)
        self.replay = region.replay

    def close(self) -> None:
        """Give everything back, at the end of a replay that is under way; replaying afterwards returns None."""
        self._region.close()
        self._kept = ()


class Driver(Protocol):
    """Captures and replays regions on one kind of device."""

    def capture(self, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> Recording:
        """Record ``fn`` on stand-ins for ``args``, disjoint from those of every earlier capture that is alive. Nothing
        executes. Raises CaptureError."""

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay. Raises CaptureError when it cannot be."""

    def generator(self, program: Program) -> torch.Generator | None:
        """The generator that ``program`` draws from when it is replayed, and its function when it runs uncaptured; None
        if it draws nothing. A capture draws nothing."""

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Set the state of ``generator``, if it is ``expected`` where that is given, and return the one before, so that
        no other thread draws in between."""

    def spare_bytes(self) -> int:
        """Bytes of the current device's memory that copies may take for a moment."""

    def synchronise(self, device: torch.device | None) -> bool:
        """Wait until ``device`` (None: the current one) has done what the caller submitted to its current stream.
        False, with nothing done, where that stream is being captured."""

    def scratch_pool(self, args: Sequence[Any]) -> AbstractContextManager[ScratchPool]:
        """Memory on the device of ``args`` for what nobody keeps; leaving gives it back to the system, but for what is
        alive even then."""

    def release_cached(self, device: torch.device | None) -> None:
        """Give back to the system what uncaptured runs on ``device`` (None: the current one) have left for later ones,
        such as workspaces of libraries and cached memory. What is submitted to the current stream is waited for."""


# -- what both drivers do with a program -------------------------------------------------------------------------------


def check_program(program: Program) -> None:
    """Raise CaptureError (``invalid-program``) unless intermediates lie in the workspace, aligned as recorded, and the
    fresh allocations are those of the outputs."""
    layout, recording, alignment = program.layout, program.recording, program.recording.alignment
    pool = {a.index: a for a in recording.allocations if a.kind is AllocationKind.POOL}
    for index, offset in layout.offsets.items():
        if index not in pool or offset < 0 or offset % alignment or offset + pool[index].nbytes > layout.nbytes:
            raise CaptureError("invalid-program", f"allocation {index} at byte {offset} of {layout.nbytes}")
    outputs = {o.index for o in recording.outputs if o.kind is OutputKind.FRESH}
    if not outputs <= set(layout.fresh) or not set(layout.fresh) <= set(pool):
        raise CaptureError("invalid-program", "the fresh allocations are not those of the outputs")


def add_arguments(region: Any, program: Program, arguments: Sequence[Any]) -> dict[int, int]:
    """Tell ``region`` what each argument has to be. Returns argument ▸ number of the source of its address.
    ``arguments`` are the stand-ins that were captured."""
    recording, written = program.recording, program.written
    allocations = {a.index: a for a in recording.allocations if a.kind is AllocationKind.INPUT}
    sources: dict[int, int] = {}
    for index, argument in enumerate(arguments):
        if not isinstance(argument, torch.Tensor):
            sources[index] = region.add_value_argument(argument)
            continue
        offset = argument.storage_offset() if index in recording.offset_sensitive else -1
        allocation = allocations[index]
        sources[index] = region.add_tensor_argument(
            argument, index in written, offset, allocation.nbytes, program.alignment, allocation.address
        )
    return sources


def describe_outputs(returned: Sequence[Any], describe: Callable[[Any], Output]) -> tuple[Output, ...]:
    """What a region ``returned``: each value by ``describe``, unless the same tensor came before."""
    first: dict[int, int] = {}
    outputs: list[Output] = []
    for position, value in enumerate(returned):
        before = first.setdefault(id(value), position)
        again = before < position and isinstance(value, torch.Tensor)
        outputs.append(Output(OutputKind.SAME, before) if again else describe(value))
    return tuple(outputs)


def add_outputs(region: Any, kinds: Any, program: Program) -> None:
    """Tell ``region`` what it returns. ``kinds`` is its enumeration of kinds of outputs."""
    for output in program.recording.outputs:
        fresh = output.kind is OutputKind.FRESH
        index = program.layout.fresh.index(output.index) if fresh else output.index
        place = output.offset, list(output.size), list(output.stride), output.dtype
        region.add_output(kinds.__members__[output.kind.name], index, *place, output.value)


# -- which drivers there are -------------------------------------------------------------------------------------------

_PACKAGES = {"cuda": "pygraph.runtime.cuda", "cpu": "pygraph.runtime.host"}
"""The package of the driver for each type of device, those that the others work for first. A package has
``make_driver``, and ``build.load``, whose ``start`` builds its native half in the background."""


def make_driver(device_type: str) -> Driver | None:
    """A driver for devices of a type, such as ``cpu``, or None when there is none. Raises CaptureError when it cannot
    work here."""
    package = _PACKAGES.get(device_type)
    driver: Driver | None = None if package is None else import_module(package).make_driver()
    return driver


def start_build(device_types: Collection[str], folder: str | None) -> None:
    """Begin to build the native half of the driver that a graph on these types of devices needs. Returns at once."""
    package = next((package for kind, package in _PACKAGES.items() if kind in device_types), None)
    if package is not None:
        import_module(package).build.load.start(folder)
