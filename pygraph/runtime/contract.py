"""The contract between regions and whatever captures and replays them: programs, executables, drivers.

Everything above a driver (slots, layout, comparison, life of a region) is written against this file only.
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
"""Within ``with scratch():``, which may be entered any number of times, this thread allocates scratch memory."""


uses = ctypes.c_uint64()
"""Number of replays that this process has begun. Native regions count them, without any Python code."""


Answer = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Stands in for the eager calls of one replay, in order. It takes an operator's tensors, each listed once, and returns
the tensors to use as its results."""


class Executable:
    """A captured region, ready to be replayed any number of times. ``kept``: objects into which the native ``region``
    points. ``nbytes``: memory of the device that it takes, as estimated by the driver.

    ``replay`` is the native region's own method, with no Python code in between. It runs the region on ``args`` and
    returns fresh outputs. It empties the list, and releases each argument as soon as it is dead. It returns None, with
    nothing written and ``args`` unchanged, if these do not match the capture (scalars match by type and by bits), or if
    the region is being replayed already, by another thread or around this call. Raises ReplayError and kernel errors.
    """

    __slots__ = ("__weakref__", "_kept", "_region", "nbytes", "replay")

    replay: Callable[[list[Any]], list[Any] | None]

    def replay_answered(self, args: list[Any], answer: Answer) -> list[Any] | None:
        """Replay, with each eager call answered by ``answer`` instead of the operator."""
        outputs: list[Any] | None = self._region.replay_answered(args, answer)
        return outputs

    def __init__(self, region: Any, kept: Sequence[object] = (), *, nbytes: int) -> None:
        self._region = region
        self._kept = tuple(kept)
        self.nbytes = nbytes
        self.replay = region.replay

    @property
    def used(self) -> int:
        """Number of the last replay, as counted by ``uses``."""
        number: int = self._region.used
        return number

    def close(self) -> None:
        """Free everything, at the end of a replay if one is under way. Later replays return None."""
        self._region.close()
        self._kept = ()


class Timer(Protocol):
    """Times work that is submitted to a stream after the timer is made, by the clock of the stream's device."""

    def stop(self) -> None:
        """End the measurement: later work does not count."""

    def seconds(self) -> float | None:
        """Time that the work took, once it is over; None before. Does not wait."""

    def since(self, earlier: Any) -> float:
        """Seconds from the start of ``earlier``, a timer of the same device, to the start of this. Both are over."""


class Driver(Protocol):
    """Captures and replays regions on one kind of device. ``parallel``: launches may run side by side there."""

    @property
    def parallel(self) -> bool: ...

    def unready(self) -> Refusal | None:
        """Reason why nothing can be captured yet, such as a native library that is being built; None once the driver is
        ready. Waits for a build only within ``waiting_for_builds``. All methods below wait for it."""

    def no_collectives(self) -> Refusal | None:
        """Reason why captures cannot hold functional collectives, so that replays call them; None if they can."""

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
        """Run ``fn``, the function of a region, on the thread that captures or compares another region."""

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay. Raises CaptureError if that is not possible."""

    def generator(self, program: Program) -> torch.Generator | None:
        """The generator from which ``program`` draws when replayed, and its function when run uncaptured; None if they
        draw nothing. A capture draws nothing."""

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Set the state of ``generator`` to ``to``, and return the one before, so that no other thread draws in
        between. If ``expected`` is given, set the state only if it equals that."""

    def current_device(self) -> torch.device:
        """Device on which regions without tensor arguments are captured."""

    def memory_limit(self, device: torch.device) -> int:
        """Bytes that all captures on ``device`` may take if the user sets no limit: a tenth of its memory."""

    def spare_bytes(self) -> int:
        """Bytes of the current device's memory that temporary copies may take."""

    def synchronise(self, device: torch.device | None) -> bool:
        """Wait until ``device`` (None: the current one) has done what the caller submitted to its current stream.
        Returns False, with nothing done, if that stream is being captured."""

    def timer(self, device: torch.device | None) -> Timer | None:
        """Start a timer on the current stream of ``device`` (None: the current one). None if that stream is being
        captured, or the driver is not ``parallel``."""

    def scratch_pool(self, args: Sequence[Any]) -> AbstractContextManager[ScratchPool]:
        """Memory on the device of ``args`` for temporary tensors. On exit it returns to the system, except for tensors
        that are still alive."""


class NativeDriver:
    """Base class of drivers with a native half. ``build.load`` finds that half, or builds it."""

    build: ModuleType

    @functools.cached_property
    def _native(self) -> ModuleType:
        """The native half, which counts in ``uses``. Waits for it; raises CaptureError (``native-unavailable``)."""
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
    """A driver for devices of a type, such as ``cpu``, or None if there is none. Raises CaptureError if it cannot work
    here."""
    package = _PACKAGES.get(device_type)
    driver: Driver | None = None if package is None else import_module(package).make_driver()
    return driver


def start_build(device_types: Collection[str], folder: str | None) -> None:
    """Begin to build the native half of the driver that a graph on these types of devices needs. Returns at once."""
    package = next((package for kind, package in _PACKAGES.items() if kind in device_types), None)
    if package is not None:
        import_module(package).build.load.start(folder)
