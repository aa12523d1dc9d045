"""Finds the launch that makes a replay differ from the uncaptured program, after a comparison failed.

The region is captured once more, and nothing is run. The new capture uses addresses that are new to the program and its
slots. A slot must name the allocation and offset that the new capture has in its place, and no other word may move.
This finds stale addresses, words that are not patched, and numbers that change from capture to capture (state that a
Python function keeps). The verifier has already checked that intermediates share no bytes.

The first launch that fails is reported, with the user's line. If none does, the addresses of the replay are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pygraph.program.program import Program, Slot
from pygraph.program.recording import AllocationKind, Launch
from pygraph.runtime.contract import Driver
from pygraph.runtime.eager import base_of
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.slots import OF_ATEN, SPORADIC, SlotTable, discover


@dataclass(frozen=True, slots=True)
class Finding:
    """The text of a diagnosis, and the ``launch`` to blame if there is one. ``right``: all addresses are right."""

    text: str
    launch: Launch | None = None
    right: bool = False

    def added_to(self, refusal: Refusal) -> Refusal:
        """``refusal`` with this finding."""
        detail = f"{refusal.detail}; {self.text}"
        if self.launch is None:
            return Refusal(refusal.reason, detail)
        return Refusal.at(self.launch, refusal.reason, detail)


def diagnose(
    fn: Callable[[list[Any]], Sequence[Any]], driver: Driver, program: Program, args: Sequence[Any]
) -> Finding:
    """Find the first launch of ``program``, captured from ``fn`` on arguments like ``args``, that is wrong.

    Captures, and runs nothing. Never raises an Exception, which would hide the original failure.
    """
    if any(launch.bodies for launch in program.recording.launches):
        return Finding("which launch of the loop differs is not looked for")
    try:
        found = list(_wrong_words(program, _captured_again(fn, driver, program, args)))
        certain = [finding for finding in found if not finding.right]
        # findings about the whole region come first
        return min(
            certain or found, key=lambda each: -1 if each.launch is None else each.launch.index, default=_NOTHING
        )
    except Exception as error:  # noqa: BLE001 - a faulty region may raise anything when it is captured once more
        said = (str(error).splitlines() or [""])[0]
        return Finding(f"which launch differs could not be found out: {type(error).__name__}: {said}")


_NOTHING = Finding("another capture explains every word of every launch as before: no address is to blame", right=True)
_ATTEMPTS = 3
"""Maximum number of captures, if each is refused for bytes that may be uninitialised."""


def _captured_again(
    fn: Callable[[list[Any]], Sequence[Any]], driver: Driver, program: Program, args: Sequence[Any]
) -> SlotTable | Refusal:
    """The slots of ``program``, found with another capture."""
    eager = {base_of(call.name) for call in program.calls}
    for _ in range(_ATTEMPTS):
        table = discover(program.recording, driver.capture(fn, list(args), eager))
        if isinstance(table, SlotTable) or table.reason not in SPORADIC:
            break
    return table


def _wrong_words(program: Program, table: SlotTable | Refusal) -> Iterator[Finding]:
    """Slots that another capture contradicts, and words without a slot that move."""
    if isinstance(table, Refusal):
        launch = next((each for each in program.recording.launches if each.name == table.launch), None)
        stray = table.reason in SPORADIC  # perhaps uninitialised bytes
        yield Finding(f"captured once more, the region is refused ({table})", launch, right=stray)
        return
    ours = {(slot.launch, slot.word): slot for slot in program.slots}
    theirs = {(slot.launch, slot.word): slot for slot in table.slots}
    for index, word in sorted(ours.keys() | theirs.keys()):
        have, want = ours.get((index, word)), theirs.get((index, word))
        if have != want:
            # ATen's kernels may leave a word unset: it holds what an earlier kernel left on the stack
            stray = want is None and program.recording.launches[index].name.startswith(OF_ATEN)
            said = f": word {word} is {_place(want)}, and a replay puts {_place(have)} there"
            yield _at(program, index, said, right=stray)
    for index, word in table.padding:
        said = (
            f": word {word} is another number in each capture, perhaps of a state that is kept outside of the arguments"
        )
        yield _at(program, index, said, right=True)


def _place(slot: Slot | None) -> str:
    """Text on the contents of a word, by its slot."""
    if slot is None:
        return "no address of the region's"
    owner = "argument" if slot.kind is AllocationKind.INPUT else "allocation"
    return f"an address in {owner} {slot.index}, at byte {slot.offset}"


def _at(program: Program, index: int, said: str, right: bool = False) -> Finding:
    """A finding on a launch, with the text ``said``."""
    launches = program.recording.launches
    launch = launches[index]
    where = f" at {launch.origin.loc}" if launch.origin.loc else ""
    call = f" of {launch.call}" if launch.call not in (None, launch.name) else ""
    return Finding(f"launch {index} of {len(launches)} ({launch.name}{call}{where}){said}", launch, right)
