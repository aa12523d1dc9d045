"""The default decisions on a launch program: renamed allocations, the order of launches, the places of intermediates,
the ends of segments.

    as captured  ──►  renamed   ──►  ordered  ──►  placed  ──►  segmented
    k0 k1 k2 k3       k0 a  k1 a     k0 ─ k1       a: 0         [k0 k1]  [k2 k3]
     a  a  a  a       k2 b  k3 b     k2 ─ k3       b: 512

Each function takes a whole program and returns one, with a sentence for the report. ``pygraph.passes.launches`` wraps
them as passes for pipelines. Programs restored from AOTAutograd's cache use only these functions, since importing the
passes takes a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import and_
from typing import Any, Protocol

from pygraph.program.dependences import in_lanes, order_of
from pygraph.program.layout import Lifetime, apart, lifetimes, own_storage, pack
from pygraph.program.order import Order
from pygraph.program.program import GraphSegment, Layout, Program, Slot
from pygraph.program.recording import Recording
from pygraph.program.rename import rename
from pygraph.program.steps import cut, uncaptured_peak, uncut, with_steps

ORDER_MEMORY = 0.03
"""Default for the fraction of the uncaptured program's peak that a program may add, to run launches in parallel."""

LEAST = 2 << 20
"""Bytes that it may add in any case (2 MiB): torch's allocator takes no less from the driver at once."""

MOST_LANES = 8
"""Maximum number of lanes: more have never been faster."""


class LaunchPasses(Protocol):
    """Decides on a program as it was captured.

    Attributes:
        key: text of everything besides the program on which its decisions depend
    """

    @property
    def key(self) -> str: ...

    def __call__(self, program: Program, order: str) -> Program:
        """The program to replay, from an ``undecided`` one. ``order`` is ``program`` or ``dependences``."""


def undecided(recording: Recording, slots: tuple[Slot, ...], **facts: Any) -> Program:
    """The program of a capture, before intermediates have places and launches have steps. ``facts`` are further
    fields."""
    return Program(recording, slots, Layout(0, {}, own_storage(recording, slots)), **facts)


def as_captured(recording: Recording, slots: tuple[Slot, ...], **facts: Any) -> Program:
    """The program of a capture before any decision. ``facts`` are further fields."""
    return in_order(undecided(recording, slots, **facts), None)


def in_order(program: Program, order: Order | None) -> Program:
    """``program`` in ``order`` (None: as captured), before any other decision: no two intermediates share a byte, and
    all launches between two eager calls are a segment."""
    fresh, alignment = program.layout.fresh, program.recording.alignment
    lives = lifetimes(program.recording, program.slots, fresh, order)
    return uncut(replace(program, order=order, layout=apart(lives, alignment, fresh)), lives)


def renamed(program: Program, order: str = "dependences") -> tuple[Program, str]:
    """For the ``order`` ``dependences``, ``program`` with renamed allocations, undecided if there are any. For the
    order of the capture, ``program`` itself, as buffers that are reused at once are in the device's cache."""
    if order == "program":
        return program, "nothing, in the program's order"
    recording, slots, count = rename(program.recording, program.slots)
    if count:
        layout = Layout(0, {}, program.layout.fresh)
        program = replace(program, recording=recording, slots=slots, layout=layout, steps=())
    return program, f"allocations that begin anew: {count}"


def longest_path(program: Program) -> int:
    """Number of launches on the longest path of dependences. Each launch that owns bodies, on this path or not, adds
    the sum of their longest paths, less one."""
    order = program.order or order_of(*rename(program.recording, program.slots)[:2])
    inside = (sum(map(longest_path, each.bodies)) - 1 for each in program.recording.launches if each.bodies)
    return order.longest_path() + sum(inside)


def ordered(program: Program, order: str, memory: float = ORDER_MEMORY) -> tuple[Program, str]:
    """``program`` in the ``order`` of the capture (``program``), or by ``dependences``: launches wait only for those on
    which they depend, in up to MOST_LANES lanes. Fewer lanes are used if they would exceed the uncaptured program's
    peak, or that in the order of the capture, by more than LEAST and ``memory`` times the peak. As captured, if nothing
    runs in parallel."""
    recording, slots = program.recording, program.slots
    captured = program if program.order is None else in_order(program, None)
    if order == "program":
        return captured, "as captured"
    serial, lives = _packed(captured)
    peak = max(uncaptured_peak(captured, lives), cut(serial, lives).held)
    limit = peak + max(memory * peak, LEAST)
    dependences = order_of(recording, slots)
    widest = in_lanes(dependences, MOST_LANES)
    most = used = 1 + max(widest.lanes, default=0)
    fewer, lanes, best = 1, most, captured
    while lanes > fewer:  # all lanes, else by bisection: memory grows with lanes
        narrowed = widest if lanes == used else in_lanes(dependences, lanes)
        made, lives = _packed(replace(captured, order=narrowed))
        planned = cut(made, lives)
        if planned.held <= limit:
            fewer, best = lanes, with_steps(made, planned)
        else:
            most = lanes
        lanes = (fewer + most) // 2
    path = f"longest path {dependences.longest_path()} of {len(recording.launches)}"
    if best.order is None:
        return best, f"as captured, {path}" + f": {used} lanes take too much memory" * (used > 1)
    return best, f"{used} lanes" + f" narrowed to {fewer} for memory" * (fewer < used) + f", {path}"


def placed(program: Program) -> tuple[Program, str]:
    """``program`` in which intermediates share bytes if they are never alive together."""
    made, lives = _packed(program)
    return uncut(made, lives), _layout_note(made)


def _layout_note(program: Program) -> str:
    return f"{len(program.layout.offsets)} intermediates in {program.layout.nbytes} bytes"


def _packed(program: Program) -> tuple[Program, Sequence[Lifetime]]:
    """``program`` with its intermediates packed for its order, and their lifetimes."""
    recording, slots, fresh = program.recording, program.slots, program.layout.fresh
    lives = lifetimes(recording, slots, fresh, program.order)
    return replace(program, layout=pack(lives, recording.alignment, fresh)), lives


def segmented(program: Program) -> tuple[Program, str]:
    """``program`` in segments that hold hardly more memory than the uncaptured program does at its peak."""
    made = with_steps(program)
    return made, _segments_note(made)


def _segments_note(program: Program) -> str:
    segments = [isinstance(step, GraphSegment) for step in program.steps]
    return str(sum(segments)) + ", cut for memory" * any(map(and_, segments, segments[1:]))


@dataclass(frozen=True)
class DefaultPasses:
    """The default launch passes.

    Args:
        order_memory: fraction of the uncaptured program's peak that a replay by dependences may add; 2 MiB are always
            allowed
    """

    order_memory: float = ORDER_MEMORY

    @property
    def key(self) -> str:
        """Text of everything besides the program on which its decisions depend."""
        return str(self.order_memory)

    def __call__(self, program: Program, order: str) -> Program:
        """The program to replay, with the passes' notes."""
        program, begun = renamed(program, order)
        program, waits = ordered(program, order, self.order_memory)
        if program.order is None:  # else already placed and cut, since the choice of the order depends on memory
            program, lives = _packed(program)
            program = with_steps(program, cut(program, lives))
        notes = {"rename": begun, "order": waits, "layout": _layout_note(program), "segments": _segments_note(program)}
        return replace(program, notes=tuple(f"{name}: {note}" for name, note in notes.items()))


DEFAULT_PASSES = DefaultPasses()
"""The default launch passes, with their default options."""
