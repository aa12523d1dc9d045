"""The host driver: captures regions of Inductor's CPU programs and replays them in one native call each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.driver import Executable, Program, ScratchPool
from pygraph.runtime.host import build
from pygraph.runtime.host.capture import capture_region
from pygraph.runtime.host.instantiate import make_graph
from pygraph.runtime.host.launches import HostCapture
from pygraph.runtime.identity import cpu_model
from pygraph.runtime.recording import Recording

__all__ = ["HostDriver", "HostExecutable"]


class HostExecutable:
    """A region ready for replay. ``replay`` is the native graph's own method: there is no Python on the way.

    A replay that finds another one of the same executable under way (of another thread, or around it) returns None.
    """

    __slots__ = ("__weakref__", "_graph", "_kept", "replay")

    replay: Callable[[list[Any]], list[Any] | None]

    def __init__(self, graph: Any, kept: Sequence[object]) -> None:
        self._graph = graph
        self._kept = tuple(kept)
        self.replay = graph.replay

    def close(self) -> None:
        """Give back everything that the executable holds; replaying afterwards returns None."""
        self._graph.close()
        self._kept = ()


_SPARE = 1 << 30


class HostDriver:
    """``Driver`` for regions on the CPU. Raises CaptureError (``native-unavailable``) where there is no compiler."""

    def __init__(self) -> None:
        self._native: ModuleType = build.load()

    def identity(self, device: torch.device | None) -> str:  # noqa: ARG002
        """The processor, and how many threads operators use."""
        return f"host: {cpu_model()}, {torch.get_num_threads()} threads"

    def capture(self, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> Recording:
        """Record ``fn``. The payload is a HostCapture; dropping it gives the address space back."""
        return capture_region(self._native, fn, args)

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay. The executable outlives the recording."""
        payload = program.recording.payload
        if not isinstance(payload, HostCapture):
            raise CaptureError("foreign-recording", f"a payload of type {type(payload).__name__}")
        return HostExecutable(make_graph(self._native, program, payload), (*payload.constants, *payload.libraries))

    def generator(self, program: Program) -> torch.Generator | None:
        """The default CPU generator, if a launch draws."""
        return torch.default_generator if any(launch.random for launch in program.recording.launches) else None

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Under the generator's own lock."""
        before: torch.Tensor = self._native.exchange_state(generator, to, expected)
        return before

    def spare_bytes(self) -> int:
        """A fixed amount: what is free on a host is not one program's to take."""
        return _SPARE

    def synchronise(self, device: torch.device | None) -> bool:  # noqa: ARG002
        """Nothing to wait for: a call on the host returns when it is done."""
        return True

    def scratch_pool(self, args: Sequence[Any]) -> contextlib.AbstractContextManager[ScratchPool]:  # noqa: ARG002
        """Ordinary memory: the system gets back what is freed on the CPU."""
        return contextlib.nullcontext(contextlib.nullcontext)

    def release_cached(self, device: torch.device | None) -> None:
        """Nothing is kept on the CPU."""
