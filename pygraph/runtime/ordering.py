"""Which launches must stay in order: true, anti and output dependences over bytes in the final address space.

The final address space is the one of replay, so that buffers reused by the layout show as anti-dependences. The
schedule itself is made elsewhere; here are only its constraints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

from pygraph.runtime.driver import Layout, Slot
from pygraph.runtime.recording import Access, AllocationKind, Launch, Recording

__all__ = ["dependences"]

_Range = tuple[Hashable, int, int, bool, bool]
"""Space, first byte, end, reads, writes."""


def dependences(
    recording: Recording, slots: Sequence[Slot], layout: Layout, *, inputs_may_overlap: bool = True
) -> list[tuple[int, int]]:
    """Edges (earlier, later) between launches, sorted, whose transitive closure orders all that must be ordered.

    A launch whose accesses are unknown is ordered with every other. With ``inputs_may_overlap`` a write to one
    argument is ordered with every access to any argument, as a caller may pass overlapping tensors; without, they
    are taken to be disjoint. Launches that draw random numbers are ordered among themselves.
    """
    places = {(slot.launch, slot.word): slot for slot in slots}
    history = _History()
    for launch in recording.launches:
        if launch.accesses is None:
            history.barrier(launch.index)
            continue
        history.enter(launch.index)
        if launch.random:
            history.touch(launch.index, ("random", 0, 1, True, True))
        for access in launch.accesses:
            slot = places.get((launch.index, access.word))
            history.touch(launch.index, _final(launch, access, slot, layout, inputs_may_overlap))
    return sorted(history.edges)


def _final(launch: Launch, access: Access, slot: Slot | None, layout: Layout, merge: bool) -> _Range:
    """The bytes that ``access`` touches at replay, in the space that they belong to."""
    if slot is None:
        start = launch.words[access.word] + access.start
        return ("absolute", start, start + access.nbytes, access.reads, access.writes)
    if slot.kind is AllocationKind.INPUT and merge:
        return ("inputs", 0, min(access.nbytes, 1), access.reads, access.writes)
    start = slot.offset + access.start
    space: Hashable = (slot.kind, slot.index)
    if slot.kind is AllocationKind.POOL and slot.index in layout.offsets:
        start += layout.offsets[slot.index]
        space = "workspace"
    return (space, start, start + access.nbytes, access.reads, access.writes)


class _History:
    """Who touched what last, and the edges that follow from it."""

    def __init__(self) -> None:
        self.edges: set[tuple[int, int]] = set()
        self._spaces: dict[Hashable, _Space] = {}
        self._barrier: int | None = None
        self._since: list[int] = []

    def barrier(self, launch: int) -> None:
        """A launch that may touch everything."""
        self.enter(launch)
        self.edges.update((earlier, launch) for earlier in self._since if earlier != launch)
        self._spaces.clear()
        self._since.clear()
        self._barrier = launch

    def enter(self, launch: int) -> None:
        """The next launch in recorded order."""
        if self._barrier is not None:
            self.edges.add((self._barrier, launch))
        self._since.append(launch)

    def touch(self, launch: int, touched: _Range) -> None:
        """``launch`` reads or writes a range."""
        space, start, end, reads, writes = touched
        if start >= end or not (reads or writes):
            return
        earlier = self._spaces.setdefault(space, _Space()).touch(launch, start, end, writes)
        self.edges.update((other, launch) for other in earlier if other != launch)


class _Space:
    """One address space, split at every boundary seen; each piece knows its last writer and the readers since."""

    def __init__(self) -> None:
        self._starts: list[int] = [0]
        self._writers: list[tuple[int, ...]] = [()]
        self._readers: list[tuple[int, ...]] = [()]

    def touch(self, launch: int, start: int, end: int, writes: bool) -> set[int]:
        """Enter an access and return the launches that it has to come after."""
        low, high = self._split(start), self._split(end)
        earlier: set[int] = set()
        for piece in range(low, high):
            earlier.update(self._writers[piece])
            if writes:
                earlier.update(self._readers[piece])
                self._writers[piece], self._readers[piece] = (launch,), ()
            elif launch not in self._readers[piece]:
                self._readers[piece] += (launch,)
        return earlier

    def _split(self, at: int) -> int:
        """The index of the piece that begins at ``at``, made if there is none."""
        if at < self._starts[0]:
            self._insert(0, at, (), ())
            return 0
        position = bisect_right(self._starts, at) - 1
        if self._starts[position] == at:
            return position
        self._insert(position + 1, at, self._writers[position], self._readers[position])
        return position + 1

    def _insert(self, position: int, at: int, writers: tuple[int, ...], readers: tuple[int, ...]) -> None:
        self._starts.insert(position, at)
        self._writers.insert(position, writers)
        self._readers.insert(position, readers)
