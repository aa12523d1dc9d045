"""Which order of its launches a captured variant is faster in. Its own calls tell, once each.

The order of launches is a matter of the device. Single calls take turns, and events around each tell how long it
took: nothing waits, and calls of other regions, or other sizes, may come in between. Turns are shuffled: a call that
finds the device idle takes longer, and callers who wait do so every so many calls.

Of ROUNDS rounds, the other order has to win all but one by its margin; anything less is a tie, and replays as before.
What is certain before the last round ends it. Where the device waits for the caller's loop, as it does for one that
reads each result, the loop has the last word: an order that makes it slower, from one call to the next, is not chosen,
however fast the device is. A loop of several regions is known by the device's time from the begin of one call to that
of the next: where that is longer than the host's, the host is ahead. The decision is kept on disk for later processes.
Nothing here makes a call, and no call runs twice.

Ranks that have to replay alike decide together (``JointContest``): on an order, and on captured collectives.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from pygraph.cache import kept_under, load_json, store_json, warn_once
from pygraph.runtime.contract import Driver, Timer
from pygraph.runtime.identity import device_of, program_key
from pygraph.runtime.tensors import bits
from pygraph.version import __version__

_log = logging.getLogger("pygraph.runtime")

Function = Callable[[list[Any]], Sequence[Any]]

PROGRAM, DEPENDENCES = "program", "dependences"
"""Orders: as captured, or each launch waits for those alone that it depends on."""

ROUNDS = 5
_LOSSES = 1
"""Rounds that the other order may lose and still be chosen."""
TURNS = 8
"""Calls of each order in a round, of which the median counts."""
MARGIN = 0.02
"""DEPENDENCES wins a round if its time is below the other's by more than this fraction."""
LOOP_MARGIN = 0.01
"""A loop is slower if it takes longer by more than this fraction."""
PATIENCE = 200
"""Calls that a contest begins to time in a row though they are another variant's; and that a variant waits for others'
contests to go on."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order that one variant is replayed in.

    Args:
        order: ``program`` or ``dependences``
        program_us: median of the rounds, µs of the device per call; 0 where none was timed
        dependences_us: the same for the other order
        calls: calls that were timed
        slower_loop: the other order made the caller's loop slower, though not the device
        path: the file that an earlier process's decision was read from
    """

    order: str
    program_us: float
    dependences_us: float
    calls: int
    slower_loop: bool = False
    path: str | None = None


class _Rounds:
    """Calls that were timed, and what their medians say. ``path`` is the file that the decision goes to, if it is kept;
    ``margin`` the fraction by which the other order has to be faster. An exception that comes in between, at any line,
    loses no round and no decision: both are read from the calls."""

    def __init__(self, path: Path | None, margin: float) -> None:
        self.path, self._margin = path, margin
        self.calls: dict[str, list[float]] = {PROGRAM: [], DEPENDENCES: []}
        self.loops: dict[str, list[float]] = {PROGRAM: [], DEPENDENCES: []}
        """Seconds from a call in each order to the next call, but for those that timing it takes."""
        self.lags: list[float] = []
        """Seconds by which the device took longer than the host from the begin of a call to that of the next."""
        self._judged = 0
        """Rounds that said nothing yet."""

    @property
    def timed(self) -> int:
        """Calls so far."""
        return sum(map(len, self.calls.values()))

    def _times(self) -> dict[str, list[float]]:
        """The median of each round, by order."""
        return {
            order: [median(calls[end - TURNS : end]) for end in range(TURNS, len(calls) + 1, TURNS)]
            for order, calls in self.calls.items()
        }

    def judge(self) -> Decision | None:
        """A decision, if a round that both orders are through with since the last time says something."""
        whole = min(map(len, self.calls.values())) // TURNS
        if whole == self._judged:
            return None
        won = [other < (1 - self._margin) * program for program, other in zip(*self._times().values(), strict=False)]
        if won.count(False) > _LOSSES:
            return self.decide(PROGRAM)
        if won.count(True) >= ROUNDS - _LOSSES:
            return self.decide(DEPENDENCES)
        self._judged = whole
        return None

    def decide(self, order: str) -> Decision:
        """The decision for ``order``, unless that makes the caller's loop slower."""
        times = self._times()
        program_us, dependences_us = (median(found) * 1e6 if found else 0.0 for found in times.values())
        slower = order == DEPENDENCES and self._slows_the_loop(times[PROGRAM])
        return Decision(PROGRAM if slower else order, program_us, dependences_us, self.timed, slower)

    def _slows_the_loop(self, times: list[float]) -> bool:
        """True if the other order makes the caller's loop slower, where that is not ahead of the device, which takes
        ``times`` for this variant in the program's order, and more for the loop if it has other work as well."""
        if min(map(len, self.loops.values())) < TURNS:
            return False
        program, dependences = map(median, self.loops.values())
        ahead = program <= (1 - LOOP_MARGIN) * median(times) or median(self.lags or [0.0]) > LOOP_MARGIN * program
        return not ahead and dependences > (1 + LOOP_MARGIN) * program


@dataclass(slots=True)
class _Turn:
    """A call in one order, what times it, if anything can, and when it began; the turn that the call before had, until
    both are over; and seconds that it took, once they are known."""

    order: str
    timer: Timer | None
    began: float
    before: _Turn | None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _Past:
    """A call that was timed: seconds that the host took, and when timing it was over."""

    turn: _Turn
    seconds: float
    left: float


def _plan() -> Iterator[str]:
    """Whose turn it is, round by round."""
    drawn = random.Random(0)
    for _ in range(ROUNDS):
        turns = [PROGRAM, DEPENDENCES] * TURNS
        drawn.shuffle(turns)
        yield from turns


_PLAN = tuple(_plan())


class Contest:
    """Times one variant in two orders of its launches, as its calls come in: from several threads at once, of which one
    at a time is timed. ``args`` is the call that was captured."""

    def __init__(
        self,
        driver: Driver,
        args: Sequence[Any],
        path: Path | None,
        clock: Callable[[], float] = perf_counter,
        margin: float = MARGIN,
    ) -> None:
        self._driver, self._device, self._clock = driver, device_of(args), clock
        self._rounds = _Rounds(path, margin)
        self._under_way: deque[_Turn] = deque()
        self._vain = 0
        self._last: _Past | None = None
        """The call before, if it was timed."""
        self._leaving: list[object] = []
        """The call that looks for a decision; behind it, those that leave it to that one."""
        self._decision: Decision | None = None
        self._over = False

    def enter(self) -> _Turn | None:
        """Begin to time the call that comes now, in the order whose turn it is; None: it is to be replayed as before,
        and is not timed. Only ``leave`` counts a call, which may turn out to be another variant's."""
        before = self._come_round()
        order = None if self._vain >= PATIENCE else self._next()
        timer = None if order is None else self._driver.timer(self._device)
        if order is None or timer is None:
            return None
        self._vain += 1
        return _Turn(order, timer, self._clock(), before)

    def _come_round(self) -> _Turn | None:
        """A call begins: if the last one was timed, the caller's loop has come round. Returns that one's turn."""
        last, self._last = self._last, None
        if last is None:
            return None
        self._rounds.loops[last.turn.order].append(last.seconds + self._clock() - last.left)
        return last.turn

    def leave(self, turn: _Turn | None, choose: Callable[[Decision], None]) -> None:
        """A call of ``turn`` was submitted. ``choose`` is told the decision at the end of the call that finds it; and
        again at the end of the next, for as long as something is raised there."""
        seconds, me = 0.0 if turn is None else self._clock() - turn.began, object()
        try:
            self._stop(turn)
            self._leaving.append(me)
            if self._leaving[0] is me and not self._over:
                self._decision = self._decision or self._find(turn)
                if self._decision is not None:
                    choose(self._decision)
                    self._over = True
        finally:
            if me in self._leaving:
                self._leaving.remove(me)
            self._last = None if turn is None else _Past(turn, seconds, self._clock())

    def _stop(self, turn: _Turn | None) -> None:
        self._vain = 0
        if turn is not None and turn.timer is not None:
            turn.timer.stop()

    def _find(self, turn: _Turn | None) -> Decision | None:
        """The decision, if calls that are over by now say something."""
        if turn is not None:
            self._under_way.append(turn)
        while (found := self._judge()) is None and self._under_way and self._over_by_now(self._under_way[0]):
            self._under_way.popleft()
        return found

    def _over_by_now(self, turn: _Turn) -> bool:
        """Counts ``turn`` if the device is through with it."""
        timer = turn.timer
        turn.seconds = None if timer is None else timer.seconds()
        if timer is None or turn.seconds is None:
            return False
        self._rounds.calls[turn.order].append(turn.seconds)
        before, turn.before = turn.before, None
        if before is not None and before.timer is not None and before.seconds is not None:
            self._rounds.lags.append(timer.since(before.timer) - (turn.began - before.began))
        return True

    def _judge(self) -> Decision | None:
        return self._rounds.judge()

    def keep(self, decision: Decision) -> None:
        """Keep ``decision`` for other processes."""
        if self._rounds.path is not None:
            _write(self._rounds.path, decision)

    def _next(self) -> str | None:
        """Whose turn it is; None while what is under way may decide. Threads may have taken one turn together."""
        place = self._rounds.timed + len(self._under_way)
        if place < len(_PLAN):
            return _PLAN[place]
        short = [order for order, calls in self._rounds.calls.items() if len(calls) < ROUNDS * TURNS]
        return None if self._under_way or not short else short[0]


class JointContest(Contest):
    """Times one variant on all ranks of a process group at once: as it was replayed before (PROGRAM), and as its rival
    is (DEPENDENCES). A collective that one rank replays in another way than the others may hang, so whose turn it is
    depends on the number of the call alone: a rank that has missed a call is in step again at the next.

    Args:
        place: how many calls of the region came between the one that began this, and the one that is under way
        agree: is told, behind the last turn, which calls were timed, if the rival has won here (None: it has not), and
            returns whether that is so on all ranks, for the same calls
    """

    TURNS = len(_PLAN)
    """Calls after which ranks decide."""

    def __init__(
        self,
        driver: Driver,
        args: Sequence[Any],
        place: Callable[[], int],
        agree: Callable[[str | None], bool],
        clock: Callable[[], float] = perf_counter,
        margin: float = MARGIN,
    ) -> None:
        super().__init__(driver, args, None, clock, margin)
        self._place, self._agree = place, agree
        self._timed_calls: list[int] = []

    def enter(self) -> _Turn | None:
        before = self._come_round()
        place = self._place()
        if place >= self.TURNS:
            return None
        return _Turn(_PLAN[place], self._driver.timer(self._device), self._clock(), before)

    def _stop(self, turn: _Turn | None) -> None:
        super()._stop(turn)
        if turn is not None:
            self._under_way.append(turn)
            self._timed_calls.append(self._place())

    def _find(self, turn: _Turn | None) -> Decision | None:  # noqa: ARG002
        if self._place() < self.TURNS - 1:
            return None
        self._driver.synchronise(self._device)
        while self._under_way:
            self._over_by_now(self._under_way.popleft())
        decision = self._judge() or self._rounds.decide(PROGRAM)
        try:
            won = self._agree(str(self._timed_calls) if decision.order == DEPENDENCES else None)
        except Exception:  # ranks cannot talk to each other: they are not asked again
            self._decision = dataclasses.replace(decision, order=PROGRAM)
            raise
        return dataclasses.replace(decision, order=DEPENDENCES if won else PROGRAM)


# -- decisions on disk -------------------------------------------------------------------------------------------------

_SCHEMA = 10
"""Part of the key. Raised when a field or the procedure changes."""


def kept_path(fn: Function, args: Sequence[Any], cache_dir: str | None, passes: str) -> Path | None:
    """The file in ``cache_dir`` for decisions, where launch passes of the key ``passes`` make the programs, on calls of
    ``fn`` like this; None if nothing is kept, or if ``fn`` is in no file, or depends on a closure.

    The key has the text of ``fn``'s module, with the source of every kernel. The insides of custom operators are not
    covered: a decision that is wrong for that reason costs time and makes no result wrong.
    """
    program = None if cache_dir is None else program_key(fn, args)
    if program is None:
        return None
    call = [
        (*arg.size(), arg.stride(), arg.dtype, arg.device.type) if isinstance(arg, torch.Tensor) else bits(arg)
        for arg in args
    ]
    return kept_under(cache_dir, "decisions", (_SCHEMA, __version__, *program, call, passes))


def read(path: Path) -> Decision | None:
    """Decision of an earlier process; None if there is none, or, with a warning, if that cannot be read."""
    found = load_json(path)
    if found is None:
        return None
    try:
        times = float(found["program_us"]), float(found["dependences_us"])
        if found["order"] not in (PROGRAM, DEPENDENCES) or not all(0 <= time < math.inf for time in times):
            raise ValueError("it is no decision")
        return Decision(found["order"], *times, int(found["calls"]), found["slower_loop"] is True, path=str(path))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        warn_once(path, f"{type(error).__name__}: {error}")
        return None


def _write(path: Path, decision: Decision) -> None:
    """Keep ``decision``, whole: of several processes the last one wins. A warning where it cannot be written."""
    try:
        store_json(path, dataclasses.asdict(decision))
    except (OSError, ValueError) as error:  # a ValueError where the path can be no file's
        _log.warning("a decision is not kept across processes: %s", error)
