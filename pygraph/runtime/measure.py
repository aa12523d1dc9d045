"""Measured selection: is a captured variant faster replayed or uncaptured, and if replayed, in which order of its
launches? Its own calls tell, once each.

Replayed or uncaptured (``Measurement``) is a matter of the host, too. A new variant's calls run in blocks of one
candidate each. The first call of a block is dropped; the device is drained after it and after the last one, and the
time per call is the wall time between the two drains. A round is one block of each candidate.

The order of launches (``Contest``) is a matter of the device. Single calls take turns, and events around each tell how
long it took: nothing waits, and calls of other regions, or other sizes, may come in between. Turns are shuffled: a call
that finds the device idle takes longer, and callers who wait do so every so many calls.

Of ROUNDS rounds, the other candidate has to win all but one by its margin; anything less is a tie, and replays as
before. What is certain before the last round ends it. The decision is kept on disk for later processes. Nothing here
makes a call, and no call runs twice.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import platform
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from threading import Lock, get_ident
from types import FunctionType
from typing import Any

import torch
import torch.distributed

from pygraph.cache import load_json, store_json, usable, warn_once
from pygraph.runtime.contract import Driver, Timer
from pygraph.runtime.identity import machine
from pygraph.runtime.tensors import bits
from pygraph.version import __version__

__all__ = [
    "CONCURRENT",
    "PATIENCE",
    "REPLAY",
    "UNCAPTURED",
    "Contest",
    "Decision",
    "Measurement",
    "invalidate_all",
    "kept_path",
    "read",
    "several_ranks",
]

_log = logging.getLogger("pygraph.selection")

Function = Callable[[list[Any]], Sequence[Any]]

REPLAY, UNCAPTURED, CONCURRENT = "replay", "uncaptured", "concurrent"
"""Candidates. CONCURRENT is a replay whose launches wait for those alone that they depend on."""

ROUNDS = 5
_LOSSES = 1
"""Rounds that a candidate may lose and still be chosen. What is certain before the last round ends the measurement."""
CALLS = 8
"""Timed calls of a block: an even number, since many callers do one thing on even calls and another on odd ones."""
TURNS = 8
"""Calls of each order in a round of a contest, of which the median counts."""
MARGIN = {UNCAPTURED: 0.05, CONCURRENT: 0.02}
"""A candidate wins a round if its time is below the replay's by more than this fraction."""

_MOST = 3 * 2 * ROUNDS
"""Blocks that are begun, disturbed ones included."""
PATIENCE = 200
"""Calls that a measurement waits for one block of another one, which may have no calls any more; that a contest begins
to time in a row though they are another variant's; and that a variant waits for others' contests to go on."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided on one variant: ``choice`` of REPLAY and ``other``. Times are medians of the rounds (None: there
    was none), in µs per call: of the caller's whole loop, or, of an order, on the device. ``calls`` were timed.
    ``disturbed``: too few rounds counted, so that it is replayed untested. ``path``: the file that an earlier process's
    decision was read from."""

    choice: str
    replay_us: float | None
    other_us: float | None
    calls: int
    disturbed: bool = False
    path: str | None = None
    other: str = UNCAPTURED


# -- rounds ------------------------------------------------------------------------------------------------------------


class _Rounds:
    """What rounds say of two candidates: REPLAY, and ``other``. ``path`` is the file that the decision goes to, if it
    is kept."""

    def __init__(self, path: Path | None, other: str) -> None:
        self.other, self.path = other, path
        self.times: dict[str, list[float]] = {REPLAY: [], other: []}
        self._once = Lock()

    @property
    def whole(self) -> int:
        """Rounds that both candidates are through with."""
        return min(len(times) for times in self.times.values())

    def judge(self, calls: int) -> Decision | None:
        """What they say, once they say something; ``calls`` were timed."""
        won = [other < (1 - MARGIN[self.other]) * replay for replay, other in zip(*self.times.values(), strict=False)]
        if won.count(False) > _LOSSES:
            return self.decide(REPLAY, calls)
        return self.decide(self.other, calls) if won.count(True) == ROUNDS - _LOSSES else None

    def decide(self, choice: str, calls: int, *, disturbed: bool = False) -> Decision | None:
        """The decision, for whoever comes first."""
        if not self._once.acquire(blocking=False):
            return None
        replayed, others = (median(times) * 1e6 if times else None for times in self.times.values())
        return Decision(choice, replayed, others, calls, disturbed, other=self.other)

    def keep(self, decision: Decision) -> None:
        """Keep ``decision`` for other processes."""
        if self.path is not None and not decision.disturbed:
            _write(self.path, decision)


# -- replayed or uncaptured --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Block:
    """A row of calls of one ``candidate``, all on one thread."""

    candidate: str
    calls: int = 0
    start: float = 0.0
    thread: int = field(default_factory=get_ident)

    @property
    def counts(self) -> bool:
        """Whether nothing else happened since it began, asked by the thread that calls."""
        return _under_way is self and self.thread == get_ident()


_under_way: _Block | None = None
"""The one block that is timed now: it takes the time of the whole program. Other measurements replay and wait."""


def invalidate_all() -> None:
    """Something took time that no call takes again, such as a capture: what is under way does not count."""
    global _under_way
    _under_way = None


class Measurement:
    """Times one variant replayed and uncaptured, as the calls of a region come in: from several threads at once,
    without a lock, in blocks that do not count. ``args`` is the call that was captured."""

    def __init__(self, driver: Driver, args: Sequence[Any], clock: Callable[[], float], path: Path | None) -> None:
        self._driver, self._clock = driver, clock
        self._device = _device(args)
        self._rounds = _Rounds(path, UNCAPTURED)
        self._block: _Block | None = None
        self._foreign: _Block | None = None
        self._begun = self._calls = self._waited = 0
        self._over = self._tried = False

    def enter(self) -> _Block | None:
        """The block that the call which comes now belongs to; None: it is to be replayed, and is not timed. Only
        ``leave`` counts a call, so that it may be asked twice for one."""
        if self._block is None or not self._block.counts:
            self._block = self._begin()
        return self._block

    def leave(self, block: _Block | None) -> Decision | None:
        """A call of ``block`` ran as it says. Returns the decision, at the end of the call that brings it about. Raises
        what waiting for the device raises."""
        if block is None:
            return self._rounds.decide(REPLAY, self._calls, disturbed=True) if self._over else None
        if not block.counts:
            return None
        block.calls += 1
        self._calls += 1
        if 1 < block.calls <= CALLS:
            return None
        drained = self._driver.synchronise(self._device)
        now = self._clock()
        if block.calls == 1 and drained:
            block.start = now
            return None
        valid = drained and block.counts
        self.invalidate()
        if not valid:
            return None
        times = self._rounds.times
        times[block.candidate].append((now - block.start) / CALLS)
        decision = self._rounds.judge(self._calls) if len(times[REPLAY]) == len(times[UNCAPTURED]) else None
        self._over = self._over or decision is not None
        return decision

    def invalidate(self) -> None:
        """A call did not run as it should, or another one came in between: what is under way of this does not count."""
        if _under_way is self._block:
            invalidate_all()

    def finish(self, decision: Decision) -> None:
        """Keep ``decision``, and give back what uncaptured calls have left if there are no more."""
        self._rounds.keep(decision)
        if decision.choice == REPLAY and self._tried:
            self._driver.release_cached(self._device)
        invalidate_all()

    def _begin(self) -> _Block | None:
        """A new block, unless one of another measurement is under way that goes on."""
        global _under_way
        self._over = self._over or self._begun == _MOST or several_ranks()
        if self._over:
            return None
        if _under_way is not None and _under_way is not self._block:
            self._waited = self._waited + 1 if _under_way is self._foreign else 0
            self._foreign = _under_way
            if self._waited < PATIENCE:
                return None
        self._begun += 1
        rounds, times = self._rounds.whole, self._rounds.times
        first, second = (REPLAY, UNCAPTURED) if rounds % 2 == 0 else (UNCAPTURED, REPLAY)
        candidate = first if len(times[first]) == rounds else second
        self._tried |= candidate == UNCAPTURED
        _under_way = _Block(candidate)
        return _under_way


# -- the order of launches ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """A call in one order, and what times it."""

    candidate: str
    timer: Timer


def _plan() -> Iterator[str]:
    """Whose turn it is, round by round."""
    drawn = random.Random(0)
    for _ in range(ROUNDS):
        turns = [REPLAY, CONCURRENT] * TURNS
        drawn.shuffle(turns)
        yield from turns


_PLAN = tuple(_plan())


class Contest:
    """Times one variant in two orders of its launches, as its calls come in: from several threads at once, of which one
    at a time is timed. ``args`` is the call that was captured. Ranks that have to replay in one order ``agree``: each
    call is the same candidate's turn on all of them, and behind the last turn each says whether it has found the other
    order faster, and is told whether all have."""

    def __init__(
        self,
        driver: Driver,
        args: Sequence[Any],
        path: Path | None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._driver, self._device, self._agree = driver, _device(args), agree
        self._rounds = _Rounds(path, CONCURRENT)
        self._under_way: deque[_Turn] = deque()
        self._calls: dict[str, list[float]] = {REPLAY: [], CONCURRENT: []}
        self._vain = 0
        self._leaving = Lock()

    def enter(self) -> _Turn | None:
        """Begin to time the call that comes now, in the order whose turn it is; None: it is to be replayed as before,
        and is not timed. Only ``leave`` counts a call, which may turn out to be another variant's."""
        candidate = None if self._vain >= PATIENCE else self._next()
        timer = None if candidate is None else self._driver.timer(self._device)
        if candidate is None or timer is None:
            return None
        self._vain += 1
        return _Turn(candidate, timer)

    def leave(self, turn: _Turn | None) -> Decision | None:
        """A call of ``turn`` was submitted. Returns the decision, at the end of the call that finds it."""
        self._vain = 0
        if turn is not None:
            turn.timer.stop()
        if self._agree is not None:
            return None if turn is None else self._leave_in_step(turn, self._agree)
        if not self._leaving.acquire(blocking=False):
            return None
        try:
            if turn is not None:
                self._under_way.append(turn)
            while self._under_way:
                seconds = self._under_way[0].timer.seconds()
                if seconds is None:
                    return None
                decision = self._took(self._under_way.popleft().candidate, seconds)
                if decision is not None:
                    return decision
            return None
        finally:
            self._leaving.release()

    def _leave_in_step(self, turn: _Turn, agree: Callable[[bool], bool]) -> Decision | None:
        self._under_way.append(turn)
        if len(self._under_way) < len(_PLAN):
            return None
        self._driver.synchronise(self._device)
        found: Decision | None = None
        while self._under_way and (seconds := self._under_way[0].timer.seconds()) is not None:
            found = self._took(self._under_way.popleft().candidate, seconds) or found
        faster = found is not None and found.choice == CONCURRENT
        decision = found or self._rounds.decide(REPLAY, self._timed)
        return decision and replace(decision, choice=CONCURRENT if agree(faster) else REPLAY)

    def finish(self, decision: Decision) -> None:
        """Keep ``decision``. That took time which no call takes again."""
        self._rounds.keep(decision)
        invalidate_all()

    @property
    def _timed(self) -> int:
        return sum(map(len, self._calls.values()))

    def _next(self) -> str | None:
        """Whose turn it is; None while what is under way may decide. Threads may have taken one turn together."""
        place = self._timed + len(self._under_way)
        if place < len(_PLAN):
            return _PLAN[place]
        short = [candidate for candidate, calls in self._calls.items() if len(calls) < ROUNDS * TURNS]
        return None if self._under_way or not short else short[0]

    def _took(self, candidate: str, seconds: float) -> Decision | None:
        """A call of ``candidate`` took so long. Returns the decision, if it ends a round that says something."""
        calls, times = self._calls[candidate], self._rounds.times[candidate]
        calls.append(seconds)
        if len(calls) % TURNS:
            return None
        times.append(median(calls[-TURNS:]))
        return self._rounds.judge(self._timed) if len(times) == self._rounds.whole else None


def _device(args: Sequence[Any]) -> torch.device | None:
    devices = (arg.device for arg in args if isinstance(arg, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), None)


def several_ranks() -> bool:
    """Whether this process is one of several, which would not all decide alike."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


# -- decisions on disk -------------------------------------------------------------------------------------------------

_SCHEMA = 8
"""Part of the key. Raised when a field or the procedure changes."""


def kept_path(
    fn: Function, args: Sequence[Any], cache_dir: str | None, other: str = UNCAPTURED, memory: float = 0.0
) -> Path | None:
    """The file in ``cache_dir`` for decisions against ``other``, which may take more ``memory`` by that part, on calls
    of ``fn`` like this; None if nothing is kept, or if ``fn`` is in no file, or depends on a closure.

    The key has the text of ``fn``'s module, with the source of every kernel. The insides of custom operators are not
    covered: a decision that is wrong for that reason costs time and makes no result wrong.
    """
    if cache_dir is None or not isinstance(fn, FunctionType) or fn.__closure__:
        return None
    source = _source_digest(fn.__code__.co_filename)
    if source is None:
        return None
    call = [
        (*arg.size(), arg.stride(), arg.dtype, arg.device.type) if isinstance(arg, torch.Tensor) else bits(arg)
        for arg in args
    ]
    versions = __version__, torch.__version__, platform.python_version()
    key = _SCHEMA, *versions, machine(_device(args)), source, fn.__qualname__, call, other, memory
    try:
        folder = usable(cache_dir, "decisions")
    except OSError:  # there is no temporary folder either
        return None
    return folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:40]}.json"


@functools.lru_cache(maxsize=256)
def _source_digest(path: str) -> str | None:
    """Of a Python file without comment lines, which hold paths and numbers that count what was compiled before."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    code = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()


def read(path: Path) -> Decision | None:
    """What an earlier process decided; None if nothing was, or, with a warning, if that cannot be read."""
    found = load_json(path)
    if found is None:
        return None
    try:
        times, other = (float(found["replay_us"]), float(found["other_us"])), found["other"]
        if (
            other not in MARGIN
            or found["choice"] not in (REPLAY, other)
            or not all(0 <= time < math.inf for time in times)
        ):
            raise ValueError("it is no decision")
        return Decision(found["choice"], *times, int(found["calls"]), path=str(path), other=other)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        warn_once(path, f"{type(error).__name__}: {error}")
        return None


def _write(path: Path, decision: Decision) -> None:
    """Keep ``decision``, whole: of several processes the last one wins. A warning where it cannot be written."""
    try:
        store_json(path, dataclasses.asdict(decision))
    except (OSError, ValueError) as error:  # a ValueError where the path can be no file's
        _log.warning("a decision is not kept across processes: %s", error)
