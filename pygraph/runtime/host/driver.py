"""The host driver: captures regions of Inductor's CPU programs and replays them in one native call each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.contract import Executable, Program, ScratchPool, add_arguments, add_outputs, check_program
from pygraph.runtime.host import build
from pygraph.runtime.host.capture import capture_region
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.host.recorder import Recorder
from pygraph.runtime.recording import AllocationKind, Recording

__all__ = ["HostDriver"]


def _make_graph(native: ModuleType, program: Program, capture: Recorder) -> Any:
    """The native graph of ``program``. Raises CaptureError when an address would not be replaced, or lie outside."""
    check_program(program)
    _check_slots(program, capture)
    graph = native.HostGraph(program.layout.nbytes)
    graph.set_name(program.name)
    sizes = {a.index: a.nbytes for a in program.recording.allocations if a.kind is AllocationKind.POOL}
    arguments = add_arguments(graph, program, capture.arguments)
    places = {(AllocationKind.INPUT, index): (source, 0) for index, source in arguments.items()}
    for index, offset in program.layout.offsets.items():
        places[AllocationKind.POOL, index] = 0, offset  # the first source is the workspace
    for index in program.layout.fresh:
        places[AllocationKind.POOL, index] = graph.add_fresh(sizes[index]), 0
    for launch, payload in zip(program.recording.launches, capture.payloads, strict=True):
        if isinstance(payload, Kernel):
            graph.add_kernel(payload.entry, launch.words, [p is Parameter.FLOAT for p in payload.parameters])
        else:
            graph.add_operator(*payload)
    for slot in program.slots:
        if slot.key not in places:
            raise CaptureError("invalid-program", f"a slot names {slot.kind.value} {slot.index}, which has no place")
        source, start = places[slot.key]
        graph.add_patch(slot.launch, slot.word, source, start + slot.offset)
    add_outputs(graph, native.OutputKind, program)
    for pair in sorted(capture.exclusive):
        graph.add_exclusive(*pair)
    return graph


def _check_slots(program: Program, capture: Recorder) -> None:
    """Every address of the capture is replaced, and no number: it lies in memory that is not there at replay."""
    patched = {(slot.launch, slot.word) for slot in program.slots}
    moving = [a for a in program.recording.allocations if a.kind is not AllocationKind.CONSTANT]
    for launch, payload in zip(program.recording.launches, capture.payloads, strict=True):
        parameters = payload.parameters if isinstance(payload, Kernel) else [Parameter.WRITE] * len(launch.words)
        for word, (value, parameter) in enumerate(zip(launch.words, parameters, strict=True)):
            if (launch.index, word) in patched:
                if not parameter.is_pointer:
                    raise CaptureError("invalid-program", f"word {word} of {launch.name} is no address")
            elif parameter.is_pointer and value and any(a.covers(value) for a in moving):
                raise CaptureError("invalid-program", f"word {word} of {launch.name} is an address without a slot")


class HostDriver:
    """``Driver`` for regions on the CPU. Raises CaptureError (``native-unavailable``) where there is no compiler."""

    def __init__(self) -> None:
        self._native: ModuleType = build.load()

    def capture(self, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> Recording:
        """Record ``fn``. The payload is a Recorder; dropping it gives the address space back."""
        return capture_region(self._native, fn, args)

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay. The executable outlives the recording."""
        payload = program.recording.payload
        if not isinstance(payload, Recorder):
            raise CaptureError("foreign-recording", f"a payload of type {type(payload).__name__}")
        libraries = (launch.library for launch in payload.payloads if isinstance(launch, Kernel))
        return Executable(_make_graph(self._native, program, payload), (*payload.constants.values(), *libraries))

    def generator(self, program: Program) -> torch.Generator | None:
        """The default CPU generator, if a launch draws."""
        return torch.default_generator if any(launch.random for launch in program.recording.launches) else None

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        before: torch.Tensor = self._native.exchange_state(generator, to, expected)
        return before

    def spare_bytes(self) -> int:
        """A fixed amount: what is free on a host is not one program's to take."""
        return 1 << 30

    def synchronise(self, device: torch.device | None) -> bool:  # noqa: ARG002
        """Nothing to wait for: a call on the host returns when it is done."""
        return True

    def scratch_pool(self, args: Sequence[Any]) -> contextlib.AbstractContextManager[ScratchPool]:  # noqa: ARG002
        """Ordinary memory: the system gets back what is freed on the CPU."""
        return contextlib.nullcontext(contextlib.nullcontext)

    def release_cached(self, device: torch.device | None) -> None:
        """Nothing is kept on the CPU."""
