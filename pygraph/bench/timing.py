"""Measures a program: compares results of all sides, then interleaves blocks of calls; one side runs at a time.

check    (programs that draw random numbers) compute results in separate processes, in which Inductor draws as eager
         does
compile  one side alone, since it times kernels; then the others at the same time
warm     one side after the other; results are compared with eager's, and a side that differs is ended
blocks   rounds of one block of each side, in a new random order
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pygraph.bench.process import Outcome, Process, Spec
from pygraph.bench.sides import REFERENCE

CALLS_COMPARED = 7
"""Minimum number of calls whose results are compared. By the fourth, sides have captured whatever repeats."""
LEAD_CALLS = 3
"""Untimed calls at the beginning of a block."""
FEWEST_ROUNDS = 3
"""Number of rounds that run regardless of the program's share of time."""
_SHORTEST_BLOCK_US, _MOST_CALLS = 20_000.0, 4000
"""Minimum length of a block in µs, since draining takes some 10 µs, and maximum number of calls."""
_WARM_SECONDS = 0.2
"""Seconds of calls before the first block, so that the clocks of the GPU rise."""
_COMPILING_PART = 0.7
"""Fraction of the remaining time in which programs that compile together must finish: a slower one is left out, so that
it does not take the time of the others."""
_COMPILING, _STALLED = 900.0, 240.0
"""Seconds after which a process that compiles, or that runs, counts as hung."""
_FAREWELL = 2.0
"""Seconds for a block to end, and for the report of captures, when time is up: else measurements would be lost."""


@dataclass(frozen=True)
class Program:
    """A program, run on each of ``sides``: ``runner`` (``module:function``) with ``path`` and ``args``, see ``Spec``.

    ``about`` goes into the document. ``tolerance`` bounds the difference of results from eager's, relative to their
    largest magnitude. The results of the first ``compared`` calls are compared; ``apart``: in separate processes, for
    programs that draw random numbers. A block has a multiple of ``calls`` calls; exactly ``calls`` if the program is
    ``finite``, that is, ends by itself.
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
class Measured:
    """All measurements of a program: sides, calls per block, the blocks of each round by side, and notes."""

    sides: dict[str, Outcome]
    calls: int = 0
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Group:
    """The processes of a program's sides, for a check or for timing: live ones, and the outcomes of all."""

    def __init__(self, bench: Bench, program: Program, end: float, *, check: bool = False) -> None:
        self.outcomes = {side: Outcome() for side in program.sides}
        self._bench, self._program, self._check, self.end = bench, program, check, end
        self.alive = {side: self._start(side) for side in program.sides}
        self._all: tuple[Process, ...] = tuple(self.alive.values())

    def _start(self, side: str) -> Process:
        bench, program, result = self._bench, self._program, self.result(side)
        result.parent.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)  # of an earlier benchmark with the same caches
        spec = Spec(program.runner, program.path, program.args, side, bench.device, str(result), self._check)
        environ = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(len(os.sched_getaffinity(0)) // len(program.sides), 1)),
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(result.parent / "compiled"),
            "TRITON_CACHE_DIR": str(result.parents[1] / "triton"),
            **({"PYGRAPH_LEDGER": "0", "PYGRAPH_ORDER": "program"} if self._check else {}),
        }
        return Process([*bench.command, json.dumps(asdict(spec))], environ, result.with_suffix(".log"))

    def result(self, side: str) -> Path:
        """File of the results of ``side`` for comparison."""
        return self._bench.folder.absolute() / self._program.name / side / ("check.pt" if self._check else "time.pt")

    def note(self, side: str, answer: Outcome) -> None:
        """Record an answer; a side that failed is no longer alive."""
        outcome = self.outcomes[side]
        outcome.facts.update(answer.facts)
        outcome.difference = answer.difference if outcome.difference is None else outcome.difference
        if answer.failure is not None:
            outcome.failure, outcome.error = answer.failure, answer.error
            del self.alive[side]

    def together(self, limit: float, sides: Sequence[str], does: str, **more: Any) -> None:
        """Have ``sides`` execute a command at the same time, in ``limit`` seconds at most. ``ready`` sends no command:
        it waits until all have imported their modules."""
        until = self.within(limit, _FAREWELL if does == "finish" else 0.0)
        asked = [(side, self.alive[side]) for side in sides if side in self.alive]
        for _, process in asked if does != "ready" else ():
            process.tell(does, **more)
        for side, process in asked:
            self.note(side, process.answer(until))

    def compare(self, side: str) -> Outcome:
        """Difference of the results of ``side`` from eager's, and a failure if it exceeds the tolerance."""
        import torch

        from pygraph.bench.compare import difference

        reference, path = self.result(REFERENCE), self.result(side)
        if not reference.exists():
            return Outcome()
        apart = difference(torch.load(reference), torch.load(path)) if path.exists() else math.inf
        if apart is None or apart <= self._program.tolerance:
            return Outcome(difference=apart)
        shown = f"{apart:.3g}" if math.isfinite(apart) else "an infinite part"
        told = f"results differ from {REFERENCE}'s by {shown} of their largest magnitude"
        return Outcome({}, "wrong", told, apart if math.isfinite(apart) else None)

    def within(self, seconds: float, grace: float = 0.0) -> float:
        """The time in ``seconds``, but no later than ``end``; in ``grace`` seconds at the earliest."""
        return max(min(self.end, time.monotonic() + seconds), time.monotonic() + grace)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes at once, since each takes a second to free its GPU resources; then wait for them."""
        processes, self._all = self._all, ()
        for process in processes:
            process.kill()
        for process in processes:
            process.end(self.end)


@dataclass(frozen=True)
class Bench:
    """Measures programs on ``device``, with ``blocks`` rounds in an order drawn from ``seed``.

    ``folder`` holds caches, results and logs, by program and side. ``command`` begins the command line of a process;
    ``step`` is called with the current activity. Before timing, processes of a program move to ``cores``, if given.
    """

    folder: Path
    device: str
    blocks: int
    seed: int = 0
    step: Callable[[str], None] = lambda _: None
    command: Sequence[str] = (sys.executable, "-m", "pygraph.bench.worker")
    cores: Collection[int] = ()

    def measure(self, program: Program, end: float, share: float = math.inf) -> Measured:
        """Measure ``program`` until ``end`` (of ``time.monotonic``) at most. After the time ``share``, begin only the
        first FEWEST_ROUNDS rounds."""
        return next(self.measure_all([program], end, share))

    def measure_all(self, programs: Sequence[Program], end: float, share: float = math.inf) -> Iterator[Measured]:
        """Measure ``programs`` as ``measure`` does. All compile at the same time; then they are timed one by one, while
        processes of later programs hold their memory. A program that compiles for most of the time is left out."""
        with ThreadPoolExecutor(len(programs)) as pool, ExitStack() as alive:
            groups = [alive.enter_context(Group(self, program, end)) for program in programs]
            if len(groups) > 1:
                for group in groups:
                    group.end -= (1 - _COMPILING_PART) * max(end - time.monotonic(), 0.0)
            list(pool.map(self._compile, programs, groups))
            for program, group in zip(programs, groups, strict=True):
                group.end = end
                with group:
                    found = self._time(program, group, share)
                yield found

    def _compile(self, program: Program, group: Group) -> None:
        if program.apart:
            self._check(program, group)
        group.together(_STALLED, program.sides, "ready")
        self.step(f"{program.name}: compiling")
        first = [side for side in group.alive if side != REFERENCE][:1]
        group.together(_COMPILING, first, "compile")
        group.together(_COMPILING, [side for side in group.alive if side not in first], "compile")

    def _time(self, program: Program, group: Group, share: float) -> Measured:
        found = Measured(group.outcomes)
        for process in group.alive.values() if self.cores else ():
            process.move(self.cores)
        for side in list(group.alive):
            self.step(f"{program.name}: {side} warms up")
            group.together(_STALLED, [side], "warm", calls=program.compared, seconds=_WARM_SECONDS)
            if side in group.alive and not program.apart:
                group.note(side, group.compare(side))
        self._rounds(program, group, found, share)
        group.together(_STALLED, list(group.alive), "finish")
        return found

    def _check(self, program: Program, group: Group) -> None:
        """Compare results of processes in which Inductor draws as eager does; sides that fail here are not timed."""
        self.step(f"{program.name}: comparing results")
        with Group(self, program, group.end, check=True) as checking:
            checking.together(_COMPILING, program.sides, "ready")
            checking.together(_COMPILING, program.sides, "compile")
            checking.together(_COMPILING, program.sides, "warm", calls=program.compared, seconds=0.0)
        for side, outcome in checking.outcomes.items():
            group.note(side, checking.compare(side) if outcome.failure in (None, "ended") else outcome)

    def _rounds(self, program: Program, group: Group, found: Measured, share: float) -> None:
        slowest = max((found.sides[side].facts["call_us"] for side in group.alive), default=0.0)
        found.calls = program.calls if program.finite else block_calls(program.calls, slowest)
        for number in range(self.blocks if group.alive else 0):
            self.step(f"{program.name}: round {number + 1} of {self.blocks}")
            rows: dict[str, dict[str, float]] = {}
            order = list(group.alive)
            random.Random(f"{self.seed} {program.name} {number}").shuffle(order)
            over = min(group.end, share) if number >= FEWEST_ROUNDS else group.end
            for side in order:
                if time.monotonic() >= (group.end if rows else over):
                    found.notes.append(f"there was time for {number} of {self.blocks} rounds")
                    return
                group.alive[side].tell("block", calls=found.calls, lead=LEAD_CALLS)
                answer = group.alive[side].answer(group.within(_STALLED, _FAREWELL))
                if answer.failure == "ended":
                    found.notes.append(f"the script ended in round {number + 1} of {self.blocks}")
                    del group.alive[side]
                    return
                if answer.failure is None:
                    rows[side] = answer.facts
                else:
                    group.note(side, answer)
            found.rounds.append(rows)


def block_calls(calls: int, slowest_us: float) -> int:
    """Number of calls of a block: a multiple of ``calls``, so that no block is much shorter than 20 ms."""
    if slowest_us <= 0 or calls * slowest_us >= _SHORTEST_BLOCK_US:
        return calls
    return calls * max(min(math.ceil(_SHORTEST_BLOCK_US / (calls * slowest_us)), _MOST_CALLS // calls), 1)
