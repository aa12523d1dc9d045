"""The second phase: all sides of a program alive at the same time, blocks of calls interleaved in random order.

One process runs at a time while all others wait. What is measured is told to ``results``; nothing is judged here but
whether a side's results are near enough to the reference's for it to be timed at all.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pygraph.bench.plan import Launcher, Program
from pygraph.bench.process import Process
from pygraph.bench.protocol import Answer, Failure
from pygraph.bench.sides import OURS, REFERENCE, SIDES

__all__ = ["Group", "SideOutcome", "Timed", "Timing"]

LEAD_CALLS = 3
"""Calls at the beginning of a block that do not count."""
FEWEST_ROUNDS = 3
"""Rounds that are run whatever the share of time."""
_SHORTEST_BLOCK_US = 20_000.0
"""A block is no shorter: draining takes some 10 µs."""
_MOST_CALLS = 4000
FIRST_CALLS = 1000
"""Calls over which what PyGraph measures is accounted for."""
_WARM_SECONDS = 0.2
"""Calls go on for this long before the first block, so that the clocks of the GPU are up."""
_STALLED = 240.0
"""Seconds after which a process that does not answer is taken for hung."""
_FAREWELL = 2.0
"""Seconds for a block to end, and for telling what was captured, when time is up: else what was measured is lost."""

Rows = dict[str, dict[str, float]]
"""What a round found, by side."""


@dataclass
class SideOutcome:
    """What is known of a side: facts from warming up and finishing, or how it failed. ``difference`` from eager."""

    facts: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    error: str = ""
    difference: float | None = None


@dataclass
class Group:
    """Sides that were alive together, the calls of a block, and what each round found."""

    sides: tuple[str, ...]
    calls: int = 0
    rounds: list[Rows] = field(default_factory=list)


@dataclass
class Timed:
    """Everything about one program."""

    sides: dict[str, SideOutcome] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Timing:
    """Times programs one after the other, each for its share of the time until ``end`` (of ``time.monotonic``).

    ``ahead`` says which sides have been compiled before.
    """

    def __init__(
        self,
        launcher: Launcher,
        end: float,
        *,
        blocks: int,
        seed: int,
        tell: Callable[[str], None] = lambda _: None,
        ahead: Callable[[Program, str], bool] = lambda *_: False,
    ) -> None:
        self._launcher, self._end, self._tell = launcher, end, tell
        self._blocks, self._seed = blocks, seed
        self._ahead = ahead
        self._waiting: dict[str, Process] = {}
        self._limit = end

    def run(
        self,
        programs: Sequence[Program],
        sides_of: Callable[[Program], Sequence[str]],
        done: Callable[[Program, Timed], None],
    ) -> None:
        """Time the sides that ``sides_of`` gives of each program; ``done`` is told of each that there was time for."""
        queue = [(program, tuple(sides_of(program))) for program in programs]
        try:
            for place, (program, sides) in enumerate(queue):
                if self._over():
                    return
                self._limit = time.monotonic() + (self._end - time.monotonic()) / (len(queue) - place)
                running, self._waiting = self._waiting or self._start(program, sides), {}
                done(program, self._program(program, sides, running, queue[place + 1 : place + 2]))
        finally:
            _end(self._waiting.values(), self._end)
            self._waiting = {}

    def _program(
        self,
        program: Program,
        sides: Sequence[str],
        running: dict[str, Process],
        following: Sequence[tuple[Program, tuple[str, ...]]],
    ) -> Timed:
        timed = Timed()

        def meanwhile() -> None:
            for other, theirs in following if not self._waiting else ():
                self._waiting = self._start(other, theirs)

        full = self._group(program, tuple(sides), running, timed, meanwhile)
        for size in (2, 1):
            if not full or self._over():
                break
            timed.notes.append(f"not all sides fit in memory at once: {', '.join(full)}; at most {size} at a time")
            timed.sides, timed.groups = {}, []
            full = self._smaller(program, _groups(sides, size), timed)
        return timed

    def _smaller(self, program: Program, groups: Iterable[tuple[str, ...]], timed: Timed) -> list[str]:
        for group in groups:
            if self._over():
                break
            full = self._group(program, group, self._start(program, group), timed, lambda: None)
            if full and len(group) > 1:
                return full
        return []

    # -- one group of sides that are alive together ----------------------------------------------------------------

    def _start(self, program: Program, sides: Sequence[str]) -> dict[str, Process]:
        threads = max((os.cpu_count() or 1) // max(len(sides), 1), 1)
        return {side: self._launcher.start(program, side, "time", threads) for side in sides}

    def _group(
        self,
        program: Program,
        sides: tuple[str, ...],
        running: dict[str, Process],
        timed: Timed,
        meanwhile: Callable[[], None],
    ) -> list[str]:
        """Time one group; returns the sides that had no memory, if there were others beside them."""
        alive = dict(running)
        found = {side: SideOutcome() for side in sides}
        try:
            self._all(alive, found, None)
            self._compile(program, alive, found, meanwhile)
            if full := _without_memory(found):
                return full
            for other in self._waiting.values():
                other.ready(self._until())  # what it imports is no company for what is timed
            self._warm_all(program, alive, found)
            if full := _without_memory(found):
                return full
            group = Group(sides)
            timed.groups.append(group)
            self._rounds(program, alive, found, group, timed)
            self._all(alive, found, "finish", until=max(self._until(), time.monotonic() + _FAREWELL))
            timed.notes += _late_decisions(found)
            timed.sides.update({side: _worse(timed.sides.get(side), outcome) for side, outcome in found.items()})
            return _without_memory(found)
        finally:
            _end(running.values(), self._end)

    def _over(self) -> bool:
        return time.monotonic() >= self._end

    def _until(self) -> float:
        return min(self._end, time.monotonic() + _STALLED)

    def _all(
        self,
        alive: dict[str, Process],
        found: Mapping[str, SideOutcome],
        does: str | None,
        meanwhile: Callable[[], None] = lambda: None,
        until: float | None = None,
    ) -> None:
        """Have every process do something at the same time; with None, wait until all are ready for it."""
        for process in alive.values():
            if does is not None:
                process.tell(does)
        meanwhile()
        until = self._until() if until is None else until
        for side in list(alive):
            process = alive[side]
            _note(alive, found, side, process.ready(until) if does is None else process.answer(until))

    def _compile(
        self,
        program: Program,
        alive: dict[str, Process],
        found: Mapping[str, SideOutcome],
        meanwhile: Callable[[], None],
    ) -> None:
        """One side by itself, where kernels have to be timed; then the others, which take what it chose."""
        first = next((side for side in alive if SIDES[side].caches), None)
        self._tell(f"{program.name}: compiling")
        if first is not None and not self._ahead(program, first):
            self._all({first: alive[first]}, found, "compile")
        else:
            first = None
        self._all({side: each for side, each in alive.items() if side != first}, found, "compile", meanwhile)
        for side in [side for side in alive if found[side].failure is not None]:
            del alive[side]

    def _warm_all(self, program: Program, alive: dict[str, Process], found: Mapping[str, SideOutcome]) -> None:
        """Warm up one after the other, and end those whose results are not the reference's."""
        for side in list(alive):
            self._tell(f"{program.name}: {side} warms up")
            first = FIRST_CALLS if SIDES[side].ours and not program.finite else 0
            answer = alive[side].ask(self._until(), "warm", calls=program.compared, seconds=_WARM_SECONDS, first=first)
            _note(alive, found, side, answer)
            if side in alive and not program.apart:
                found[side].difference = self._difference(program, side)
            apart = found[side].difference
            if side in alive and apart is not None and not apart <= program.tolerance:
                alive.pop(side).end(self._end)

    def _difference(self, program: Program, side: str) -> float | None:
        """How far this side's results are from eager's; None where there are none of eager's, or nothing in them."""
        from pygraph.bench.correctness import difference, load

        reference = self._launcher.home.result(program.name, REFERENCE, "time")
        if not reference.exists():
            return None
        path = self._launcher.home.result(program.name, side, "time")
        return difference(load(reference), load(path)) if path.exists() else math.inf

    def _rounds(
        self,
        program: Program,
        alive: dict[str, Process],
        found: Mapping[str, SideOutcome],
        group: Group,
        timed: Timed,
    ) -> None:
        slowest = max((found[side].facts.get("call_us", 0.0) for side in alive), default=0.0)
        group.calls = program.calls if program.finite else block_calls(program.calls, slowest)
        for number in range(self._blocks):
            if not alive:
                return
            if self._over() or (time.monotonic() >= self._limit and number >= FEWEST_ROUNDS):
                timed.notes.append(f"there was time for {number} of {self._blocks} rounds")
                return
            self._tell(f"{program.name}: round {number + 1} of {self._blocks}")
            rows = self._round(self._order(program, alive, number), alive, found, group.calls)
            if rows is None:
                timed.notes.append(f"the script ended in round {number + 1} of {self._blocks}")
                return
            if len(rows) < len(alive):
                timed.notes.append(f"there was time for {number} of {self._blocks} rounds")
                return
            group.rounds.append(rows)

    def _order(self, program: Program, sides: Iterable[str], number: int) -> list[str]:
        order = list(sides)
        random.Random(f"{self._seed} {program.name} {number}").shuffle(order)
        return order

    def _round(
        self, order: Sequence[str], alive: dict[str, Process], found: Mapping[str, SideOutcome], calls: int
    ) -> Rows | None:
        """One block of each side, of some only when the time is up; None where a script has come to its end."""
        rows: Rows = {}
        for side in order:
            if self._over():
                break
            answer = alive[side].ask(self._until() + _FAREWELL, "block", calls=calls, lead=LEAD_CALLS)
            if answer.failure == "ended":
                alive.pop(side).end(self._end)
                found[side].facts.update(answer.row)
                return None
            _note(alive, found, side, answer, keep=False)
            if side in alive:
                rows[side] = answer.row
        return rows


def block_calls(calls: int, slowest_us: float) -> int:
    """The calls of a block: a multiple of ``calls``, so that no block is much shorter than 20 ms."""
    if slowest_us <= 0 or calls * slowest_us >= _SHORTEST_BLOCK_US:
        return calls
    return calls * max(min(math.ceil(_SHORTEST_BLOCK_US / (calls * slowest_us)), _MOST_CALLS // calls), 1)


def _groups(sides: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Smaller groups of sides: PyGraph with each other one, or each alone; the reference comes first."""
    others = [side for side in sides if side != OURS]
    if size == 1 or len(others) == len(sides):
        return [(side,) for side in sides]
    return [(side, OURS) for side in others]


def _without_memory(found: Mapping[str, SideOutcome]) -> list[str]:
    return [side for side, outcome in found.items() if outcome.failure == "memory"] if len(found) > 1 else []


def _note(
    alive: dict[str, Process], found: Mapping[str, SideOutcome], side: str, answer: Answer, keep: bool = True
) -> None:
    if answer.failure is None:
        if keep:
            found[side].facts.update(answer.row)
        return
    found[side].failure, found[side].error = answer.failure, answer.error
    alive.pop(side)


def _worse(before: SideOutcome | None, now: SideOutcome) -> SideOutcome:
    """What is known of a side that ran in several groups: the first one's facts, and what went wrong in any of them."""
    if before is None:
        return now
    known = [each.difference for each in (before, now) if each.difference is not None]
    failed = before if before.failure is not None else now
    return replace(before, failure=failed.failure, error=failed.error, difference=max(known, default=None))


def _late_decisions(found: Mapping[str, SideOutcome]) -> list[str]:
    """A measurement that ends while blocks are timed has run, in some of them, what is not used in the end."""
    notes = []
    for side, outcome in found.items():
        ended = sum(len(region["decisions"]) for region in outcome.facts.get("regions", ()))
        if ended > outcome.facts.get("decisions", ended):
            notes.append(f"{side}: measured selection went on while blocks were timed")
    return notes


def _end(processes: Iterable[Process], until: float) -> None:
    ending = list(processes)
    for process in ending:
        process.kill()  # all at once: to take down what a process has on a GPU takes a second
    for process in ending:
        process.end(until)
