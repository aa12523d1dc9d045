"""Makes a loop of a captured program: the program is its body.

before:  l0 l1 l2, once        after:  l0 = while { l0 l1 l2 }, without copies that are not needed (``copies``)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pygraph.program.bodies import as_body, owner_of
from pygraph.program.copies import without_copies
from pygraph.program.default import DEFAULT_PASSES, LaunchPasses, as_captured
from pygraph.program.program import Program, Slot
from pygraph.program.recording import Allocation, AllocationKind, Launch, LaunchKind, Recording

_WORKSPACE_ADDRESS = 1 << 62
"""Where the workspace of a loop lies in its program: at no address of the process."""

_INPUT, _POOL, _CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT


UNROLLED, MOST_UNROLLED = 4, 32
"""Iterations that one run of an unrolled body is, and launches of an iteration from which on none is: a conditional
node takes some 6 us for each run of its body (H200), as long as three small kernels."""


@dataclass(frozen=True)
class LoopPasses:
    """Launch passes that make a loop of each captured program.

    Args:
        control: position of the argument that says how often
        passes: those over the body
        unrolls: nothing in an iteration looks at ``control``, so that several may be one run of a body
    """

    control: int
    passes: LaunchPasses = DEFAULT_PASSES
    unrolls: bool = False

    @property
    def key(self) -> str:
        """All that its decisions depend on besides the program."""
        return f"while {self.control}{' unrolled' * self.unrolls}: {self.passes.key}"

    def __call__(self, program: Program, order: str) -> Program:
        """The program to replay. Raises CaptureError (``host-loop``)."""
        program = without_copies(program)
        bodies = {1: self.passes(program, order)}
        if self.unrolls and _may_unroll(program.recording):
            bodies = {UNROLLED: self.passes(_repeated(program, UNROLLED), order), **bodies}
        return looped(bodies, self.control)


def looped(bodies: Mapping[int, Program], control: int) -> Program:
    """One loop after the other over ``bodies``, by the iterations that a run of each is, all of one captured program.
    The argument ``control`` decides: count, limit and stop. Raises CaptureError (``host-loop``) for one that needs the
    host."""
    program = next(iter(bodies.values()))
    made, recording = [as_body(each, "host-loop") for each in bodies.values()], program.recording
    inputs = {each.index: each for each in recording.allocations if each.kind is _INPUT}
    constants = [each for each in recording.allocations if each.kind is _CONSTANT]
    nbytes = max(body.layout.nbytes for body in made)
    memory = Allocation(_POOL, 0, _WORKSPACE_ADDRESS, nbytes) if nbytes else None
    launches, slots = list[Launch](), list[Slot]()
    for index, (count, body) in enumerate(zip(bodies, made, strict=True)):
        own = memory if body.layout.nbytes else None
        given = [inputs[control], own, *(inputs.get(place) for place in range(1 + max(inputs)))]
        launch = owner_of(LaunchKind.WHILE, "loop", [body], given, constants)
        launches.append(replace(launch, index=index, iterations=count))
        slots += [
            Slot(index, word, *each.key, 0) for word, each in enumerate(given) if each is not None and each.nbytes
        ]
    allocations = (*inputs.values(), *([memory] if memory else []), *constants)
    payload = recording.payload and recording.payload.part([None] * len(launches))
    whole = replace(recording, launches=tuple(launches), allocations=allocations, phases=(), payload=payload)
    facts = {"held": program.held, "lent": program.lent, "name": program.name, "alignment": program.alignment}
    return as_captured(whole, tuple(slots), **facts, notes=program.notes)


def _may_unroll(recording: Recording) -> bool:
    """True if launches are few, one after the other, and none draws or waits for the host."""
    launches = recording.launches
    alone = len(set(recording.phases)) == len(recording.phases)
    return (
        0 < len(launches) <= MOST_UNROLLED
        and alone
        and not any(
            launch.random or launch.eager is not None or launch.collective or launch.bodies for launch in launches
        )
    )


def _repeated(program: Program, times: int) -> Program:
    """An undecided ``program`` whose launches come ``times`` times."""
    recording = program.recording
    count = len(recording.launches)
    groups = 1 + max((each.group for each in recording.launches if each.group is not None), default=-1)
    launches = tuple(
        replace(
            each,
            index=turn * count + each.index,
            group=None if each.group is None else turn * groups + each.group,
        )
        for turn in range(times)
        for each in recording.launches
    )
    slots = (replace(each, launch=turn * count + each.launch) for turn in range(times) for each in program.slots)
    inert = (replace(each, launch=turn * count + each.launch) for turn in range(times) for each in program.non_pointers)
    payload = recording.payload and recording.payload.part([*range(count)] * times)
    made = replace(recording, launches=launches, phases=(), payload=payload)
    return replace(program, recording=made, slots=tuple(slots), non_pointers=tuple(inert))
