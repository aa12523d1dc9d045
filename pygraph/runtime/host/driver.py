"""The host driver: captures regions of Inductor's CPU programs and replays them in one native call each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.program.program import GraphSegment, Program, Slot
from pygraph.program.recording import EagerCall, Launch, Recording
from pygraph.program.verify import verify
from pygraph.runtime.contract import Executable, NativeDriver, ScratchPool
from pygraph.runtime.description import describe_region
from pygraph.runtime.host import build
from pygraph.runtime.host.capture import capture_region, run_inside
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.host.recorder import Payload, Recorder
from pygraph.runtime.provenance import Refusal

_GRAPH_BYTES, _LAUNCH_BYTES, _WORD_BYTES = 16 << 10, 1 << 10, 1 << 9
"""Most bytes of an executable; of each launch of it; and of each word of that, which may stand for a tensor."""


def _host_bytes(program: Program) -> int:
    """Bytes that an executable of ``program`` takes at most."""
    words = [len(launch.words) for launch in program.recording.launches]
    return _GRAPH_BYTES + _LAUNCH_BYTES * len(words) + _WORD_BYTES * sum(words)


def _make_graph(native: ModuleType, program: Program, capture: Recorder) -> Any:
    """The native graph of ``program``. Raises CaptureError when it breaks a rule, or would replace a number."""
    verify(program)
    _check_slots(program, capture)
    launches: list[int] = []
    first: list[int] = []
    for step in (step for step in program.steps if isinstance(step, GraphSegment)):
        first.append(len(launches))
        captured, order = range(step.begin, step.end), program.order
        launches += captured if order is None else order.sequence(step.begin, step.end)
    numbers = {launch: number for number, launch in enumerate(launches)}  # none of an eager call

    def place(slot: Slot) -> tuple[int, int] | None:
        return (numbers[slot.launch], slot.word) if slot.launch in numbers else None

    return native.HostGraph(
        describe_region(program, capture.arguments, place),
        launches=[_native_launch(native, program.recording.launches[i], capture.payloads[i]) for i in launches],
        first=first,
        exclusive=sorted(capture.exclusive),
    )


def _native_launch(native: ModuleType, launch: Launch, payload: Payload) -> Any:
    if isinstance(payload, Kernel):
        return native.Kernel(payload.entry, launch.words, [p is Parameter.FLOAT for p in payload.parameters])
    assert not isinstance(payload, EagerCall)
    return native.Operator(*payload)


def _check_slots(program: Program, capture: Recorder) -> None:
    """No number of a kernel is replaced by an address."""
    for slot in program.slots:
        payload = capture.payloads[slot.launch]
        if isinstance(payload, Kernel) and not payload.parameters[slot.word].is_pointer:
            raise CaptureError("invalid-program", f"word {slot.word} of {payload.name} is no address")


class HostDriver(NativeDriver):
    """``Driver`` for regions on the CPU. What needs the native half waits for it, and raises CaptureError
    (``native-unavailable``) where it cannot be built."""

    parallel, build = False, build

    def no_collectives(self) -> Refusal | None:
        """They run on threads of their own."""
        return Refusal("collective", "those of the CPU are not captured")

    def capture(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        args: Sequence[Any],
        eager: Collection[str] = (),
        *,
        collectives: bool = False,  # noqa: ARG002
    ) -> Recording:
        """Record ``fn``. The payload is a Recorder; dropping it gives the address space back."""
        return capture_region(self._native, fn, args, eager)

    def run_inside(self, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any]) -> Sequence[Any]:
        return run_inside(fn, args)

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay. The executable outlives the recording."""
        payload = program.recording.payload
        if not isinstance(payload, Recorder):
            raise CaptureError("foreign-recording", f"a payload of type {type(payload).__name__}")
        libraries = (launch.library for launch in payload.payloads if isinstance(launch, Kernel))
        graph, kept = _make_graph(self._native, program, payload), (*payload.constants.values(), *libraries)
        return Executable(graph, kept, nbytes=_host_bytes(program))

    def generator(self, program: Program) -> torch.Generator | None:
        """The default CPU generator, if a launch draws."""
        return torch.default_generator if any(launch.random for launch in program.recording.launches) else None

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        before: torch.Tensor = self._native.exchange_state(generator, to, expected)
        return before

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def memory_limit(self, device: torch.device) -> int:  # noqa: ARG002
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10

    def spare_bytes(self) -> int:
        """A fixed amount: what is free on a host is not one program's to take."""
        return 1 << 30

    def synchronise(self, device: torch.device | None) -> bool:  # noqa: ARG002
        """Nothing to wait for: a call on the host returns when it is done."""
        return True

    def timer(self, device: torch.device | None) -> None:
        """Nothing is parallel."""

    def scratch_pool(self, args: Sequence[Any]) -> contextlib.AbstractContextManager[ScratchPool]:  # noqa: ARG002
        """Ordinary memory: the system gets back what is freed on the CPU."""
        return contextlib.nullcontext(contextlib.nullcontext)
