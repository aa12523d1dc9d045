"""The picture of a graph: rectangles, texts and curves in pixels, ready for the template that writes the SVG.

A layered drawing after Sugiyama: longest-path rows from top to bottom, whose boxes move towards the mean place of their
neighbours in a few sweeps. Edges that pass rows bend to the side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pygraph.ir import KernelNode, dependences
from pygraph.ir.text.print import type_text, value_text
from pygraph.report.facts import clean, membership
from pygraph.report.model import GraphReport, Uncaptured

_WEIGHTS = ("parameter", "buffer", "constant")
_WORDS = 26
_GAP, _ROW_GAP, _MARGIN = 14.0, 26.0, 12.0
_SWEEPS = 24


@dataclass(slots=True)
class Box:
    """One box: ``kind`` is region, outside, host or input; ``title`` is shown on hover, ``note`` is a second line.

    ``node`` is the operator that it stands for, ``region`` the region that colours it, ``free`` whether it is known to
    launch nothing (a view, say). ``x`` and ``y`` are its left upper corner.
    """

    kind: str
    label: str
    title: str
    note: str = ""
    region: int | None = None
    node: str | None = None
    free: bool = False
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        """Room for both texts."""
        return round(max(len(self.label) * 6.7, len(self.note) * 5.6, 10.0) + 18.0, 1)

    @property
    def height(self) -> float:
        """Room for one line or two."""
        return 38.0 if self.note else 24.0

    @property
    def middle(self) -> float:
        """The x of its texts."""
        return round(self.x + self.width / 2, 1)


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture. ``flow`` and ``order`` are path data: of data, of effects."""

    boxes: tuple[Box, ...] = ()
    flow: str = ""
    order: str = ""
    width: int = 0
    height: int = 0


def draw(report: GraphReport) -> Picture:
    """The picture of ``report``'s graph; without any box, if it has none."""
    graph = report.graph
    if graph is None or not len(graph):
        return Picture()
    inside, outside = membership(report), {row.node: row for row in report.uncaptured()}
    inputs = [value for value in graph.inputs if value.users and value.role not in _WEIGHTS]
    boxes = [
        Box("input", _short(value.name), f"{value_text(value)} : {type_text(value.type)}\n{value.role}")
        for value in inputs
    ]
    boxes += [_operator(node, inside.get(node.name), outside.get(node.name)) for node in graph.nodes]
    place = {node: i for i, node in enumerate(graph.nodes, len(inputs))}
    edges = [(i, place[node], "flow") for i, value in enumerate(inputs) for node in value.users]
    for a, b in dependences(graph):
        data = any(value.producer is a for value in b.inputs)
        edges.append((place[a], place[b], "flow" if data else "order"))
    return _lay_out(boxes, edges)


def _operator(node: KernelNode, region: int | None, outside: Uncaptured | None) -> Box:
    kind = "region" if region is not None else "outside" if outside else "host"
    label = node.op.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
    types = ", ".join(type_text(out.type) for out in node.outputs)
    title = [node.op, f"%{node.name}" + (f" : {types}" if types else "")]
    if region is not None:
        title.append(f"region {region}")
    if outside is not None:
        title.append("not captured: " + ": ".join(filter(None, (outside.reason, outside.detail))))
    if node.module:
        title.append(f"in {node.module}")
    if node.loc is not None:
        title.append(f"{node.loc}  {clean(node.loc.code)}".rstrip())
        title += node.loc.frames[:-1]
    note = _short(outside.reason) if outside else ""
    return Box(kind, _short(label), "\n".join(title), note, region, node.name, node.cost.launches == 0)


def _short(text: str) -> str:
    return text if len(text) <= _WORDS else f"{text[: _WORDS - 1]}…"


def _lay_out(boxes: list[Box], edges: Sequence[tuple[int, int, str]]) -> Picture:
    before: list[list[int]] = [[] for _ in boxes]
    after: list[list[int]] = [[] for _ in boxes]
    for a, b, _ in edges:
        before[b].append(a)
        after[a].append(b)
    row_of = _rows(before, after)
    rows: list[list[int]] = [[] for _ in range(max(row_of) + 1)]
    for i, row in enumerate(row_of):
        rows[row].append(i)
    x = _arrange([box.width for box in boxes], rows, before, after)
    left = min(middle - box.width / 2 for middle, box in zip(x, boxes, strict=True)) - _MARGIN
    top = _MARGIN
    for members in rows:
        height = max(boxes[i].height for i in members)
        for i in members:
            boxes[i].x = round(x[i] - left - boxes[i].width / 2, 1)
            boxes[i].y = round(top + (height - boxes[i].height) / 2, 1)
        top += height + _ROW_GAP
    flow, order = (
        " ".join(_curve(boxes[a], boxes[b], row_of[b] - row_of[a] - 1) for a, b, kind in edges if kind == drawn)
        for drawn in ("flow", "order")
    )
    width = max(box.x + box.width for box in boxes) + _MARGIN
    return Picture(tuple(boxes), flow, order, round(width), round(top - _ROW_GAP + _MARGIN))


def _rows(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """The row of each box: that of its longest path, then as near to its users as that shortens edges."""
    row = [0] * len(before)
    for box, sources in enumerate(before):
        row[box] = max((row[a] + 1 for a in sources), default=0)
    for box in reversed(range(len(row))):
        if after[box] and len(after[box]) >= len(before[box]):
            row[box] = min(row[b] for b in after[box]) - 1
    number = {row: i for i, row in enumerate(sorted(set(row)))}  # rows that are empty now go
    return [number[each] for each in row]


def _arrange(
    widths: list[float], rows: list[list[int]], before: list[list[int]], after: list[list[int]]
) -> list[float]:
    """The middle x of each box: sweeps down and up move a row's boxes towards their neighbours, above all those in the
    rows that were moved just before."""
    x = [0.0] * len(widths)
    for sweep in range(_SWEEPS):
        near, other = (after, before) if sweep % 2 else (before, after)
        for members in reversed(rows) if sweep % 2 else rows:
            pulls = {box: [x[to] for to in (*near[box], *near[box], *other[box])] or [x[box]] for box in members}
            wishes = {box: sum(pull) / len(pull) for box, pull in pulls.items()}
            members.sort(key=wishes.__getitem__)
            edge = -math.inf
            for box in members:
                x[box] = max(wishes[box], edge + widths[box] / 2)
                edge = x[box] + widths[box] / 2 + _GAP
            shift = sum(wishes[box] - x[box] for box in members) / len(members)
            for box in members:
                x[box] += shift
    return x


def _curve(source: Box, target: Box, passed: int) -> str:
    """Path data from the foot of one box to the head of another; bent to the side where it passes rows."""
    x, y, to_x, to_y = source.middle, source.y + source.height, target.middle, target.y
    if not passed:
        middle = (y + to_y) / 2
        return f"M{x:g} {y:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"
    side = min(60 + 12 * passed, 240)
    return f"M{x:g} {y:g}C{x + side:g} {y:g} {to_x + side:g} {to_y:g} {to_x:g} {to_y:g}"
