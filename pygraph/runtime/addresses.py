"""Which allocation of a capture a raw word points into, with the launch's place in time taken into account.

Pure look-ups over one Recording's allocations. What two captures say together is decided in ``slots``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from pygraph.runtime.recording import Allocation, AllocationKind

__all__ = ["AddressMap", "Place", "moving"]


@dataclass(frozen=True, slots=True)
class Place:
    """A word read as an address: ``offset`` bytes into the allocation ``key``.

    ``rank`` says how sure that is: 0 inside, 1 one past the end, 2 the start of an empty allocation. The last two
    are never dereferenced, so that they matter only when nothing of a lower rank explains the word.
    """

    key: tuple[AllocationKind, int]
    offset: int
    rank: int


def moving(allocations: Iterable[Allocation]) -> tuple[Allocation, ...]:
    """The allocations whose addresses a replay replaces: everything but constants; null pointers are nobody's."""
    return tuple(a for a in allocations if a.kind is not AllocationKind.CONSTANT and a.address)


class AddressMap:
    """The moving allocations of one capture by address. ``overlap`` names two that share bytes (None: disjoint)."""

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        every = moving(allocations)
        self._solid = sorted((a for a in every if a.nbytes), key=lambda a: a.address)
        self._starts = [a.address for a in self._solid]
        self._ends = {a.address + a.nbytes: a for a in self._solid}
        self._empty: dict[int, Allocation] = {}
        for allocation in every:
            if not allocation.nbytes:
                self._empty.setdefault(allocation.address, allocation)

    @property
    def overlap(self) -> tuple[Allocation, Allocation] | None:
        """The first two allocations that share a byte, if any do."""
        for low, high in zip(self._solid, self._solid[1:], strict=False):
            if high.address < low.address + low.nbytes:
                return low, high
        return None

    def inside(self, word: int) -> Allocation | None:
        """The allocation that ``word`` points into, born or not."""
        position = bisect_right(self._starts, word) - 1
        if position < 0:
            return None
        found = self._solid[position]
        return found if word < found.address + found.nbytes else None

    def empty(self, word: int) -> Allocation | None:
        """The allocation without bytes that begins at ``word``."""
        return self._empty.get(word)

    def places(self, word: int, launch: int) -> tuple[Place, ...]:
        """All readings of ``word`` as an address into what was live at ``launch``, the surest first."""
        readings = (self.inside(word), self._ends.get(word), self._empty.get(word))
        return tuple(
            Place(found.key, word - found.address, rank)
            for rank, found in enumerate(readings)
            if found is not None and found.born <= launch
        )
