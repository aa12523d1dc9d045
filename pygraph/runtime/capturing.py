"""From a function and its arguments to an executable: two captures (or one), slots, layout, program.

Nothing executes here and no state is kept; what a region does with the result is ``region``'s subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.runtime.digest import extent
from pygraph.runtime.driver import Driver, Executable, Keepers, Program
from pygraph.runtime.effects import collective, outside, written_arguments
from pygraph.runtime.layout import plan
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.recording import Allocation, AllocationKind, Recording
from pygraph.runtime.refusal import Refusal
from pygraph.runtime.slots import SlotTable, discover, resolve

__all__ = ["Captured", "capture"]


_SPORADIC = (
    "half-address",
    "unpaired-address",
    "stray-address",
    "unstable-allocations",
    "unstable-order",
    "unmoved-address",
    "foreign-address",
)
"""Doubts that parts of parameters which nobody sets can raise: what happens to lie there need not do so again. And
streams that are made anew for each call: torch hands out 32 in turn, so that two are the same one now and then."""

_ATTEMPTS = 3
"""Captures that are made, one after the other, to agree with one of the two before."""


@dataclass(frozen=True, slots=True)
class Captured:
    """An executable, the program that it came from, its slots, and the arguments that it may write."""

    executable: Executable
    program: Program
    table: SlotTable
    written: frozenset[int]


def capture(
    fn: Callable[[list[Any]], Sequence[Any]],
    driver: Driver,
    args: Sequence[Any],
    options: RegionOptions,
    table: SlotTable | None = None,
    keepers: Keepers | None = None,
    name: str = "",
) -> Captured | Refusal:
    """Capture ``fn`` for ``args``, twice unless ``table`` (slots of another size) explains a single capture.

    ``keepers`` tells the arguments that others keep, ``name`` what profilers call a replay.
    Raises what the driver raises: CaptureError, or anything that ``fn`` does on stand-ins.
    """
    first = driver.capture(fn, list(args))
    alone = collective(first)
    if alone is not None:
        return alone
    real = _real_memory(args)
    found: SlotTable | Refusal | None = None if table is None else resolve(first, table, real)
    if found is None:
        first, found = _captured_twice(fn, driver, args, first, real)
    if isinstance(found, Refusal):
        return found
    doubt = outside(first, found.slots)
    if doubt is not None:
        return doubt
    program = _program(first, found, args, options, keepers or Keepers(), name)
    return Captured(driver.instantiate(program), program, found, written_arguments(first, found.slots))


def _captured_twice(
    fn: Callable[[list[Any]], Sequence[Any]],
    driver: Driver,
    args: Sequence[Any],
    first: Recording,
    real: Sequence[Allocation],
) -> tuple[Recording, SlotTable | Refusal]:
    """The recording to replay, and its slots from a second capture: or a third, where the first two disagree.

    The doubt that is reported is that of the first two captures.
    """
    earlier = [first]
    doubt: Refusal | None = None
    for _ in range(_ATTEMPTS):
        latest = driver.capture(fn, list(args))
        for before in reversed(earlier):
            found = discover(before, latest, real)
            if not isinstance(found, Refusal) or found.reason not in _SPORADIC:
                return before, found
            doubt = doubt or found
        earlier = [*earlier[-1:], latest]
    return first, doubt or Refusal("unstable-launches")


def _program(
    recording: Recording, table: SlotTable, args: Sequence[Any], options: RegionOptions, keepers: Keepers, name: str
) -> Program:
    """The recorded order, with intermediates placed and every tensor argument held to the same alignment."""
    return Program(
        recording=recording,
        slots=table.slots,
        layout=plan(recording, table.slots, reuse=options.reuse_workspace, alignment=recording.alignment),
        order=tuple(range(len(recording.launches))),
        alignment={i: options.alignment for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)},
        inert=table.inert,
        keepers=keepers,
        name=name,
    )


def _real_memory(args: Sequence[Any]) -> list[Allocation]:
    """The caller's own memory, which no captured word may point into."""
    return [
        Allocation(AllocationKind.INPUT, i, arg.data_ptr(), extent(arg))
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and extent(arg)
    ]
