"""The host driver: captures regions of Inductor's CPU programs and replays each in one native call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.program.nested import Path, launches_of, words_at
from pygraph.program.program import GraphSegment, Program, Slot
from pygraph.program.recording import EagerCall, Launch, LaunchKind, Recording
from pygraph.program.verify import verify
from pygraph.runtime.contract import Executable, NativeDriver, ScratchPool
from pygraph.runtime.description import describe_region
from pygraph.runtime.host import build
from pygraph.runtime.host.capture import capture_region, run_inside
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.host.recorder import Payload, Recorder
from pygraph.runtime.provenance import Refusal

_GRAPH_BYTES, _LAUNCH_BYTES, _WORD_BYTES = 16 << 10, 1 << 10, 1 << 9
"""Upper bounds, in bytes: of an executable, and in it of each launch, and of each word, perhaps with a tensor."""


def _host_bytes(program: Program) -> int:
    """Upper bound, in bytes, on the memory of an executable of ``program``."""
    words = [len(launch.words) for _, _, launch in launches_of(program)]
    return _GRAPH_BYTES + _LAUNCH_BYTES * len(words) + _WORD_BYTES * sum(words)


def _make_graph(native: ModuleType, program: Program, capture: Recorder) -> Any:
    """The native graph of ``program``. Raises CaptureError if it breaks a rule, or has a slot in a number."""
    verify(program)
    made: dict[Path, Any] = {}  # without eager calls
    segments = _segments(native, program, (), made)
    numbers = {path: number for number, path in enumerate(made)}

    def places(slot: Slot) -> list[tuple[int, int, int]]:
        found = words_at(program, slot)
        return [(numbers[path], word, delta) for path, word, delta in found if path in numbers]

    return native.HostGraph(
        describe_region(program, capture.arguments, places),
        launches=list(made.values()),
        segments=segments,
        exclusive=sorted(capture.exclusive),
    )


def _segments(native: ModuleType, program: Program, path: Path, made: dict[Path, Any]) -> list[list[Any]]:
    """The native launches of each segment, in the order in which they run. All of them, including those of bodies, are
    added to ``made`` by their paths."""
    payloads = _payload(program.recording).payloads
    for slot in program.slots:
        payload = None if program.recording.launches[slot.launch].bodies else payloads[slot.launch]
        if isinstance(payload, Kernel) and not payload.parameters[slot.word].is_pointer:
            raise CaptureError("invalid-program", f"word {slot.word} of {payload.name} is no address")
    segments: list[list[Any]] = []
    for step in (step for step in program.steps if isinstance(step, GraphSegment)):
        captured, order, launches = range(step.begin, step.end), program.order, list[Any]()
        for index in captured if order is None else order.sequence(step.begin, step.end):
            launch, at = program.recording.launches[index], (*path, index)
            if launch.bodies:
                inner = [_segments(native, body, (*at, number), made) for number, body in enumerate(launch.bodies)]
                bodies = [[launch for segment in each for launch in segment] for each in inner]
                made[at] = native.Nest(bodies, launch.kind is LaunchKind.WHILE)
            else:
                made[at] = _native_launch(native, launch, payloads[index])
            launches.append(made[at])
        segments.append(launches)
    return segments


def _native_launch(native: ModuleType, launch: Launch, payload: Payload | None) -> Any:
    if isinstance(payload, Kernel):
        return native.Kernel(payload.entry, launch.words, [p is Parameter.FLOAT for p in payload.parameters])
    assert payload is not None
    assert not isinstance(payload, EagerCall)
    return native.Operator(*payload)


def _payload(recording: Recording) -> Recorder:
    payload = recording.payload
    if not isinstance(payload, Recorder):
        raise CaptureError("foreign-recording", f"a payload of type {type(payload).__name__}")
    return payload


class HostDriver(NativeDriver):
    """``Driver`` for regions on the CPU. Methods that need the native half wait for its build, and raise CaptureError
    (``native-unavailable``) if that fails."""

    parallel, build = False, build

    def no_collectives(self) -> Refusal | None:
        """Collectives of the CPU run on threads of their own."""
        return Refusal("collective", "those of the CPU are not captured")

    def capture(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        args: Sequence[Any],
        eager: Collection[str] = (),
        *,
        collectives: bool = False,  # noqa: ARG002
    ) -> Recording:
        """Record ``fn``. The payload is a Recorder; dropping it releases the address space."""
        return capture_region(self._native, fn, args, eager)

    def run_inside(self, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any]) -> Sequence[Any]:
        return run_inside(fn, args)

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay. The executable outlives the recording."""
        payload = _payload(program.recording)
        libraries = (launch.library for launch in payload.payloads if isinstance(launch, Kernel))
        graph, kept = _make_graph(self._native, program, payload), (*payload.constants.values(), *libraries)
        return Executable(graph, kept, nbytes=_host_bytes(program))

    def generator(self, program: Program) -> torch.Generator | None:
        """The default CPU generator, if a launch draws random numbers."""
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
        """A fixed amount: free memory of a host is shared with other programs."""
        return 1 << 30

    def synchronise(self, device: torch.device | None) -> bool:  # noqa: ARG002
        """True at once: a call on the host returns when its work is done."""
        return True

    def timer(self, device: torch.device | None) -> None:
        """None: nothing runs in parallel."""

    def scratch_pool(self, args: Sequence[Any]) -> contextlib.AbstractContextManager[ScratchPool]:  # noqa: ARG002
        """Ordinary memory: memory freed on the CPU goes back to the system."""
        return contextlib.nullcontext(contextlib.nullcontext)
