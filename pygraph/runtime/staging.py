"""Inputs that are copied to memory at a fixed address before each replay, so that no launch is patched where they move.

Which inputs a copy may stand for, which of them move often enough, and the memory that is held for them. How a replay
uses the copies is the drivers' business, whether it pays is measured selection's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.driver import CopyCost, Program
from pygraph.runtime.recording import AllocationKind, OutputKind

__all__ = ["HELD_LIMIT", "WATCHED", "Copies", "Stageable", "asked_for", "stageable"]

HELD_LIMIT = 16 << 20
"""Bytes (16 MiB) that a region may hold for copies that nobody asked for, those of all its captures together."""

WATCHED = 16
"""Replays from which it is known how often an input moves."""

_accounting = Lock()
"""Captures of one region may be switched at once."""


@dataclass(frozen=True, slots=True)
class Stageable:
    """An input that a copy may stand for, and the ``nbytes`` held for it. ``often``: the part of the replays in which
    it has to move for the patches that a copy saves to take more of the host's time than the copy."""

    argument: int
    nbytes: int
    often: float


def stageable(program: Program, written: Collection[int], cost: CopyCost | None) -> tuple[Stageable, ...]:
    """The inputs of ``program`` for which a copy may stand, and may pay, those first that save most.

    Not those that the region may write or that an output is, or is a view of: the caller would see the copy. Not those
    whose storage offset was captured: somebody looks around them. ``cost`` None: this driver makes no copies.
    """
    if cost is None:
        return ()
    launches = _launches(program)
    found = []
    for index, nbytes in _copyable(program, written).items():
        saved = cost.patch_us * len(launches.get(index, ()))
        if saved > cost.copy_us and nbytes <= cost.most_bytes:
            found.append(_stageable(program, index, nbytes, cost.copy_us / saved))
    return _within(sorted(found, key=lambda each: (each.often, each.argument)), HELD_LIMIT)


def asked_for(program: Program, written: Collection[int], arguments: Collection[int]) -> tuple[Stageable, ...]:
    """Those of ``arguments`` for which a copy may stand as soon as they move, whatever it costs."""
    found = _copyable(program, written)
    return tuple(_stageable(program, index, found[index], 0.0) for index in sorted(found) if index in arguments)


def _stageable(program: Program, index: int, nbytes: int, often: float) -> Stageable:
    return Stageable(index, nbytes + program.alignment.get(index, 1), often)


def _copyable(program: Program, written: Collection[int]) -> dict[int, int]:
    """The inputs for which a copy may stand ▸ their bytes."""
    recording = program.recording
    returned = {o.argument for o in recording.outputs if o.kind in (OutputKind.ARGUMENT, OutputKind.VIEW)}
    excluded = returned | set(written) | recording.offset_sensitive
    inputs = [a for a in recording.allocations if a.kind is AllocationKind.INPUT and a.nbytes]
    return {a.index: a.nbytes for a in inputs if a.index not in excluded}


def _launches(program: Program) -> dict[int, set[int]]:
    """Argument ▸ the launches that use it: one is patched once, however many of its words change."""
    used: dict[int, set[int]] = {}
    for slot in program.slots:
        if slot.kind is AllocationKind.INPUT:
            used.setdefault(slot.index, set()).add(slot.launch)
    return used


def _within(inputs: Sequence[Stageable], nbytes: float) -> tuple[Stageable, ...]:
    """The first of ``inputs`` that fit into ``nbytes`` together."""
    chosen: list[Stageable] = []
    for each in inputs:
        if each.nbytes <= nbytes:
            chosen.append(each)
            nbytes -= each.nbytes
    return tuple(chosen)


class Copies:
    """Switches one executable between addresses that are patched and copies of the inputs that move.

    ``executable`` has ``stage`` and ``moves`` (see ``Executable``). Which of ``inputs`` move is found out once, over
    the first WATCHED replays. All captures of a region together hold HELD_LIMIT at most, if that is ``limited``.
    Used by one thread at a time.
    """

    def __init__(
        self, executable: Any, inputs: Sequence[Stageable], record: RegionRecord, *, limited: bool = True
    ) -> None:
        self._executable, self._record = executable, record
        self._inputs = tuple(inputs)
        self._limit = HELD_LIMIT if limited else math.inf
        self._before: Sequence[int] = executable.moves()
        self._chosen: tuple[Stageable, ...] | None = None
        self._held = 0
        self.on = False

    def choose(self) -> bool:
        """Whether there are inputs that move often enough. The first call, after WATCHED replays, decides that.

        The first replay does not count: the one before it was the comparison's, on other memory.
        """
        if self._chosen is None:
            now = self._executable.moves()  # none any more, of an executable that gave itself up
            moved = dict(enumerate(n - then - 1 for n, then in zip(now, self._before, strict=False)))
            often = [each for each in self._inputs if moved.get(each.argument, 0) > each.often * (WATCHED - 1)]
            self._chosen = _within(often, self._limit - self._record.staged_bytes)
        return bool(self._chosen)

    def switch(self, on: bool) -> bool:
        """Replay with copies from now on, or without, and give their memory back. False, with nothing changed, while
        a replay is under way, and where there is no memory."""
        if on == self.on:
            return True
        chosen = self._chosen or () if on else ()
        with _accounting:
            if chosen and sum(each.nbytes for each in chosen) > self._limit - self._record.staged_bytes:
                return False
            held = self._executable.stage([each.argument for each in chosen])
            if held is None:
                return False
            self._account(held)
        self.on = on
        return True

    def close(self) -> None:
        """The executable is being closed, which gives its memory back. Nothing is copied any more."""
        with _accounting:
            self._account(0)
        self._chosen, self.on = (), False

    def _account(self, held: int) -> None:
        self._record.staged_bytes += held - self._held
        self._held = held
