"""Measures one program: results of all sides compared, then blocks of calls interleaved, one side running at a time.

check    (programs that draw random numbers) results computed in processes of their own, in which Inductor draws as
         eager does
compile  one side by itself, which times kernels; then the others at once
warm     one side after the other; its results are compared with eager's, and one that differs is ended
blocks   rounds of one block of each side, in an order drawn anew
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pygraph.bench.process import Answer, Process, Spec
from pygraph.bench.sides import REFERENCE

__all__ = ["CALLS_COMPARED", "Bench", "Measured", "Outcome", "Program"]

CALLS_COMPARED = 7
"""Calls whose results are compared at least. By the fourth, each side has captured what is the same in each call."""
LEAD_CALLS = 3
"""Calls at the beginning of a block that do not count."""
FEWEST_ROUNDS = 3
"""Rounds that are run whatever the program's share of time."""
_SHORTEST_BLOCK_US, _MOST_CALLS = 20_000.0, 4000
"""A block is no shorter, since draining takes some 10 µs, but has no more calls."""
_WARM_SECONDS = 0.2
"""Calls go on for this long before the first block, so that the clocks of the GPU are up."""
_COMPILING, _STALLED = 900.0, 240.0
"""Seconds after which a process that compiles, or that runs, is taken for hung."""
_FAREWELL = 2.0
"""Seconds for a block to end, and for telling what was captured, when time is up: else what was measured is lost."""


@dataclass(frozen=True)
class Program:
    """What is run on each of ``sides``: ``runner`` (``module:function``) with ``path`` and ``args``, see ``Spec``.

    ``about`` goes into the document. ``tolerance`` bounds how far results may be from eager's, relative to their
    largest magnitude. The results of the first ``compared`` calls are compared, ``apart``, in processes of their own,
    if it draws random numbers. A block has a multiple of ``calls`` calls; exactly so many if the program is ``finite``,
    that is, ends by itself.
    """

    name: str
    runner: str
    path: str
    sides: tuple[str, ...]
    args: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 10
    tolerance: float = 1e-2
    compared: int = CALLS_COMPARED
    apart: bool = True
    finite: bool = True


@dataclass
class Outcome:
    """What is known of a side: facts from warming up and finishing, or how it failed. ``difference`` from eager."""

    facts: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    error: str = ""
    difference: float | None = None


@dataclass
class Measured:
    """All that was found of a program: sides, calls of a block, the blocks of each round by side, and notes."""

    sides: dict[str, Outcome]
    calls: int = 0
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Group:
    """The processes of a program's sides that are alive, and what became of all of them."""

    def __init__(self, alive: Mapping[str, Process], outcomes: Mapping[str, Outcome]) -> None:
        self.alive, self._all, self._outcomes = dict(alive), tuple(alive.values()), outcomes

    def note(self, side: str, answer: Answer) -> None:
        """Take in an answer; a side that failed is no longer alive."""
        outcome = self._outcomes[side]
        outcome.facts.update(answer.row)
        if answer.failure is not None:
            outcome.failure, outcome.error = answer.failure, answer.error
            del self.alive[side]

    def together(self, until: float, sides: Sequence[str], does: str, **more: Any) -> None:
        """Have ``sides`` do something at the same time; to be ``ready``, that is, to have imported all, they need no
        telling."""
        asked = [(side, self.alive[side]) for side in sides if side in self.alive]
        for _, process in asked if does != "ready" else ():
            process.tell(does, **more)
        for side, process in asked:
            self.note(side, process.answer(until))

    def end(self, until: float) -> None:
        """Kill all at once, since to take down what a process has on a GPU takes a second; then wait for them."""
        for process in self._all:
            process.kill()
        for process in self._all:
            process.end(until)


class Bench:
    """Measures programs on ``device``, with ``blocks`` rounds (0: caches are filled) in an order drawn from ``seed``.

    ``folder`` holds caches, results and logs, by program and side. ``command`` makes the command line of a process;
    ``step`` is told what is being done.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        *,
        blocks: int,
        seed: int = 0,
        step: Callable[[str], None] = lambda _: None,
        command: Sequence[str] = (sys.executable, "-m", "pygraph.bench.worker"),
    ) -> None:
        self._folder, self._device, self._command = folder.absolute(), device, command
        self._blocks, self._seed, self._step = blocks, seed, step

    def measure(
        self,
        program: Program,
        end: float,
        share: float = math.inf,
    ) -> Measured:
        """Measure ``program`` until ``end`` (of ``time.monotonic``) at most; its ``share`` of time ends before that."""
        found = Measured({side: Outcome() for side in program.sides})
        group = Group(self._start(program), found.sides)
        try:
            if program.apart:
                self._check(program, group, found, end)
            group.together(_within(end, _STALLED), program.sides, "ready")
            self._step(f"{program.name}: compiling")
            until = _within(end, _COMPILING)
            first = [side for side in group.alive if side != REFERENCE][:1]
            group.together(until, first, "compile")
            group.together(until, [side for side in group.alive if side not in first], "compile")
            self._warm(program, group, found, end)
            self._rounds(program, group, found, end, share)
            group.together(max(_within(end, _STALLED), time.monotonic() + _FAREWELL), list(group.alive), "finish")
            return found
        finally:
            group.end(end)

    def _start(self, program: Program, *, check: bool = False) -> dict[str, Process]:
        """A process for each side; none of them has been told to compile."""
        return {side: self._process(program, side, check) for side in program.sides}

    def _process(self, program: Program, side: str, check: bool) -> Process:
        own = self._folder / program.name / side
        own.mkdir(parents=True, exist_ok=True)
        result = self._result(program, side, check)
        result.unlink(missing_ok=True)  # of an earlier benchmark with the same caches
        spec = Spec(program.runner, program.path, program.args, side, self._device, str(result), check)
        environ = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(own / "compiled"),
            "TRITON_CACHE_DIR": str(own.parent / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(max((os.cpu_count() or 1) // len(program.sides), 1)),
            **({"PYGRAPH_MEASURE": "0"} if check else {}),
        }
        return Process([*self._command, spec.text()], environ, result.with_suffix(".log"))

    def _result(self, program: Program, side: str, check: bool) -> Path:
        return self._folder / program.name / side / ("check.pt" if check else "time.pt")

    def _check(self, program: Program, group: Group, found: Measured, end: float) -> None:
        """Compare results computed with Inductor drawing as eager does; sides that fail here are not timed."""
        self._step(f"{program.name}: comparing results")
        outcomes = {side: Outcome() for side in program.sides}
        checking, until = Group(self._start(program, check=True), outcomes), _within(end, _COMPILING)
        try:
            checking.together(until, program.sides, "ready")
            checking.together(until, program.sides, "compile")
            checking.together(until, program.sides, "warm", calls=program.compared, seconds=0.0)
        finally:
            checking.end(end)
        for side, outcome in outcomes.items():
            if outcome.failure in (None, "ended"):
                self._compare(program, group, found, side, True)
            else:
                group.note(side, Answer(failure=outcome.failure, error=outcome.error))

    def _compare(self, program: Program, group: Group, found: Measured, side: str, check: bool) -> None:
        """Note how far a side's results are from eager's, and end it if they are wrong."""
        from pygraph.bench.compare import difference, load

        reference, path = self._result(program, REFERENCE, check), self._result(program, side, check)
        if not reference.exists():
            return
        apart = difference(load(reference), load(path)) if path.exists() else math.inf
        found.sides[side].difference = apart if apart is not None and math.isfinite(apart) else None
        if apart is not None and not apart <= program.tolerance:
            shown = f"{apart:.3g}" if math.isfinite(apart) else "an infinite part"
            told = f"results differ from {REFERENCE}'s by {shown} of their largest magnitude"
            group.note(side, Answer(failure="wrong", error=told))

    def _warm(self, program: Program, group: Group, found: Measured, end: float) -> None:
        for side in list(group.alive):
            self._step(f"{program.name}: {side} warms up")
            until = _within(end, _STALLED)
            group.together(until, [side], "warm", calls=program.compared, seconds=_WARM_SECONDS)
            if side in group.alive and not program.apart:
                self._compare(program, group, found, side, False)

    def _rounds(self, program: Program, group: Group, found: Measured, end: float, share: float) -> None:
        slowest = max((found.sides[side].facts["call_us"] for side in group.alive), default=0.0)
        found.calls = program.calls if program.finite else block_calls(program.calls, slowest)
        for number in range(self._blocks if group.alive else 0):
            self._step(f"{program.name}: round {number + 1} of {self._blocks}")
            rows: dict[str, dict[str, float]] = {}
            order = list(group.alive)
            random.Random(f"{self._seed} {program.name} {number}").shuffle(order)
            over = min(end, share) if number >= FEWEST_ROUNDS else end
            for side in order:
                if time.monotonic() >= (end if rows else over):
                    found.notes.append(f"there was time for {number} of {self._blocks} rounds")
                    return
                until = _within(end, _STALLED) + _FAREWELL
                answer = group.alive[side].ask(until, "block", calls=found.calls, lead=LEAD_CALLS)
                if answer.failure == "ended":
                    found.notes.append(f"the script ended in round {number + 1} of {self._blocks}")
                    del group.alive[side]
                    return
                if answer.failure is None:
                    rows[side] = answer.row
                else:
                    group.note(side, answer)
            found.rounds.append(rows)


def block_calls(calls: int, slowest_us: float) -> int:
    """The calls of a block: a multiple of ``calls``, so that no block is much shorter than 20 ms."""
    if slowest_us <= 0 or calls * slowest_us >= _SHORTEST_BLOCK_US:
        return calls
    return calls * max(min(math.ceil(_SHORTEST_BLOCK_US / (calls * slowest_us)), _MOST_CALLS // calls), 1)


def _within(end: float, seconds: float) -> float:
    return min(end, time.monotonic() + seconds)
