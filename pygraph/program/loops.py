"""Makes a loop of a captured program: the program is its body.

before:  l0 l1 l2, once        after:  l0 = while { l0 l1 l2 }, without copies that are not needed (``copies``)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pygraph.program.bodies import as_body, owner_of
from pygraph.program.copies import without_copies
from pygraph.program.default import DEFAULT_PASSES, LaunchPasses, as_captured
from pygraph.program.program import Program, Slot
from pygraph.program.recording import Allocation, AllocationKind, LaunchKind

_WORKSPACE_ADDRESS = 1 << 62
"""Where the workspace of a loop lies in its program: at no address of the process."""

_INPUT, _POOL, _CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT


@dataclass(frozen=True)
class LoopPasses:
    """Launch passes that make a loop of each captured program.

    Args:
        control: position of the argument that says how often
        passes: those over the body
    """

    control: int
    passes: LaunchPasses = DEFAULT_PASSES

    @property
    def key(self) -> str:
        """All that its decisions depend on besides the program."""
        return f"while {self.control}: {self.passes.key}"

    def __call__(self, program: Program, order: str) -> Program:
        """The program to replay. Raises CaptureError (``host-loop``)."""
        return looped(self.passes(without_copies(program), order), self.control)


def looped(program: Program, control: int) -> Program:
    """``program`` as the body of a loop, which its argument ``control`` decides on: count, limit and stop. Raises
    CaptureError (``host-loop``) for one that needs the host."""
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
