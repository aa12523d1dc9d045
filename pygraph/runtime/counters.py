"""Process-wide counts of what the runtime did, and the record that each region keeps of itself.

Plain numbers for reports and tests; nothing here decides anything.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

from pygraph.runtime.provenance import Refusal
from pygraph.runtime.variants import State

if TYPE_CHECKING:
    from pygraph.runtime.measure import Decision

__all__ = ["REPLAYS", "UNCAPTURED", "RegionRecord", "Tally", "add", "counters", "reset"]


class Tally:
    """A count that threads add to without a lock: ``hit()`` adds one, in C, and costs some 30 ns."""

    __slots__ = ("_base", "_count", "hit")

    def __init__(self, start: int = 0) -> None:
        self._count = itertools.count()
        self._base = -start
        self.hit = self._count.__next__

    @property
    def value(self) -> int:
        """How often it was hit, plus where it started."""
        return self._hits() - self._base

    def reset(self) -> None:
        """Start again at 0."""
        self._base = self._hits()

    def _hits(self) -> int:
        return int(repr(self._count)[len("count(") : -1])  # the only look at it that does not count


class Tallied:
    """A field of a dataclass that reads as an int and is kept in a Tally."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> int: ...
    @overload
    def __get__(self, instance: object, owner: type) -> int: ...
    def __get__(self, instance: object | None, owner: type) -> int:
        return 0 if instance is None else self.of(instance).value

    def __set__(self, instance: object, value: int) -> None:
        instance.__dict__[self._name] = Tally(value)

    def of(self, instance: object) -> Tally:
        """The Tally behind this field of ``instance``."""
        tally: Tally = instance.__dict__[self._name]
        return tally


@dataclass
class RegionRecord:
    """What a report reads of one region.

    ``state`` is ``cold`` (never ran), ``warm`` (ran uncaptured), ``replay`` (has captures) or ``uncaptured`` (left
    off, for ``reason``). ``keys`` counts distinct keys seen (at least: forgotten keys count again); ``slots``,
    ``launches`` and ``workspace_bytes`` are those of the last capture. ``python_runs`` says how often the bodies of
    operators that are written in Python ran for captures and comparisons, besides once for each uncaptured call, by
    operator. ``refusals`` holds the first of each reason. ``decisions`` are those of measured selection, one for each
    variant; where it left all of them uncaptured, the state is ``uncaptured`` without a reason.
    """

    name: str
    state: State = State.COLD
    reason: str | None = None
    keys: int = 0
    captures: int = 0
    replays: Tallied = Tallied()
    uncaptured: Tallied = Tallied()
    slots: int = 0
    launches: int = 0
    workspace_bytes: int = 0
    python_runs: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def tally(self, name: str) -> Tally:
        """The count behind ``replays`` or ``uncaptured``."""
        field: Tallied = type(self).__dict__[name]
        return field.of(self)


REPLAYS = Tally()
"""Calls answered by a replay, of all regions."""

UNCAPTURED = Tally()
"""Calls answered by an uncaptured function, of all regions."""

_totals: dict[str, Tally] = {}
"""Without a lock: whatever allocates may collect garbage, and a finaliser may call what counts."""


def add(name: str) -> None:
    """Add one to a process-wide count. Names in use: captures, recalled (decisions that were found on disk), refused
    and ``refused.CODE``."""
    (_totals.get(name) or _totals.setdefault(name, Tally())).hit()


def counters() -> dict[str, int]:
    """A copy of all counts, by name, ``replays`` and ``uncaptured`` among them; what never happened is absent."""
    found = {**_totals, "replays": REPLAYS, "uncaptured": UNCAPTURED}
    return {name: found[name].value for name in sorted(found) if found[name].value}


def reset() -> None:
    """Set all process-wide counts back to nothing. Records of regions keep theirs."""
    for tally in (*_totals.values(), REPLAYS, UNCAPTURED):
        tally.reset()
