"""The contract between regions and whatever captures and replays them: programs, executables, drivers.

Everything above a driver (slots, layout, comparison, life of a region) is written against this file alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch

from pygraph.program.program import Program
from pygraph.program.recording import Recording
from pygraph.runtime.provenance import Refusal

ScratchPool = Callable[[], AbstractContextManager[object]]
"""Within ``with scratch():``, entered as often as one likes, what this thread allocates is scratch memory."""


uses = ctypes.c_uint64()
"""Replays that this process has begun. Native regions count them: it takes no Python code on the way."""


Answer = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Stands for the eager calls of one replay, in order. It is given an operator's tensors, each named once, and returns
what is taken for its results."""


class Executable:
    """A captured region, ready to be replayed any number of times. ``kept`` is what the native ``region`` points into.
    ``nbytes``: memory of the device that it takes, by the driver's estimate.

    ``replay`` is the native region's own method: there is no Python on the way. It runs the region on ``args`` and
    returns fresh outputs. The list is emptied, and each argument let go of as soon as it is dead. It returns None, with
    nothing written and ``args`` as it was, when these are not what was captured (scalars match by type and by bits), or
    when another replay of it is under way, of another thread or around it. Raises ReplayError, or what a kernel raised.
    """

    __slots__ = ("__weakref__", "_kept", "_region", "nbytes", "replay")

    replay: Callable[[list[Any]], list[Any] | None]

    def replay_answered(self, args: list[Any], answer: Answer) -> list[Any] | None:
        """Replay, with each eager call answered by ``answer`` in the operator's place."""
        outputs: list[Any] | None = self._region.replay_answered(args, answer)
        return outputs

    def __init__(self, region: Any, kept: Sequence[object] = (), *, nbytes: int) -> None:
        self._region = region
        self._kept = tuple(kept)
        self.nbytes = nbytes
        self.replay = region.replay

    @property
    def used(self) -> int:
        """The number in ``uses`` of the last replay."""
        number: int = self._region.used
        return number

    def close(self) -> None:
        """Give everything back, at the end of a replay that is under way; replaying afterwards returns None."""
        self._region.close()
        self._kept = ()


class Timer(Protocol):
    """Times what is submitted to a stream, by the clock of its device, from when it is made on."""

    def stop(self) -> None:
        """End the measurement: later work does not count."""

    def seconds(self) -> float | None:
        """How long that took, once it is over; None before. Nothing waits."""

    def since(self, earlier: Any) -> float:
        """Seconds from the begin of ``earlier``, a timer of the same device, to that of this one. Both are over."""


class Driver(Protocol):
    """Captures and replays regions on one kind of device. ``parallel``: whether launches may run side by side there."""

    @property
    def parallel(self) -> bool: ...

    def unready(self) -> Refusal | None:
        """Why nothing can be captured yet, such as a native library that is being built; None once everything is there.
        Waits for what is being built only within ``waiting_for_builds``. Everything else below waits for it."""

    def no_collectives(self) -> Refusal | None:
        """Why no capture holds functional collectives, so that replays call them; None where one may."""

    def held(self) -> Any:
        """The native ``Held``, which reads what a graph holds. Raises CaptureError (``native-unavailable``)."""

    def capture(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        args: Sequence[Any],
        eager: Collection[str] = (),
        *,
        collectives: bool = False,
    ) -> Recording:
        """Record ``fn`` on stand-ins for ``args``, disjoint from those of every earlier capture that is alive. Replays
        call the operators ``eager`` (without overloads), and those that no driver captures: among them functional
        collectives, unless ``collectives`` are to be captured and the driver can. Nothing executes. Raises
        CaptureError."""

    def run_inside(self, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any]) -> Sequence[Any]:
        """Run ``fn``, the function of a region, on the thread that captures another one, or compares it."""

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

    def current_device(self) -> torch.device:
        """Where regions are captured that are given no tensor."""

    def memory_limit(self, device: torch.device) -> int:
        """Bytes that captures on ``device`` may take together where the user sets no limit: a tenth of its memory."""

    def spare_bytes(self) -> int:
        """Bytes of the current device's memory that copies may take for a moment."""

    def synchronise(self, device: torch.device | None) -> bool:
        """Wait until ``device`` (None: the current one) has done what the caller submitted to its current stream.
        False, with nothing done, where that stream is being captured."""

    def timer(self, device: torch.device | None) -> Timer | None:
        """Start a timer on the current stream of ``device`` (None: the current one). None if that stream is being
        captured, or the driver is not ``parallel``."""

    def scratch_pool(self, args: Sequence[Any]) -> AbstractContextManager[ScratchPool]:
        """Memory on the device of ``args`` for what nobody keeps; leaving gives it back to the system, but for what is
        alive even then."""


class NativeDriver:
    """The part that drivers with a native half have in common. ``build.load`` finds that half, or builds it."""

    build: ModuleType

    @functools.cached_property
    def _native(self) -> ModuleType:
        """Counts in ``uses``. Waits for the native half; raises CaptureError (``native-unavailable``)."""
        native: ModuleType = self.build.load()
        native.share_uses(uses)
        return native

    def unready(self) -> Refusal | None:
        refusal: Refusal | None = self.build.load.unready()
        return refusal

    def held(self) -> Any:
        return self._native.Held

    def run_inside(self, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any]) -> Sequence[Any]:
        return fn(args)


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
