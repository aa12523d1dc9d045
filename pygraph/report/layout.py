"""Where the boxes of a picture go: layers from top to bottom, few crossings, short edges. Plain numbers in and out.

A layered layout after Sugiyama: longest-path layers, barycentre order, then coordinates by isotonic regression.
What the boxes mean is ``scene``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["GAP", "Layout", "Point", "arrange"]

Point = tuple[float, float]

GAP = 14.0
"""Pixels between neighbours of a layer."""

_BEND = 4.0
_LONGEST = 12
_SWEEPS = 8
_SETTLE = 24


@dataclass(frozen=True, slots=True)
class Layout:
    """``x`` is the centre of each box, ``layer`` its row; ``bends`` the x at each row that an edge passes.

    An edge over many rows has no bends: it is led past the others. ``width`` is that of the whole picture.
    """

    x: tuple[float, ...]
    layer: tuple[int, ...]
    bends: tuple[tuple[float, ...], ...]
    width: float

    @property
    def rows(self) -> int:
        """The number of layers."""
        return max(self.layer, default=-1) + 1


def arrange(widths: Sequence[float], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes of the given ``widths`` (pixels). Each edge leads from a lower index to a higher one."""
    layer = _layers(len(widths), edges)
    grid = _Grid(list(widths), layer)
    routes = [grid.route(a, b) for a, b in edges]
    grid.order()
    x = grid.place()
    left = min((x[i] - w / 2 for i, w in enumerate(grid.widths)), default=0.0)
    right = max((x[i] + w / 2 for i, w in enumerate(grid.widths)), default=0.0)
    shifted = [value - left for value in x]
    bends = tuple(tuple(shifted[i] for i in route) for route in routes)
    return Layout(tuple(shifted[: len(widths)]), tuple(layer), bends, right - left)


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Longest-path layers, then each box as near to its users as that shortens edges."""
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    layer = [0] * count
    for box in range(count):
        layer[box] = max((layer[a] + 1 for a in before[box]), default=0)
    for box in reversed(range(count)):
        if after[box] and len(after[box]) >= len(before[box]):
            layer[box] = min(layer[b] for b in after[box]) - 1
    return layer


class _Grid:
    """Boxes and bends by row. A bend is a narrow box that an edge passes on its way over a row."""

    def __init__(self, widths: list[float], layer: Sequence[int]) -> None:
        self.widths = widths
        self.rows: list[list[int]] = [[] for _ in range(max(layer, default=-1) + 1)]
        self.row_of = list(layer)
        self.above: list[list[int]] = [[] for _ in widths]
        self.below: list[list[int]] = [[] for _ in widths]
        for box, row in enumerate(layer):
            self.rows[row].append(box)

    def route(self, a: int, b: int) -> list[int]:
        """Link ``a`` to ``b``, over a bend in each row between unless there are too many; the bends."""
        between = range(self.row_of[a] + 1, self.row_of[b])
        if len(between) > _LONGEST:
            return []
        bends = [self._bend(row) for row in between]
        for upper, lower in zip([a, *bends], [*bends, b], strict=True):
            self.below[upper].append(lower)
            self.above[lower].append(upper)
        return bends

    def _bend(self, row: int) -> int:
        self.widths.append(_BEND)
        self.row_of.append(row)
        self.above.append([])
        self.below.append([])
        self.rows[row].append(len(self.widths) - 1)
        return len(self.widths) - 1

    def order(self) -> None:
        """Sort each row by the mean place of its neighbours in the row before, down and up in turn."""
        place = [0.0] * len(self.widths)
        for row in self.rows:
            self._number(row, place)
        for sweep in range(_SWEEPS):
            down = sweep % 2 == 0
            neighbours = self.above if down else self.below
            for row in self.rows if down else reversed(self.rows):
                key = {box: _mean([place[n] for n in neighbours[box]], place[box]) for box in row}
                row.sort(key=key.__getitem__)
                self._number(row, place)

    def _number(self, row: list[int], place: list[float]) -> None:
        for i, box in enumerate(row):
            place[box] = i - (len(row) - 1) / 2

    def place(self) -> list[float]:
        """x of each box and bend: near its neighbours, in order, and never overlapping."""
        x = [0.0] * len(self.widths)
        for row in self.rows:
            self._spread(row, [0.0] * len(row), x)
        for sweep in range(_SETTLE):
            down = sweep % 2 == 0
            for row in self.rows if down else reversed(self.rows):
                self._spread(row, [self._wish(box, x, down) for box in row], x)
        return x

    def _wish(self, box: int, x: list[float], down: bool) -> float:
        nearer = self.above[box] if down else self.below[box]
        others = self.below[box] if down else self.above[box]
        return _mean([x[n] for n in (*nearer, *nearer, *others)], x[box])

    def _spread(self, row: list[int], wishes: list[float], x: list[float]) -> None:
        """The places nearest to ``wishes`` (least squares) at which no two boxes of ``row`` overlap."""
        if not row:
            return
        offsets = [0.0]
        for one, other in pairwise(row):
            offsets.append(offsets[-1] + (self.widths[one] + self.widths[other]) / 2 + GAP)
        free = _isotonic([wish - offset for wish, offset in zip(wishes, offsets, strict=True)])
        for box, value, offset in zip(row, free, offsets, strict=True):
            x[box] = value + offset


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            last, size = pools.pop()
            total, count = total + last, count + size
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
