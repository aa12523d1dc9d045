"""Cuts a large region into segments that are launched one after the other, with memory given back in between.

One graph holds its arguments, outputs and intermediates all at once, where the uncaptured program gives each back
after its last use. Pure functions over a Program; a region that holds little is one segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pygraph.runtime.driver import Layout, Program
from pygraph.runtime.layout import Lifetime, lifetimes, pack
from pygraph.runtime.recording import AllocationKind, OutputKind

__all__ = ["Block", "Segments", "cut", "whole"]

WORTHWHILE = 64 << 20
"""Bytes that a cut has to save (64 MiB): below, more launches cost more than the memory is worth."""

EXCESS = 0.01
"""Part of the uncaptured program's peak by which segments may exceed it."""

FEWEST_LAUNCHES = 2
"""Launches that a segment has at least."""

MOST_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class Block:
    """An intermediate that outlives its segment: memory of its own from segment ``born`` to ``died``, both included."""

    index: int
    nbytes: int
    born: int
    died: int


@dataclass(frozen=True, slots=True)
class Segments:
    """``bounds`` are the launches (begin, end) of each segment, ``workspaces`` the layouts of what lives in one only.

    ``fresh`` gives the segment that an output's memory is first used in, ``dead`` the arguments that are not needed
    any more after a segment. ``held`` and ``ideal`` are bytes at the peak: of this plan, and of the uncaptured program.
    """

    bounds: tuple[tuple[int, int], ...]
    workspaces: tuple[Layout, ...]
    blocks: tuple[Block, ...]
    fresh: Mapping[int, int]
    dead: Mapping[int, int]
    held: int
    ideal: int


def cut(program: Program) -> Segments:
    """The fewest segments whose peak comes close to the uncaptured program's; one, with ``layout``, where that saves
    too little."""
    facts = _Facts.of(program)
    single = facts.plan(1, program.layout)
    if single.held - single.ideal < max(WORTHWHILE, EXCESS * single.ideal):
        return single
    best, count = single, 2
    while count <= min(MOST_SEGMENTS, facts.launches // FEWEST_LAUNCHES):
        plan = facts.plan(count)
        if plan.held < best.held:
            best = plan
        if plan.held <= (1 + EXCESS) * plan.ideal:
            break
        count *= 2
    return best if single.held - best.held >= WORTHWHILE else single


def whole(program: Program) -> Segments:
    """The region as one segment, with the program's own layout."""
    return _Facts.of(program).plan(1, program.layout)


@dataclass(frozen=True)
class _Facts:
    """Sizes in bytes and uses by launch of everything that a region holds."""

    launches: int
    alignment: int
    reuse: bool
    lives: tuple[Lifetime, ...]
    fresh: Mapping[int, tuple[int, int]]
    """Fresh allocation ▸ (bytes, first launch)."""
    arguments: Mapping[int, tuple[int, int]]
    """Argument ▸ (bytes, last launch; the number of launches for one that is held or returned)."""

    @classmethod
    def of(cls, program: Program) -> _Facts:
        recording, slots, layout = program.recording, program.slots, program.layout
        count = len(recording.launches)
        sizes = {a.key: a.nbytes for a in recording.allocations}
        first: dict[tuple[AllocationKind, int], int] = {}
        last: dict[tuple[AllocationKind, int], int] = {}
        for slot in slots:
            key = (slot.kind, slot.index)
            first[key] = min(first.get(key, slot.launch), slot.launch)
            last[key] = max(last.get(key, slot.launch), slot.launch)
        needed = {o.argument for o in recording.outputs if o.kind in (OutputKind.ARGUMENT, OutputKind.VIEW)}
        needed |= program.held
        pool, given = AllocationKind.POOL, AllocationKind.INPUT
        lives = lifetimes(recording, slots, layout.fresh)
        return cls(
            count,
            recording.alignment,
            _overlap(lives, layout),
            lives,
            {i: (sizes[pool, i], first.get((pool, i), 0)) for i in layout.fresh},
            {
                index: (nbytes, count if index in needed else last.get((kind, index), 0))
                for (kind, index), nbytes in sizes.items()
                if kind is given
            },
        )

    def plan(self, count: int, layout: Layout | None = None) -> Segments:
        """Segments of equally many launches; ``layout`` is that of a single one."""
        edges = [self.launches * i // count for i in range(count + 1)]
        bounds = tuple(pairwise(edges))
        where = _where(bounds, self.launches)
        local: list[list[Lifetime]] = [[] for _ in bounds]
        blocks: list[Block] = []
        for life in self.lives:
            born, died = where[life.first], where[life.last]
            if born == died:
                local[born].append(life)
            else:
                blocks.append(Block(life.index, life.nbytes, born, died))
        workspaces = (layout,) if layout is not None else tuple(map(self._pack, local))
        fresh = {index: where[first] for index, (_, first) in self.fresh.items()}
        dead = {index: where[last] for index, (_, last) in self.arguments.items() if last < self.launches}
        held = self._held(bounds, workspaces, blocks, fresh, dead)
        return Segments(bounds, workspaces, tuple(blocks), fresh, dead, held, self._ideal())

    def _pack(self, lives: Sequence[Lifetime]) -> Layout:
        offsets = pack(lives, reuse=self.reuse, alignment=self.alignment)
        end = max((offsets[life.index] + life.nbytes for life in lives), default=0)
        return Layout(-(-end // self.alignment) * self.alignment, offsets, ())

    def _held(
        self,
        bounds: Sequence[tuple[int, int]],
        workspaces: Sequence[Layout],
        blocks: Sequence[Block],
        fresh: Mapping[int, int],
        dead: Mapping[int, int],
    ) -> int:
        """Bytes at the peak over all segments."""
        last = len(bounds) - 1
        changes = [0] * (len(bounds) + 1)
        for block in blocks:
            _add(changes, block.born, block.died, block.nbytes)
        for index, (nbytes, _) in self.fresh.items():
            _add(changes, fresh[index], last, nbytes)
        for index, (nbytes, _) in self.arguments.items():
            _add(changes, 0, dead.get(index, last), nbytes)
        return max((s + w.nbytes for s, w in zip(_sums(changes), workspaces, strict=False)), default=0)

    def _ideal(self) -> int:
        """Bytes at the peak when everything is given back after its last use, and allocated before its first."""
        changes = [0] * (self.launches + 1)
        for life in self.lives:
            _add(changes, life.first, life.last, life.nbytes)
        for nbytes, first in self.fresh.values():
            _add(changes, first, self.launches - 1, nbytes)
        for nbytes, last in self.arguments.values():
            _add(changes, 0, min(last, self.launches - 1), nbytes)
        return max(_sums(changes), default=0)


def _overlap(lives: Sequence[Lifetime], layout: Layout) -> bool:
    """Whether ``layout`` lets intermediates share bytes."""
    return layout.nbytes < sum(life.nbytes for life in lives)


def _where(bounds: Sequence[tuple[int, int]], launches: int) -> list[int]:
    """The segment of each launch; a region without launches has one segment."""
    where = [0] * max(launches, 1)
    for number, (begin, end) in enumerate(bounds):
        where[begin:end] = [number] * (end - begin)
    return [*where, len(bounds) - 1]


def _add(changes: list[int], first: int, last: int, nbytes: int) -> None:
    """``nbytes`` more from ``first`` to ``last``, both included."""
    if changes[:-1]:
        changes[first] += nbytes
        changes[last + 1] -= nbytes


def _sums(changes: Sequence[int]) -> list[int]:
    """Running sums, without the last, which is behind the end."""
    total, found = 0, []
    for change in changes[:-1]:
        total += change
        found.append(total)
    return found
