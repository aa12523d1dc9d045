"""Dependences in a sequence of nodes or of launches: the one rule of both stages of the IR.

    0 writes a    1 writes b    2 reads a, b    3 writes a         2 waits for 0 and 1, 3 for 2

One that uses memory waits for earlier ones that write it, and one that writes memory for those that use it. Members of
a chain (draws of one generator, calls of one process group) keep their order. What may use anything waits for all
before it, and all behind it for it.
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
        """True if all of ``other`` surely lies inside."""


class _Whole:
    def meets(self, other: object, /) -> bool:  # noqa: ARG002
        return True

    covers = meets


WHOLE = _Whole()
"""All of a memory."""


@dataclass(slots=True)
class _Used:
    """Those that use a memory, of which a later one may still have to wait for."""

    reads: list[tuple[int, Part]] = field(default_factory=list)
    writes: list[tuple[int, Part]] = field(default_factory=list)


class Waits(Generic[_Memory]):
    """Who used what, up to some place in the sequence."""

    def __init__(self) -> None:
        self._used: defaultdict[_Memory, _Used] = defaultdict(_Used)
        self._open: set[int] = set()
        """Those that no later one waits for, since the last one that all wait for."""
        self._last: int | None = None
        self._chains: dict[Hashable, int] = {}

    def add(
        self, index: int, accesses: Sequence[tuple[_Memory, Part, bool]] | None, chains: Iterable[Hashable] = ()
    ) -> set[int]:
        """The earlier ones that ``index``, the next, waits for. ``accesses`` are the memory that it uses, the part of
        it, and whether that is written; None: it may use anything. It is a member of ``chains``. The rest follows:
        what those that are returned wait for."""
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
