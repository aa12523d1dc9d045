"""The contract between regions and whatever captures and replays them.

Two implementations answer it with the same tests: ``host`` (kernels of an Inductor CPU region) and ``cuda``.
Everything above a driver (keys, slots, layout, comparison, life of a region) is written against this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch

from pygraph.runtime.recording import AllocationKind, Recording

__all__ = [
    "Driver",
    "Executable",
    "GraphSegment",
    "Keepers",
    "Layout",
    "NonPointerWord",
    "Program",
    "ScratchPool",
    "Slot",
    "make_driver",
    "one_graph",
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
    with ``scratch``, it is an address of somebody's memory and is replaced by one of the recording's scratch memory.
    ``call`` names the call that its launch came from."""

    launch: int
    word: int
    scratch: bool = False
    call: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where POOL allocations lie at replay: at ``offsets[index]`` bytes of one workspace of ``nbytes``, unless fresh.

    ``fresh`` lists the allocations that outlive the replay (outputs): each is allocated anew for each call.
    """

    nbytes: int
    offsets: dict[int, int]
    fresh: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keepers:
    """Arguments that somebody else keeps beyond the call: ``held`` in any case, so that nothing is gained by letting go
    of them early, ``lent`` perhaps, so that it is not to be counted on."""

    held: frozenset[int] = frozenset()
    lent: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GraphSegment:
    """A step of a program: launches ``begin`` to ``end`` (excluded), launched as one graph."""

    begin: int
    end: int


def one_graph(recording: Recording) -> tuple[GraphSegment, ...]:
    """All launches of ``recording`` as one step."""
    return (GraphSegment(0, len(recording.launches)),)


@dataclass(frozen=True, slots=True)
class Program:
    """All that a driver needs to replay: the recording, which of its words are addresses, and where memory lies.

    ``steps`` run one after the other, and cover the launches in their order; a driver may cut one into several, to give
    memory back in between. ``alignment`` gives, for each tensor argument, the bytes that a replayed address must be
    congruent to the captured one by; an address that is not is copied first when the argument is only read.
    ``non_pointers`` lists the words that read as addresses and are not slots. ``keepers`` tells the arguments that
    outlive the call for others. ``name`` is what profilers call a replay.
    """

    recording: Recording
    slots: tuple[Slot, ...]
    layout: Layout
    steps: tuple[GraphSegment, ...]
    alignment: dict[int, int]
    non_pointers: tuple[NonPointerWord, ...] = ()
    keepers: Keepers = field(default_factory=Keepers)
    name: str = ""


class Executable(Protocol):
    """A captured region, ready to be replayed any number of times."""

    def replay(self, args: list[Any]) -> list[Any] | None:
        """Run the region on ``args`` and return fresh outputs, or None when ``args`` are not what was captured.

        The list is emptied, and each argument let go of as soon as it is dead: a caller who needs the arguments
        afterwards passes a copy of the list. None is returned before anything was written, with ``args`` as it was: the
        caller then runs the region uncaptured. Scalars match by type and by bits (``-0.0`` is not ``0.0``, ``True`` is
        not ``1``); an argument that is neither a plain tensor nor what was captured does not match. Raises ReplayError,
        or what a kernel raised, when a launch failed.
        """
        ...

    def close(self) -> None:
        """Give back everything that the executable holds; replaying afterwards returns None.

        While another thread replays, what that replay uses is given back when it ends.
        """
        ...


class Driver(Protocol):
    """Captures and replays regions on one kind of device."""

    def identity(self, device: torch.device | None) -> str:
        """All of the machine that times on ``device`` (None: the current one) depend on, as text: the same in every
        process on equal machines. Versions of torch and of PyGraph are left out."""
        ...

    def capture(self, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> Recording:
        """Record ``fn`` on stand-ins for ``args``, disjoint from those of every earlier capture that is alive.

        Nothing executes and ``args`` are read for their metadata only. Raises CaptureError with a reason code when
        the region does what a captured program cannot.
        """
        ...

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay. Raises CaptureError when it cannot be."""
        ...

    def generator(self, program: Program) -> torch.Generator | None:
        """The generator that ``program`` draws from when it is replayed, and its function when it runs uncaptured; None
        if it draws nothing. A capture draws nothing."""
        ...

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Set the state of ``generator``, and return the one before, so that no other thread draws in between.

        With ``expected``, the state is set only if it is that one.
        """
        ...

    def spare_bytes(self) -> int:
        """Bytes of the current device's memory that copies may take for a moment."""
        ...

    def synchronise(self, device: torch.device | None) -> bool:
        """Wait until ``device`` (None: the current one) has done what the caller submitted to its current stream.

        False, with nothing done, where waiting is not possible, since that stream is being captured.
        """
        ...

    def scratch_pool(self, args: Sequence[Any]) -> AbstractContextManager[ScratchPool]:
        """Memory on the device of ``args`` for what nobody keeps; leaving gives it back to the system.

        A tensor that is alive even then goes on being valid, and holds its part of it.
        """
        ...

    def release_cached(self, device: torch.device | None) -> None:
        """Give back to the system what uncaptured runs on ``device`` (None: the current one) have left for later ones,
        such as workspaces of libraries and cached memory. What is submitted to the current stream is waited for."""
        ...


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
