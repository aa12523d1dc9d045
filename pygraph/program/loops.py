"""Makes launches that own bodies (``nested``), and loops with a captured program as their body.

before:  l0 l1 l2, once        after:  l0 = while { l0 l1 l2 }, without unnecessary copies (``copies``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pygraph.errors import CaptureError
from pygraph.program.copies import without_copies
from pygraph.program.default import DEFAULT_PASSES, LaunchPasses, as_captured, placed
from pygraph.program.dependences import accesses_of
from pygraph.program.nested import ARGUMENTS, DECIDES, WORKSPACE, decided_by
from pygraph.program.program import Program, Slot
from pygraph.program.recording import UNKNOWN, Allocation, AllocationKind, Launch, LaunchKind, OutputKind, Use

_WORKSPACE_ADDRESS = 1 << 62
"""Address of the workspace of a loop in its program: not a valid address of the process."""

_Key = tuple[AllocationKind, int]
_INPUT, _POOL, _CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT


@dataclass(frozen=True)
class LoopPasses:
    """Launch passes that turn each captured program into a loop.

    Args:
        control: position of the argument with count, limit and stop
        passes: launch passes over the body
    """

    control: int
    passes: LaunchPasses = DEFAULT_PASSES

    @property
    def key(self) -> str:
        """Text of everything besides the program on which its decisions depend."""
        return f"while {self.control}: {self.passes.key}"

    def __call__(self, program: Program, order: str) -> Program:
        """The program to replay. Raises CaptureError (``host-loop``)."""
        return looped(self.passes(without_copies(program), order), self.control)


def looped(program: Program, control: int) -> Program:
    """``program`` as the body of a loop, controlled by its argument ``control``: count, limit and stop. Raises
    CaptureError (``host-loop``) if the program needs the host."""
    body, recording = as_body(program, "host-loop"), program.recording
    inputs = {each.index: each for each in recording.allocations if each.kind is _INPUT}
    constants = [each for each in recording.allocations if each.kind is _CONSTANT]
    nbytes = body.layout.nbytes
    memory = Allocation(_POOL, 0, _WORKSPACE_ADDRESS, nbytes) if nbytes else None
    given = [inputs[control], memory, *(inputs.get(index) for index in range(1 + max(inputs)))]
    launch = owner_of(LaunchKind.WHILE, "loop", [body], given, constants)
    slots = [Slot(0, word, *each.key, 0) for word, each in enumerate(given) if each is not None and each.nbytes]
    allocations = (*inputs.values(), *([memory] if memory else []), *constants)
    made = replace(recording, launches=(launch,), allocations=allocations, phases=())
    facts = {"held": program.held, "lent": program.lent, "name": program.name, "alignment": program.alignment}
    return as_captured(made, tuple(slots), **facts, notes=program.notes)


def as_body(program: Program, reason: str) -> Program:
    """A decided ``program`` as a body. Raises CaptureError, with this ``reason``, if it needs the host."""
    recording = program.recording
    for launch in recording.launches:
        if launch.eager is not None or launch.collective:
            said = f"{launch.name} is called by the host" if launch.eager else f"{launch.name} talks to other ranks"
            raise CaptureError(reason, said, launch=launch.index)
    if any(output.kind is OutputKind.FRESH for output in recording.outputs):
        raise CaptureError(reason, "an iteration returns memory of its own")
    if len(program.steps) > 1:
        program, _ = placed(program)
    steps = tuple(replace(step, dead=()) for step in program.steps)
    body = replace(program, recording=replace(recording, outputs=()), steps=steps, name="body")
    return replace(body, held=frozenset(), lent=frozenset(), notes=())


def owner_of(
    kind: LaunchKind,
    name: str,
    bodies: Sequence[Program],
    given: Sequence[Allocation | None],
    constants: Sequence[Allocation],
) -> Launch:
    """Launch 0 of a program, which owns ``bodies``. Its words point to ``given``: the deciding bytes, which may be part
    of an allocation, the workspace, and arguments. Words for ``constants`` follow."""
    words = [0 if each is None or not each.nbytes else each.address for each in given]
    inner = [launch for body in bodies for launch in body.recording.launches]
    uses = _uses(kind, bodies, given, constants)
    written = {index for body in bodies for index in body.written}
    inputs = enumerate(given[ARGUMENTS:])
    deciding = given[DECIDES]
    kept = (
        e.key for i, e in inputs if e is not None and i not in written and (deciding is None or e.key != deciding.key)
    )
    return Launch(
        0,
        kind,
        name,
        (*words, *(each.address for each in constants)),
        tuple((each.kind, each.name, each.signature) for each in inner),
        uses,
        origin=next((each.origin for each in inner if each.origin != UNKNOWN), UNKNOWN),
        random=any(each.random for each in inner),
        read_only=frozenset() if uses is not None else frozenset(kept),
        nondeterministic=any(each.nondeterministic for each in inner),
        bodies=tuple(bodies),
    )


def _uses(
    kind: LaunchKind,
    bodies: Sequence[Program],
    given: Sequence[Allocation | None],
    constants: Sequence[Allocation],
) -> tuple[Use, ...] | None:
    """Uses by word: the whole of each allocation that a body accesses; None if a body may access any memory. Written
    allocations count as read, too: they keep their contents if that body does not run."""
    found: dict[_Key, tuple[bool, bool]] = {}
    for body in bodies:
        for accesses, launch in zip(accesses_of(body.recording, body.slots), body.recording.launches, strict=True):
            if accesses is None:
                return None
            read = {slot.key for slot in body.slots if slot.launch == launch.index and launch.may_read(slot.word)}
            for access in accesses:
                reads, writes = found.get(access.key, (False, False))
                now = access.reads and (launch.uses is None or access.key in read or access.key[0] is _CONSTANT)
                found[access.key] = reads or now or access.writes, writes or access.writes
    nbytes = max(body.layout.nbytes for body in bodies)
    uses = [Use(DECIDES, 0, decided_by(kind), reads=True, writes=kind is LaunchKind.WHILE)]
    if given[WORKSPACE] is not None:
        uses.append(Use(WORKSPACE, 0, nbytes, reads=True, writes=True))
    for number, each in enumerate(given[ARGUMENTS:]):
        if each is not None and each.nbytes and (_INPUT, number) in found:
            uses.append(Use(ARGUMENTS + number, 0, each.nbytes, *found[_INPUT, number]))
    fixed = [access for key, access in found.items() if key[0] is _CONSTANT]
    for word, each in enumerate(constants if fixed else (), len(given)):
        uses.append(Use(word, 0, each.nbytes, reads=True, writes=any(writes for _, writes in fixed)))
    return tuple(uses)
