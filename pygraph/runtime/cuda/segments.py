"""Cuts a large region into segments that are launched one after the other, with memory given back in between.

One graph holds its arguments, outputs and intermediates all at once, where the uncaptured program gives each back
after its last use. Pure functions over a Program; a region that holds little is one segment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

from pygraph.runtime.driver import Layout, Program
from pygraph.runtime.layout import Lifetime, lifetimes, pack
from pygraph.runtime.recording import AllocationKind, OutputKind

__all__ = ["Block", "Segments", "cut", "pieces"]

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""The launches (begin, end) of each segment, in order."""

WORTHWHILE = 32 << 20
"""Bytes that a cut has to save (32 MiB): below, more launches cost more than the memory is worth."""

EXCESS = 0.02
"""Part of the uncaptured program's peak by which segments may exceed it."""

FEWEST_LAUNCHES = 2
"""Launches that a segment has at least."""

MOST_SEGMENTS = 64

PIECE = 4 << 20
"""Bytes of workspace (4 MiB) from which on an intermediate is worth an allocation of its own."""

_GOALS = 64
"""Peaks between the uncaptured program's and that of one segment that may be aimed at."""


@dataclass(frozen=True, slots=True)
class Block:
    """An intermediate that outlives its segment: memory of its own from segment ``born`` to ``died``, both included."""

    index: int
    nbytes: int
    born: int
    died: int


@dataclass(frozen=True, slots=True)
class Segments:
    """``bounds`` are the launches of each segment, ``workspaces`` the layouts of what lives in one only, in one or more
    pieces that are allocated each by itself.

    ``fresh`` gives the segment that an output's memory is first used in, ``dead`` the arguments that are not needed
    any more after a segment. ``held`` and ``ideal`` are bytes at the peak: of this plan, and of the uncaptured program.
    """

    bounds: Bounds
    workspaces: tuple[tuple[Layout, ...], ...]
    blocks: tuple[Block, ...]
    fresh: Mapping[int, int]
    dead: Mapping[int, int]
    held: int
    ideal: int


def cut(program: Program) -> Segments:
    """Few segments whose peak comes close to the uncaptured program's; one, with ``layout``, where that saves
    too little. Where no cuts come that close, those that come closest. Workspaces are in pieces."""
    plan = _bounded(program)
    sizes = {a.index: a.nbytes for a in program.recording.allocations if a.kind is AllocationKind.POOL}
    workspaces = tuple(tuple(pieces(layout, sizes)) for (layout,) in plan.workspaces)
    return replace(plan, workspaces=workspaces)


def pieces(layout: Layout, sizes: Mapping[int, int]) -> Iterator[Layout]:
    """``layout`` cut where no intermediate lies across. ``sizes``: their bytes.

    Uncaptured, each intermediate takes what memory torch's allocator has left between tensors. One large workspace
    fits nowhere there, so that the allocator would hold it besides, though never more is in use at once; nor does a
    large intermediate with a few bytes more. So what reaches over PIECE bytes and more is a piece as it is, and what
    is smaller goes together, until it is as large.
    """
    edges = [0]
    for begin, end in pairwise(_borders(layout, sizes)):
        small = max(end - begin, begin - edges[-1]) < PIECE
        if begin and not small:
            edges.append(begin)
    members: list[dict[int, int]] = [{} for _ in edges]
    for index, offset in layout.offsets.items():
        place = bisect_right(edges, offset) - 1
        members[place][index] = offset - edges[place]
    for (begin, beyond), offsets in zip(pairwise((*edges, layout.nbytes)), members, strict=True):
        yield Layout(beyond - begin, offsets, layout.fresh if begin == 0 else ())


def _borders(layout: Layout, sizes: Mapping[int, int]) -> list[int]:
    """Where no intermediate of ``layout`` lies across, its begin and end included."""
    borders, end = [0], 0
    for offset, index in sorted((offset, index) for index, offset in layout.offsets.items() if sizes[index]):
        if offset >= end and offset > borders[-1]:
            borders.append(offset)
        end = max(end, offset + sizes[index])
    return [*borders, layout.nbytes]


def _bounded(program: Program) -> Segments:
    """As ``cut`` says, with workspaces in one piece."""
    facts = _Facts.of(program)
    single = facts.plan(facts.everything, program.layout)
    limit = single.ideal + max(WORTHWHILE, int(EXCESS * single.ideal))
    if single.held <= limit:
        return single
    cutter = _Cutter(facts)
    goals = range(single.ideal, single.held, (single.held - single.ideal) // _GOALS)
    least = bisect_left(goals, -MOST_SEGMENTS, hi=len(goals) - 1, key=lambda goal: -len(cutter.few(goal)))
    cuts = {cutter.few(goal) for goal in (goals[least], max(limit, goals[least]))}
    plans = [single, *(facts.plan(bounds) for bounds in cuts if len(bounds) <= MOST_SEGMENTS)]
    best = min(plans, key=lambda plan: (max(plan.held, limit), len(plan.bounds)))
    return best if single.held - best.held >= WORTHWHILE else single


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
    """Argument ▸ (bytes, last launch; the number of launches for one that is returned, or that others may keep)."""
    dying: Mapping[int, int]
    """Argument ▸ last launch, of those to let go of."""

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
        keepers = program.keepers
        needed = {o.argument for o in recording.outputs if o.kind in (OutputKind.ARGUMENT, OutputKind.VIEW)}
        needed |= keepers.held
        pool, given = AllocationKind.POOL, AllocationKind.INPUT
        lives = lifetimes(recording, slots, layout.fresh)
        arguments = [index for kind, index in sizes if kind is given]
        dying = {i: last.get((given, i), 0) for i in arguments if i not in needed}
        return cls(
            count,
            recording.alignment,
            _overlap(lives, layout),
            lives,
            {i: (sizes[pool, i], first.get((pool, i), 0)) for i in layout.fresh},
            {i: (sizes[given, i], count if i in keepers.lent else dying.get(i, count)) for i in arguments},
            dying,
        )

    @property
    def everything(self) -> Bounds:
        """The bounds of one segment."""
        return ((0, self.launches),)

    def plan(self, bounds: Bounds, layout: Layout | None = None) -> Segments:
        """Segments with these ``bounds``; ``layout`` is that of a single one."""
        where = _where(bounds, self.launches)
        local: list[list[Lifetime]] = [[] for _ in bounds]
        blocks: list[Block] = []
        for life in self.lives:
            born, died = where[life.first], where[life.last]
            if born == died:
                local[born].append(life)
            else:
                blocks.append(Block(life.index, life.nbytes, born, died))
        layouts = (layout,) if layout is not None else tuple(map(self._pack, local))
        fresh = {index: where[first] for index, (_, first) in self.fresh.items()}
        dead = {index: where[last] for index, last in self.dying.items()}
        held = self._held(where, layouts, blocks, fresh)
        workspaces = tuple((layout,) for layout in layouts)
        return Segments(bounds, workspaces, tuple(blocks), fresh, dead, held, self._ideal())

    def _pack(self, lives: Sequence[Lifetime]) -> Layout:
        offsets = pack(lives, reuse=self.reuse, alignment=self.alignment)
        end = max((offsets[life.index] + life.nbytes for life in lives), default=0)
        return Layout(-(-end // self.alignment) * self.alignment, offsets, ())

    def _held(
        self,
        where: Sequence[int],
        layouts: Sequence[Layout],
        blocks: Sequence[Block],
        fresh: Mapping[int, int],
    ) -> int:
        """Bytes at the peak over all segments. ``where`` gives that of each launch."""
        last = where[-1]
        changes = [0] * (last + 2)
        for block in blocks:
            _add(changes, block.born, block.died, block.nbytes)
        for index, (nbytes, _) in self.fresh.items():
            _add(changes, fresh[index], last, nbytes)
        for nbytes, needed in self.arguments.values():
            _add(changes, 0, where[needed], nbytes)
        return max((s + w.nbytes for s, w in zip(_sums(changes), layouts, strict=False)), default=0)

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


class _Cutter:
    """Finds bounds. Sizes are summed up beforehand, as each of many bounds that are looked at needs some."""

    def __init__(self, facts: _Facts) -> None:
        self._launches, self._reuse = facts.launches, facts.reuse
        self._lives = sorted(facts.lives, key=lambda life: life.first)
        count = facts.launches + 1
        self._given, self._older, self._made = [0] * count, [0] * count, [0] * count
        for nbytes, last in facts.arguments.values():
            _add(self._given, 0, min(last, facts.launches - 1), nbytes)
        for life in self._lives:
            _add(self._older, life.first + 1, life.last, life.nbytes)
        for nbytes, first in facts.fresh.values():
            self._made[first + 1] += nbytes
        for amounts in (self._given, self._older, self._made):
            amounts[:] = accumulate(amounts)

    def few(self, goal: int) -> Bounds:
        """Segments of which each goes on while it holds no more than ``goal`` bytes, or than its first launches."""
        edges = [0]
        while edges[-1] < self._launches:
            begin = edges[-1]
            shortest = min(begin + FEWEST_LAUNCHES, self._launches)
            bound = max(goal, self._needs(begin, shortest))
            if self._needs(begin, self._launches) <= bound:
                edges.append(self._launches)
                break
            longer = range(shortest + 1, self._launches)
            further = bisect_right(longer, bound, key=partial(self._needs, begin))
            edges.append(shortest + further)
        return tuple(pairwise(edges))

    def _needs(self, begin: int, end: int) -> int:
        """Bytes that are held while the launches from ``begin`` to ``end`` run as one segment among others: what was
        made before them or outlives them all along, intermediates of their own as these take turns."""
        low, high = (bisect_left(self._lives, launch, key=lambda life: life.first) for launch in (begin, end))
        own, beyond = [0] * (end - begin + 1), 0
        for life in self._lives[low:high]:
            if life.last >= end:
                beyond += life.nbytes
            else:
                _add(own, life.first - begin, life.last - begin if self._reuse else end - begin - 1, life.nbytes)
        return self._given[begin] + self._made[end] + self._older[begin] + beyond + max(_sums(own), default=0)


def _overlap(lives: Sequence[Lifetime], layout: Layout) -> bool:
    """Whether ``layout`` lets intermediates share bytes."""
    return layout.nbytes < sum(life.nbytes for life in lives)


def _where(bounds: Bounds, launches: int) -> list[int]:
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
