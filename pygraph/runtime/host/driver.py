"""The host driver: captures regions of Inductor's CPU programs and replays them in one native call each.

A program becomes a native graph, with every address of the capture accounted for.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.contract import (
    Executable,
    Program,
    ScratchPool,
    Slot,
    add_arguments,
    add_outputs,
    check_program,
)
from pygraph.runtime.host import build
from pygraph.runtime.host.capture import capture_region
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.host.recorder import HostCapture, OperatorLaunch
from pygraph.runtime.recording import Allocation, AllocationKind, Launch, Recording

__all__ = ["HostDriver", "add_launch", "make_graph", "native_word"]

_WORKSPACE = 0
"""The native number of the workspace; arguments and fresh allocations come after it."""


def make_graph(native: ModuleType, program: Program, capture: HostCapture) -> Any:
    """The native graph of ``program``. Raises CaptureError when an address would not be replaced, or lie outside."""
    check_program(program)
    _check_slots(program, capture)
    graph = native.HostGraph(program.layout.nbytes)
    graph.set_name(program.name)
    arguments = add_arguments(graph, program, capture.arguments, capture.written)
    fresh = _add_fresh(graph, program)
    for launch, payload in zip(program.recording.launches, capture.launches, strict=True):
        add_launch(graph, launch, payload)
    for slot in program.slots:
        source, delta = _place(program, slot, arguments, fresh)
        word = native_word(capture.launches[slot.launch], slot.word)
        graph.add_patch(slot.launch, word, source, delta)
    add_outputs(graph, native.OutputKind, program, capture.same)
    for pair in sorted(capture.exclusive):
        graph.add_exclusive(*pair)
    return graph


# -- checks -------------------------------------------------------------------------------------------------------


def _check_slots(program: Program, capture: HostCapture) -> None:
    """Every address of the capture has to be replaced: it lies in memory that is not there at replay."""
    patched = {(slot.launch, slot.word) for slot in program.slots}
    for launch, payload in zip(program.recording.launches, capture.launches, strict=True):
        for word in _addresses(launch, payload):
            if (launch.index, word) in patched:
                continue
            if _is_moving(program.recording.allocations, launch.words[word]):
                raise CaptureError("invalid-program", f"word {word} of {launch.name} is an address without a slot")


def _addresses(launch: Launch, payload: Kernel | OperatorLaunch) -> list[int]:
    """The words of ``launch`` that are addresses."""
    if isinstance(payload, Kernel):
        return [i for i, p in enumerate(payload.parameters) if p.is_pointer and launch.words[i]]
    return [i for i, word in enumerate(launch.words) if word]


def _is_moving(allocations: Sequence[Allocation], word: int) -> bool:
    return any(a.kind is not AllocationKind.CONSTANT and a.covers(word) for a in allocations)


# -- parts --------------------------------------------------------------------------------------------------------


def _add_fresh(graph: Any, program: Program) -> dict[int, int]:
    """POOL allocation that outlives the replay ▸ native source."""
    sizes = {a.index: a.nbytes for a in program.recording.allocations if a.kind is AllocationKind.POOL}
    return {index: graph.add_fresh(sizes[index]) for index in program.layout.fresh}


def add_launch(graph: Any, launch: Launch, payload: Kernel | OperatorLaunch) -> None:
    """Give ``graph`` its next launch, with the words that were recorded."""
    if isinstance(payload, OperatorLaunch):
        graph.add_operator(payload.call, list(payload.moves), list(payload.results))
        return
    floats = [_float(w) for w, p in zip(launch.words, payload.parameters, strict=True) if p is Parameter.FLOAT]
    words = [_signed(w) for w, p in zip(launch.words, payload.parameters, strict=True) if p is not Parameter.FLOAT]
    graph.add_kernel(payload.entry, words, floats)


def _place(program: Program, slot: Slot, arguments: dict[int, int], fresh: dict[int, int]) -> tuple[int, int]:
    """The native source of a slot's address, and the bytes to add to it."""
    if slot.kind is AllocationKind.INPUT and slot.index in arguments:
        return arguments[slot.index], slot.offset
    if slot.kind is AllocationKind.POOL and slot.index in fresh:
        return fresh[slot.index], slot.offset
    if slot.kind is AllocationKind.POOL and slot.index in program.layout.offsets:
        return _WORKSPACE, program.layout.offsets[slot.index] + slot.offset
    raise CaptureError("invalid-program", f"a slot names {slot.kind.value} {slot.index}, which has no place")


def native_word(payload: Kernel | OperatorLaunch, word: int) -> int:
    """The position of a word among those that the native launch holds: a kernel's floats are kept apart."""
    if isinstance(payload, OperatorLaunch):
        return word
    if not payload.parameters[word].is_pointer:
        raise CaptureError("invalid-program", f"word {word} of {payload.name} is no address")
    return sum(p is not Parameter.FLOAT for p in payload.parameters[:word])


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _float(word: int) -> float:
    value: float = struct.unpack("<f", word.to_bytes(4, "little"))[0]
    return value


_SPARE = 1 << 30


class HostDriver:
    """``Driver`` for regions on the CPU. Raises CaptureError (``native-unavailable``) where there is no compiler."""

    def __init__(self) -> None:
        self._native: ModuleType = build.load()

    def capture(self, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> Recording:
        """Record ``fn``. The payload is a HostCapture; dropping it gives the address space back."""
        return capture_region(self._native, fn, args)

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay. The executable outlives the recording."""
        payload = program.recording.payload
        if not isinstance(payload, HostCapture):
            raise CaptureError("foreign-recording", f"a payload of type {type(payload).__name__}")
        return Executable(make_graph(self._native, program, payload), (*payload.constants, *payload.libraries))

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
