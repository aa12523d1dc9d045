"""Dependences in a sequence of nodes or of launches, by one rule for both.

    0 writes a    1 writes b    2 reads a, b    3 writes a         2 waits for 0 and 1, 3 for 2

A member that uses memory waits for earlier members that write it, and one that writes memory for earlier ones that use
it. Members of a chain (draws of one generator, calls of one process group) keep their order. A member that may use
anything waits for all earlier ones, and all later ones wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

_Memory = TypeVar("_Memory", bound=Hashable)


class Part(Protocol):
    """Part of a memory."""

    def meets(self, other: Any, /) -> bool:
        """True if the two parts may overlap."""

    def covers(self, other: Any, /) -> bool:
        """True if all of ``other`` certainly lies inside."""


class _Whole:
    def meets(self, other: object, /) -> bool:  # noqa: ARG002
        return True

    covers = meets


WHOLE = _Whole()
"""All of a memory."""


@dataclass(slots=True)
class _Used:
    """Uses of a memory for which a later member may still have to wait."""

    reads: list[tuple[int, Part]] = field(default_factory=list)
    writes: list[tuple[int, Part]] = field(default_factory=list)


class Waits(Generic[_Memory]):
    """Uses of memory up to some place in the sequence."""

    def __init__(self) -> None:
        self._used: defaultdict[_Memory, _Used] = defaultdict(_Used)
        self._open: set[int] = set()
        """Members since ``_last`` for which no later member waits."""
        self._last: int | None = None
        self._chains: dict[Hashable, int] = {}

    def add(
        self, index: int, accesses: Sequence[tuple[_Memory, Part, bool]] | None, chains: Iterable[Hashable] = ()
    ) -> set[int]:
        """Add the next member, ``index``, which belongs to ``chains``. Returns earlier members for which it waits; it
        waits for others through these. ``accesses``: each memory that it uses, the part, and True if it writes the
        part; None: it may use anything."""
        waits = set() if self._last is None else {self._last}
        for chain in chains:
            waits |= {self._chains[chain]} if chain in self._chains else set()
            self._chains[chain] = index
        if accesses is None:
            waits |= self._open
            self._used.clear()
            self._open.clear()
            self._last = index
            return waits
        for memory, part, writes in accesses:
            if memory in self._used:
                used = self._used[memory]
                met = used.writes + used.reads if writes else used.writes
                waits.update(number for number, where in met if where.meets(part))
        for memory, part, writes in accesses:
            used = self._used[memory]
            if writes:
                used.reads = [each for each in used.reads if not part.covers(each[1])]
                used.writes = [each for each in used.writes if not part.covers(each[1])]
                used.writes.append((index, part))
            else:
                used.reads.append((index, part))
        self._open -= waits
        self._open.add(index)
        return waits
