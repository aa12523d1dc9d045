"""Events of regions other than replays: counted per region and for the process, logged, and passed to callbacks.

    captured         INFO      a capture was compared, and is replayed from now on
    refused          DEBUG     a capture, its comparison or a replay failed; WARNING once waits have their full length
    left-uncaptured  WARNING   no more captures are made: of the region, or of calls of some sizes
    evicted          INFO      a capture was freed: all would take more than ``memory_limit``, or memory is short
    retried          INFO      ``pygraph.retry()`` made the region eligible for captures again
    released         INFO      ``pygraph.release()`` freed the captures of the region

Until it is retried, a region warns once about itself and once about sizes. All regions together warn ten times a
minute; further warnings are logged at INFO. Nothing here runs on the path of a replay.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pygraph.runtime.provenance import Refusal
from pygraph.runtime.reasons import reason_of

_log = logging.getLogger("pygraph.runtime")

Kind = Literal["captured", "refused", "left-uncaptured", "evicted", "retried", "released"]

Sizes = tuple[tuple[int, ...], ...]

counts: defaultdict[str, int] = defaultdict(int)
"""Counts of this process so far: ``captures``, ``replays``, ``uncaptured`` calls, ``recalled`` decisions, and each
other kind of event, such as ``refused``, in total and by reason, such as ``refused.host-read``. Threads add to it
without a lock: CPython does not interrupt such an addition."""

_WARNINGS, _SECONDS = 10, 60.0
"""Maximum number of warnings of all regions in so many seconds."""

_SHOWN = 4
"""Maximum number of sizes in a line of the log."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a region, besides a replay.

    Args:
        kind: ``captured``, ``refused``, ``left-uncaptured``, ``evicted``, ``retried`` or ``released``.
        region: The region's name in reports, such as ``graph0_inference.region0``.
        reason: The reason code; empty for ``captured`` and ``released``.
        detail: The reason in words, with the operator and the line of the user's where they are known.
        sizes: Sizes of the tensors that calls of the capture pass, without parameters; empty for the whole region.
        duration_us: µs that the call took so far which captured, its own run included; 0 where none did.
        nbytes: Bytes of intermediates that each replay takes, for ``captured``; else 0.
    """

    kind: Kind
    region: str
    reason: str = ""
    detail: str = ""
    sizes: Sizes = ()
    duration_us: float = 0.0
    nbytes: int = 0


# -- callbacks ---------------------------------------------------------------------------------------------------------

_callbacks: dict[int, Callable[[Event], object]] = {}
_numbers = itertools.count()


def on_event(callback: Callable[[Event], object]) -> Callable[[], None]:
    """Call ``callback`` with each event from now on, on the thread that it happens on. Returns what ends that.

    Replays are no events: ``pygraph.region_counters()`` has their numbers. What the callback raises is logged, the
    first time, and no call ever sees it. Raises TypeError when it cannot be called.
    """
    if not callable(callback):
        raise TypeError(f"on_event takes a function of an event, not {callback!r}")
    number = next(_numbers)
    _callbacks[number] = callback

    def end() -> None:
        _callbacks.pop(number, None)
        _failed.discard(number)

    return end


_failed: set[int] = set()


def _tell(event: Event) -> None:
    for number, callback in list(_callbacks.items()):
        try:
            callback(event)
        except Exception:  # noqa: BLE001 - the user's code raises anything, and a call must be answered
            if number not in _failed:
                _failed.add(number)
                _log.exception("a callback of pygraph.on_event raised; it is called again, and no more is logged of it")


# -- the log -----------------------------------------------------------------------------------------------------------

_warned: deque[float] = deque(maxlen=_WARNINGS)


def _may_warn(now: float) -> bool:
    """True if a warning is within the limit of all regions; if so, it is counted."""
    if len(_warned) == _WARNINGS and now - _warned[0] < _SECONDS:
        return False
    _warned.append(now)
    return True


def forget() -> None:
    """Forget all counts and warnings."""
    counts.clear()
    _warned.clear()


class Journal:
    """Records the events of the region ``name``: in its own ``counter``, in those of the process, and in ``log``.
    ``clock`` returns seconds."""

    def __init__(self, name: str, counter: Counter[str], clock: Callable[[], float], log: logging.Logger) -> None:
        self._name, self._counter, self._clock, self._log = name, counter, clock, log
        self._warned: set[str] = set()

    def captured(self, sizes: Sizes, duration_us: float, nbytes: int) -> None:
        """Record that a capture is replayed from now on."""
        self._log.info("%s: captured%s in %.1f ms", self._name, _for(sizes), duration_us / 1e3)
        counts["captures"] += 1
        _tell(Event("captured", self._name, "", "", sizes, duration_us, nbytes))

    def refused(self, refusal: Refusal, sizes: Sizes, duration_us: float = 0.0, *, waits: str = "") -> None:
        """Record that a capture, a comparison or a replay failed. ``waits``: text of the longest wait, once reached."""
        level = self._level("waits", logging.DEBUG) if waits else logging.DEBUG
        again = f". It is tried again {waits}. {_advice(refusal)}" if waits else ""
        self._log.log(level, "%s: not captured%s: %s%s", self._name, _for(sizes), refusal, again)
        self._count(Event("refused", self._name, refusal.reason, str(refusal), sizes, duration_us))

    def left(self, refusal: Refusal, sizes: Sizes = (), duration_us: float = 0.0) -> None:
        """Record that the region, or its calls of ``sizes``, are not captured any more."""
        level = self._level("sizes" if sizes else "region", logging.INFO)
        text = "%s is left uncaptured%s: %s. %s"
        self._log.log(level, text, self._name, _for(sizes) or " for good", refusal, _advice(refusal))
        self._count(Event("left-uncaptured", self._name, refusal.reason, str(refusal), sizes, duration_us))

    def evicted(self, reason: str, sizes: Sizes) -> None:
        """Record that a capture was freed, to make room for others."""
        self._log.info("%s: evicted%s: %s", self._name, _for(sizes), reason)
        self._count(Event("evicted", self._name, reason, "", sizes))

    def retried(self, reason: str) -> None:
        """Record that captures which were refused for a reason are eligible again, at once."""
        self._warned.clear()
        self._log.info("%s: eligible for captures again, after %s", self._name, reason)
        self._count(Event("retried", self._name, reason))

    def released(self) -> None:
        """Record that all captures of the region were freed."""
        self._log.info("%s: released", self._name)
        self._count(Event("released", self._name))

    def _level(self, subject: str, otherwise: int) -> int:
        if subject in self._warned or not _may_warn(self._clock()):
            return otherwise
        self._warned.add(subject)
        return logging.WARNING

    def _count(self, event: Event) -> None:
        for key in (event.kind, f"{event.kind}.{event.reason}") if event.reason else (event.kind,):
            counts[key] += 1
            self._counter[key] += 1
        _tell(event)


def _for(sizes: Sizes) -> str:
    """`` for (8, 16), (16,)`` in a line of the log."""
    shown = ", ".join(map(str, sizes[:_SHOWN])) + (", …" if len(sizes) > _SHOWN else "")
    return f" for {shown}" if sizes else ""


def _advice(refusal: Refusal) -> str:
    known = reason_of(refusal.reason)
    return f"{known.explanation[0].upper()}{known.explanation[1:]}: {known.advice}."
