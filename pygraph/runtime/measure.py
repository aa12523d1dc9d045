"""Measured selection: is a captured variant faster replayed or uncaptured, and if replayed, in which order of its
launches? Its own calls tell, once each.

A new variant's calls run in blocks of one candidate each. The first call of a block is dropped; the device is drained
after it and after the last one, and the time per call is the wall time between the two drains. A round is one block of
each candidate. Of ROUNDS rounds, the other candidate has to win all but one by its margin; anything less is a tie, and
replays as before. The decision is kept on disk for later processes. Nothing here makes a call, and no call runs twice.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Lock, get_ident
from types import FunctionType
from typing import Any

import torch
import torch.distributed

from pygraph.cache import read_json, usable, warn_once, write_atomically
from pygraph.runtime.contract import Driver
from pygraph.runtime.identity import machine
from pygraph.runtime.tensors import bits
from pygraph.version import __version__

__all__ = [
    "CONCURRENT",
    "REPLAY",
    "UNCAPTURED",
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
CALLS = 8
"""Timed calls of a block: an even number, since many callers do one thing on even calls and another on odd ones."""
MARGIN = {UNCAPTURED: 0.05, CONCURRENT: 0.02}
"""A candidate wins a round if its time is below the replay's by more than this fraction."""

_LOST = {2: 1.5, 3: 1.0}
"""The first so many rounds, if the other candidate loses each by this factor, end the measurement: more would only
cost."""
_MOST = 3 * 2 * ROUNDS
"""Blocks that are begun, disturbed ones included."""
_PATIENCE = 200
"""Calls that a measurement waits for one block of another one, which may have no calls any more."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided on one variant: ``choice`` of REPLAY and ``other``. Times are medians of the blocks, in µs per
    call of the caller's whole loop (None: no block). ``calls`` were in blocks. ``disturbed``: too few blocks counted,
    so that it is replayed untested. ``path``: the file that an earlier process's decision was read from."""

    choice: str
    replay_us: float | None
    other_us: float | None
    calls: int
    disturbed: bool = False
    path: str | None = None
    other: str = UNCAPTURED


# -- measuring ---------------------------------------------------------------------------------------------------------


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
    """Times one variant, as the calls of a region come in: from several threads at once, without a lock, in blocks that
    do not count. ``args`` is the call that was captured. ``path`` is the file that the decision goes to, if it is kept.
    ``other`` is what the replay is held against."""

    def __init__(
        self,
        driver: Driver,
        args: Sequence[Any],
        clock: Callable[[], float],
        path: Path | None,
        other: str = UNCAPTURED,
    ) -> None:
        self._driver, self._clock, self._path = driver, clock, path
        self._device = _device(args)
        self._other = other
        self._times: dict[str, list[float]] = {REPLAY: [], other: []}
        self._block: _Block | None = None
        self._foreign: _Block | None = None
        self._begun = self._calls = self._waited = 0
        self._over = self._tried = False
        self._once = Lock()

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
            return self._decide(REPLAY, disturbed=True) if self._over else None
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
        self._times[block.candidate].append((now - block.start) / CALLS)
        return self._judge()

    def invalidate(self) -> None:
        """A call did not run as it should, or another one came in between: what is under way of this does not count."""
        if _under_way is self._block:
            invalidate_all()

    def finish(self, decision: Decision) -> None:
        """Keep ``decision`` for other processes, and give back what uncaptured calls have left if there are no more."""
        if self._path is not None and not decision.disturbed:
            _write(self._path, decision)
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
            if self._waited < _PATIENCE:
                return None
        self._begun += 1
        rounds = min(len(times) for times in self._times.values())
        first, second = (REPLAY, self._other) if rounds % 2 == 0 else (self._other, REPLAY)
        candidate = first if len(self._times[first]) == rounds else second
        self._tried |= candidate == UNCAPTURED
        _under_way = _Block(candidate)
        return _under_way

    def _judge(self) -> Decision | None:
        """What the rounds say, once they say something."""
        replays, others = self._times.values()
        if len(replays) != len(others):
            return None
        pairs = list(zip(replays, others, strict=True))
        if all(other >= _LOST.get(len(pairs), math.inf) * replay for replay, other in pairs):
            return self._decide(REPLAY)
        if len(pairs) < ROUNDS:
            return None
        won = sum(other < (1 - MARGIN[self._other]) * replay for replay, other in pairs)
        return self._decide(self._other if won >= ROUNDS - 1 else REPLAY)

    def _decide(self, choice: str, *, disturbed: bool = False) -> Decision | None:
        """The decision, for whoever comes first."""
        self._over = True
        if not self._once.acquire(blocking=False):
            return None
        replayed, others = (median(times) * 1e6 if times else None for times in self._times.values())
        return Decision(choice, replayed, others, self._calls, disturbed, other=self._other)


def _device(args: Sequence[Any]) -> torch.device | None:
    devices = (arg.device for arg in args if isinstance(arg, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), None)


def several_ranks() -> bool:
    """Whether this process is one of several, which would not all decide alike."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


# -- decisions on disk -------------------------------------------------------------------------------------------------

_SCHEMA = 6
"""Part of the key. Raised when a field or the procedure changes."""


def kept_path(fn: Function, args: Sequence[Any], cache_dir: str | None, other: str = UNCAPTURED) -> Path | None:
    """The file in ``cache_dir`` for decisions against ``other`` on calls of ``fn`` like this; None if nothing is kept,
    or if ``fn`` is in no file, or depends on a closure.

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
    key = _SCHEMA, *versions, machine(_device(args)), source, fn.__qualname__, call, other
    try:
        folder = usable(cache_dir) / "decisions"
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
    found = read_json(path)
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
        write_atomically(path, json.dumps(dataclasses.asdict(decision), indent=1) + "\n")
    except (OSError, ValueError) as error:  # a ValueError where the path can be no file's
        _log.warning("a decision is not kept across processes: %s", error)
