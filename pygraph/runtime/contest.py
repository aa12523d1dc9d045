"""Measures in which of two orders of launches a captured variant is faster, by its real calls.

    dependences ×8 | program ×8 | program ×8 | dependences ×8 | dependences ×8 | …

The order of launches affects the device's time for the call, and for the work ahead of it: lanes of a replay that waits
in the stream slow that work, also of other regions. So TURNS calls in a row are replayed in one order, the
host waits for the device between two blocks, and one contest of a device is timed at a time. Events around each call
measure its time, and how long after the call before it starts. Calls of other regions, or other sizes, may come in
between.

Of ROUNDS rounds, each a block in either order, the other order has to win all but one by its margin; otherwise, replays
stay as before. A contest ends as soon as its result is certain. An order that makes the caller's loop slower, from the
start of one call to the start of the next, is not chosen, however fast the region is. The decision is kept on disk for
later processes. Nothing here makes a call, and no call runs twice.

Ranks that must replay alike decide together (``JointContest``): on an order, and on captured collectives. Their
calls alone say whose turn it is: no rank waits for its device before the last turn.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
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
"""Orders: as captured, or each launch waits only for those on which it depends."""

ROUNDS = 5
_LOSSES = 1
"""Rounds that the other order may lose and still be chosen."""
TURNS = 8
"""Calls of a block."""
MARGIN = 0.01
"""DEPENDENCES wins a round if its time is below the other's by more than this fraction; a loop that takes longer by
more than this fraction is slower."""
PATIENCE = 200
"""Calls in a row that turn out to be another variant's, after which a contest pauses; and calls of one variant that
wait for a contest without progress, after which that contest loses its turn."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order in which one variant is replayed.

    Args:
        order: ``program`` or ``dependences``
        program_us: device time per call in µs, the median of the rounds; 0 if none was timed
        dependences_us: device time per call in µs in the other order; 0 if none was timed
        calls: number of calls that were timed
        slower_loop: the other order made the caller's loop slower, but not the region
        path: file from which a decision of an earlier process was read
    """

    order: str
    program_us: float
    dependences_us: float
    calls: int
    slower_loop: bool = False
    path: str | None = None


class _Rounds:
    """Timed calls, and the decision by their medians. ``path``: file of the decision, if it is kept. ``margin``: the
    fraction by which the other order has to be faster. An exception at any line loses no round and no decision: both
    are computed from the calls."""

    def __init__(self, path: Path | None, margin: float) -> None:
        self.path, self._margin = path, margin
        self.calls: dict[str, list[float]] = {PROGRAM: [], DEPENDENCES: []}
        self.loops: dict[str, list[float]] = {PROGRAM: [], DEPENDENCES: []}
        """Seconds from the start of the call before to that of a call in each order, by the device's clock. If a loop
        calls the region several times, the most frequent distance counts."""
        self._judged = 0
        """Rounds already judged, without a decision."""

    @property
    def timed(self) -> int:
        """Number of timed calls so far."""
        return sum(map(len, self.calls.values()))

    def _times(self) -> dict[str, list[float]]:
        """The median of each block, by order, without its first call, which finds the device idle."""
        return {
            order: [median(calls[end - TURNS + 1 : end]) for end in range(TURNS, len(calls) + 1, TURNS)]
            for order, calls in self.calls.items()
        }

    def judge(self) -> Decision | None:
        """A decision, if rounds that both orders have completed since the last time allow one."""
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
        """The decision for ``order``, or for PROGRAM if ``order`` makes the caller's loop slower."""
        program_us, dependences_us = (median(found) * 1e6 if found else 0.0 for found in self._times().values())
        slower = order == DEPENDENCES and self._slows_the_loop()
        return Decision(PROGRAM if slower else order, program_us, dependences_us, self.timed, slower)

    def _slows_the_loop(self) -> bool:
        """True if the caller's loop takes longer in the other order."""
        program, dependences = (median(found or [math.nan]) for found in self.loops.values())
        return dependences > (1 + MARGIN) * program


@dataclass(slots=True)
class _Turn:
    """A call in one order: its timer, if there is one; the call before, if that was timed, until both are over; and the
    seconds that it took, once they are known."""

    order: str
    timer: Timer | None
    before: _Turn | None
    seconds: float | None = None


_PLAN = tuple(
    order
    for number in range(ROUNDS)
    for order in ((DEPENDENCES, PROGRAM), (PROGRAM, DEPENDENCES))[number % 2]
    for _ in range(TURNS)
)
"""The order of each timed call, round by round. A drift of the device's speed decides no contest: neither order comes
first in four rounds."""


class Contest:
    """Times one variant in two orders of its launches, as its calls come in, perhaps from several threads at once. Its
    device is that of ``args``, the call that was captured."""

    def __init__(self, driver: Driver, args: Sequence[Any], path: Path | None, margin: float = MARGIN) -> None:
        self._driver, self._device = driver, device_of(args)
        self._rounds = _Rounds(path, margin)
        self._under_way: deque[_Turn] = deque()
        self._vain = 0
        self._border = 0
        """Number of the block before which the host has waited."""
        self._last: _Turn | None = None
        """The previous call, if it was timed."""
        self._leaving: list[object] = []
        """The call that looks for a decision, followed by those that leave this to it."""
        self._decision: Decision | None = None
        self._over = False

    def enter(self) -> _Turn | None:
        """Begin to time the current call, in the order whose turn it is. Returns None if it is to be replayed as
        before, and not timed. Only ``leave`` counts a call, since it may turn out to be another variant's."""
        if self._vain >= PATIENCE or not self._has_turn():
            return None
        order = self._next()
        turn = None if order is None else self._turn(order)
        if turn is None or turn.timer is None:
            return None
        self._vain += 1
        return turn

    @property
    def progress(self) -> int:
        """Number of calls that were timed, or are under way."""
        return self._rounds.timed + len(self._under_way)

    def _has_turn(self) -> bool:
        """True if this is the contest of its device that is timed, perhaps from now on."""
        watch = _timed.get(self._device)
        if watch is None or watch.contest() is not self:
            if not may_begin(self._device, self):
                return False
            self.take_turn()
        return True

    def take_turn(self) -> None:
        """Have others of the device wait from now on."""
        _timed[self._device] = _Watch(weakref.ref(self), self.progress)

    def _turn(self, order: str) -> _Turn:
        return _Turn(order, self._driver.timer(self._device), self._last)

    def leave(self, turn: _Turn | None, choose: Callable[[Decision], None]) -> None:
        """Count a call of ``turn``, which was submitted. ``choose`` is called with the decision at the end of the call
        that finds it, and again at the end of the next one as long as it raises."""
        me = object()
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
            self._last = turn

    def _stop(self, turn: _Turn | None) -> None:
        self._vain = 0
        if turn is not None and turn.timer is not None:
            turn.timer.stop()

    def _find(self, turn: _Turn | None) -> Decision | None:
        """The decision, if calls that are over by now allow one."""
        if turn is not None:
            self._under_way.append(turn)
        while (found := self._judge()) is None and self._under_way and self._over_by_now(self._under_way[0]):
            self._under_way.popleft()
        return found

    def _over_by_now(self, turn: _Turn) -> bool:
        """Count ``turn`` if the device has finished it. Returns whether it has."""
        timer = turn.timer
        turn.seconds = None if timer is None else timer.seconds()
        if timer is None or turn.seconds is None:
            return False
        self._rounds.calls[turn.order].append(turn.seconds)
        before, turn.before = turn.before, None
        first = len(self._rounds.calls[turn.order]) % TURNS == 1  # of a block, before which the host has waited
        if not first and before is not None and before.timer is not None and before.seconds is not None:
            self._rounds.loops[turn.order].append(timer.since(before.timer))
        return True

    def _judge(self) -> Decision | None:
        return self._rounds.judge()

    def keep(self, decision: Decision) -> None:
        """Keep ``decision`` for other processes."""
        if self._rounds.path is not None:
            _write(self._rounds.path, decision)

    def _next(self) -> str | None:
        """The order whose turn it is; None while calls under way may decide. Threads may have shared a turn."""
        place = self.progress
        if place < len(_PLAN):
            if place // TURNS != self._border and self._driver.synchronise(self._device):
                self._border = place // TURNS
            return _PLAN[place]
        short = [order for order, calls in self._rounds.calls.items() if len(calls) < ROUNDS * TURNS]
        return None if self._under_way or not short else short[0]


@dataclass(slots=True)
class _Watch:
    """A contest that is timed, its progress, and the calls of each waiter since, by its ``id``."""

    contest: weakref.ref[Contest]
    progress: int
    waited: Counter[int] = field(default_factory=Counter)


_timed: dict[torch.device | None, _Watch] = {}
"""By device (None: the current one), the contest that is timed, or was the last one."""


def may_begin(device: torch.device | None, waiter: object) -> bool:
    """True if ``waiter`` need not wait for a contest of ``device``: there is none, or it makes no progress. Counts this
    call as one that waits."""
    watch = _timed.get(device)
    contest = None if watch is None else watch.contest()
    if watch is None or contest is None:
        return True
    if contest.progress != watch.progress:
        watch.progress, watch.waited = contest.progress, Counter()
    watch.waited[id(waiter)] += 1
    return watch.waited[id(waiter)] > PATIENCE


class JointContest(Contest):
    """Times one variant on all ranks of a process group at once: as it was replayed before (PROGRAM), and as its rival
    is (DEPENDENCES). A collective that one rank replays in another way than the others may hang, so the turn depends
    only on the number of the call: a rank that has missed a call is in step again at the next.

    Args:
        place: returns the number of calls of the region between the one that began this contest and the current one
        agree: called after the last turn with the timed calls, as text, if the rival has won here, else with None;
            returns whether it has won on all ranks, in the same calls
    """

    TURNS = len(_PLAN)
    """Number of calls after which ranks decide."""

    def __init__(
        self,
        driver: Driver,
        args: Sequence[Any],
        place: Callable[[], int],
        agree: Callable[[str | None], bool],
        margin: float = MARGIN,
    ) -> None:
        super().__init__(driver, args, None, margin)
        self._place, self._agree = place, agree
        self._timed_calls: list[int] = []

    def enter(self) -> _Turn | None:
        place = self._place()
        if place >= self.TURNS:
            return None
        self.take_turn()
        return self._turn(_PLAN[place])

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

_SCHEMA = 11
"""Part of the key. Raised when a field or the procedure changes."""


def kept_path(fn: Function, args: Sequence[Any], cache_dir: str | None, passes: str) -> Path | None:
    """The file in ``cache_dir`` for decisions on calls of ``fn`` like this one, with launch passes of the key
    ``passes``; None if nothing is kept, or if ``fn`` is in no file, or depends on a closure.

    The key has the text of ``fn``'s module, with the source of every kernel. Implementations of custom operators are
    not covered: a decision that is wrong for that reason costs time, but makes no result wrong.
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
    """Decision of an earlier process; None if there is none, or, with a warning, if it cannot be read."""
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
    """Write ``decision`` as a whole: of several processes, the last one wins. Warns if it cannot be written."""
    try:
        store_json(path, dataclasses.asdict(decision))
    except (OSError, ValueError) as error:  # a ValueError where the path can be no file's
        _log.warning("a decision is not kept across processes: %s", error)
