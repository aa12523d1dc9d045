"""A partial order of launches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """A partial order of launches. ``edges[i]`` are the launches for which launch i waits, without those for which
    another of them waits; bit j of ``before[i]`` is set if launch j has completed before i starts. ``lanes[i]`` is the
    lane of launch i, if there are lanes."""

    edges: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]
    lanes: tuple[int, ...] = ()

    @classmethod
    def of(cls, waits: Sequence[set[int]], lanes: Sequence[int] = ()) -> Order:
        """The order in which launch i waits for the earlier launches ``waits[i]``."""
        edges: list[tuple[int, ...]] = []
        before: list[int] = []
        for waited in waits:
            reached, kept = 0, list[int]()
            for launch in sorted(waited, reverse=True):  # a path to an earlier one leads by way of a later one
                if not reached >> launch & 1:
                    kept.append(launch)
                    reached |= before[launch] | 1 << launch
            edges.append(tuple(reversed(kept)))
            before.append(reached)
        return cls(tuple(edges), tuple(before), tuple(lanes))

    def without(self, dropped: Collection[int]) -> Order:
        """The order without the launches ``dropped``: others wait instead for those for which a dropped one waited."""
        waits: list[set[int]] = []
        for waited in self.edges:
            waits.append({each for one in waited for each in (waits[one] if one in dropped else (one,))})
        return Order.of(waits, self.lanes)

    def longest_path(self) -> int:
        """Number of launches on the longest path."""
        return max(self.depths(0, len(self.edges)).values(), default=0)

    def critical(self) -> frozenset[int]:
        """The launches on a longest path."""
        depths = self.depths(0, len(self.edges))
        longest = max(depths.values(), default=0)
        found = {launch for launch, depth in depths.items() if depth == longest}
        for launch in reversed(range(len(self.edges))):
            if launch in found:
                found.update(waited for waited in self.edges[launch] if depths[waited] == depths[launch] - 1)
        return frozenset(found)

    def sequence(self, begin: int, end: int) -> list[int]:
        """The launches from ``begin`` to ``end`` (excluded), each after those for which it waits: sorted by the length
        of the longest path to them, so that launches that may run in parallel are adjacent."""
        depths = self.depths(begin, end)
        return sorted(depths, key=lambda launch: depths[launch])

    def depths(self, begin: int, end: int) -> dict[int, int]:
        """For each launch from ``begin`` to ``end`` (excluded), the number of them on the longest path to it."""
        found = levels([[waited - begin for waited in each if waited >= begin] for each in self.edges[begin:end]])
        return dict(zip(range(begin, end), (level + 1 for level in found), strict=True))


def levels(before: Iterable[Iterable[int]]) -> list[int]:
    """The length of the longest path to each item; ``before`` has, for each, earlier items that precede it."""
    found: list[int] = []
    for sources in before:
        found.append(max((found[source] + 1 for source in sources), default=0))
    return found
