"""Process-wide counts of what the runtime did, and the record that each region keeps of itself.

Plain numbers for reports and tests; nothing here decides anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

from pygraph.runtime.refusal import Refusal

__all__ = ["RegionRecord", "add", "count_replay", "count_uncaptured", "counters", "reset"]

_lock = Lock()
_totals: Counter[str] = Counter()


@dataclass(slots=True)
class RegionRecord:
    """What a report reads of one region.

    ``state`` is ``cold`` (never ran), ``warm`` (ran uncaptured), ``replay`` (has captures) or ``uncaptured`` (left
    off, for ``reason``). ``keys`` counts distinct keys seen (at least: forgotten keys count again); ``slots``,
    ``launches`` and ``workspace_bytes`` are those of the last capture. ``refusals`` holds the first of each reason.
    """

    name: str
    state: str = "cold"
    reason: str | None = None
    keys: int = 0
    captures: int = 0
    replays: int = 0
    uncaptured: int = 0
    slots: int = 0
    launches: int = 0
    workspace_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    uncaptured_us: float | None = None
    replay_us: float | None = None


def add(name: str, amount: int = 1) -> None:
    """Add to a process-wide count. Names in use: captures, replays, uncaptured, patched, refused, ``refused.CODE``."""
    with _lock:
        _totals[name] += amount


def count_replay(record: RegionRecord) -> None:
    """A call of ``record``'s region was answered by a replay."""
    with _lock:
        record.replays += 1
        _totals["replays"] += 1


def count_uncaptured(record: RegionRecord) -> None:
    """A call of ``record``'s region was answered by its uncaptured function."""
    with _lock:
        record.uncaptured += 1
        _totals["uncaptured"] += 1


def counters() -> dict[str, int]:
    """A copy of all counts, by name; a name that was never counted is absent."""
    with _lock:
        return dict(sorted(_totals.items()))


def reset() -> None:
    """Set all process-wide counts back to nothing. Records of regions keep theirs."""
    with _lock:
        _totals.clear()
