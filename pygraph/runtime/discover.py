"""From a function and its arguments to an executable: capture twice, find the words that moved, run launch passes.

A second capture runs on other stand-ins. Words that moved with them are addresses (``slots``); everything else has to
be equal. Proven kernels need only one capture. Nothing executes here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pygraph.program.default import DEFAULT_PASSES, LaunchPasses, placed, undecided
from pygraph.program.fold import folded
from pygraph.program.loops import LoopPasses
from pygraph.program.program import Program
from pygraph.program.recording import Allocation, AllocationKind, Recording
from pygraph.program.verify import stray_uses
from pygraph.runtime.contract import Driver, Executable
from pygraph.runtime.proof import Proof
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.slots import SPORADIC, SlotTable, discover
from pygraph.runtime.tensors import extent

_ATTEMPTS = 3
"""Further captures that are made, one after the other, until one agrees with one of the two before it."""


@dataclass(frozen=True, slots=True)
class Captured:
    """An executable, its program, the table of its slots, and the names of its bodies, of which each call may run
    different ones."""

    executable: Executable
    program: Program
    table: SlotTable
    bodies: frozenset[str] = frozenset()


def capture(
    fn: Callable[[list[Any]], Sequence[Any]],
    driver: Driver,
    args: Sequence[Any],
    proof: Proof | None = None,
    eager: Collection[str] = (),
    order: str = "program",
    launch_passes: LaunchPasses = DEFAULT_PASSES,
    collectives: bool = False,
    **facts: Any,
) -> Captured | Refusal:
    """Capture ``fn`` for ``args``, twice unless ``proof`` (kernels of other sizes) explains a single capture. Replays
    call the operators ``eager``. ``launch_passes`` turn the captured program into the one that is replayed, in the
    ``order`` ``program`` or ``dependences``. ``collectives``: capture functional ones, if the driver can. ``facts``:
    fields of the program that captures do not determine. Raises CaptureError, and anything that ``fn`` on stand-ins or
    a pass raises."""
    take = partial(driver.capture, fn, list(args), eager, collectives=collectives)
    first = take()
    alone = next((launch for launch in first.launches if launch.collective and not launch.functional), None)
    if alone is not None:  # it can be neither captured again nor compared: it would run more often here than elsewhere
        return Refusal.at(alone, "collective", "a replay cannot be compared where other processes take part")
    if first.launches and all(launch.eager is not None for launch in first.launches):
        return Refusal("only-eager", "every launch is an operator that each replay would call")
    real = [  # the caller's own memory, which no captured word may point into
        Allocation(AllocationKind.INPUT, i, arg.data_ptr(), extent(arg))
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and extent(arg)
    ]
    found: SlotTable | Refusal | None = None if proof is None else proof.resolve(first, real)
    if found is None:
        first, found = _captured_twice(take, first, real)
    if isinstance(found, Refusal):
        return found
    for launch, said in stray_uses(first, found.slots):
        return Refusal.at(launch, "outside-allocation", said)
    captured = undecided(first, found.slots, non_pointers=found.non_pointers, **facts)
    if first.nests:
        within = launch_passes.passes if isinstance(launch_passes, LoopPasses) else launch_passes
        captured = folded(captured, within, order)
    program = launch_passes(captured, order)
    if first.nests and len(program.steps) > 1 and not program.calls:
        program, _ = placed(program)
    bodies = frozenset(name for nest in first.nests for name in nest.names)
    return Captured(driver.instantiate(program), program, found, bodies)


def _captured_twice(
    take: Callable[[], Recording], first: Recording, real: Sequence[Allocation]
) -> tuple[Recording, SlotTable | Refusal]:
    """The recording to replay, and its slots by a second capture, or by later ones if the first two disagree. The doubt
    reported is that of the first two captures."""
    earlier = [first]
    doubt: Refusal | None = None
    for _ in range(_ATTEMPTS):
        latest = take()
        for before in reversed(earlier):
            found = discover(before, latest, real)
            if not isinstance(found, Refusal) or found.reason not in SPORADIC:
                return before, found
            doubt = doubt or found
        earlier = [*earlier[-1:], latest]
    return first, doubt or Refusal("unstable-launches")
