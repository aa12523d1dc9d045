"""The picture of a graph: rectangles, texts and curves in pixels, ready for the template that writes the SVG.

A layered drawing after Sugiyama: longest-path rows from top to bottom, an order within each row by the mean place of
the neighbours, then x coordinates by isotonic regression. Edges that pass rows bend to the side, faintly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from pygraph.ir import Graph, KernelNode, Value, dependences
from pygraph.ir.text.print import type_text
from pygraph.report.facts import clean, membership, plural
from pygraph.report.model import GraphReport, Uncaptured

__all__ = ["MAX_BOXES", "Box", "Picture", "draw"]

MAX_BOXES = 2500
"""Above this many operators each region is one box."""

_WEIGHTS = ("parameter", "buffer", "constant")
_WORDS = 26
_LOW, _TALL = 24.0, 38.0
_GAP, _ROW_GAP, _MARGIN, _PAD = 14.0, 26.0, 12.0, 18.0
_CHAR, _NOTE_CHAR = 6.7, 5.6
_SWEEPS, _SETTLE = 8, 24

Key = str | int | tuple[str, str]
"""What a box stands for: an operator by name, a whole region by index, an input."""


@dataclass(slots=True)
class Box:
    """One box: ``kind`` is region, outside, host or input; ``title`` is shown on hover, ``note`` is a second line.

    ``names`` are the operators that it stands for, ``region`` the region that colours it, ``free`` whether it is known
    to launch nothing (a view, say). ``x`` and ``y`` are its left upper corner.
    """

    kind: str
    label: str
    title: str
    note: str = ""
    region: int | None = None
    names: tuple[str, ...] = ()
    free: bool = False
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        """Room for both texts."""
        return round(max(len(self.label) * _CHAR, len(self.note) * _NOTE_CHAR, 10.0) + _PAD, 1)

    @property
    def height(self) -> float:
        """Room for one line or two."""
        return _TALL if self.note else _LOW

    @property
    def middle(self) -> float:
        """The x of its texts."""
        return round(self.x + self.width / 2, 1)


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture. ``flow``, ``order`` and ``far`` are path data: of data, of effects, of data past rows."""

    boxes: tuple[Box, ...] = ()
    flow: str = ""
    order: str = ""
    far: str = ""
    width: int = 0
    height: int = 0
    note: str = ""


def draw(report: GraphReport, limit: int = MAX_BOXES) -> Picture:
    """The picture of ``report``'s graph, of at most ``limit`` operators or regions; without any box, if it has none."""
    if report.graph is None or not len(report.graph):
        return Picture()
    quotient, boxes = _scene(report, report.graph, limit)
    order = _in_order(quotient)
    shown = {key: i for i, key in enumerate(order[:limit] if len(report.graph) > limit else order)}
    note = "Parameters, buffers and constants are not drawn."
    if len(report.graph) > limit:
        left = f" {len(order) - len(shown)} boxes are left out." if len(order) > len(shown) else ""
        note = f"The graph has {len(report.graph)} operators: each region is one box.{left}"
    edges = [(shown[a], shown[b], quotient.edges[a, b]["kind"]) for a, b in quotient.edges if a in shown and b in shown]
    forward = [edge for edge in edges if edge[0] < edge[1]]
    return _lay_out([boxes[key] for key in shown], forward, note)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def _scene(report: GraphReport, graph: Graph, limit: int) -> tuple[nx.DiGraph[Key], dict[Key, Box]]:
    """The boxes by what they stand for, and the edges between them, of a ``kind``: flow or order."""
    inside, outside = membership(report), {row.node: row for row in report.uncaptured()}
    whole = len(graph) > limit
    inputs = [] if whole else [value for value in graph.inputs if value.users and value.role not in _WEIGHTS]
    boxes: dict[Key, Box] = {("input", value.name): _input(value) for value in inputs}
    groups: dict[Key, list[KernelNode]] = defaultdict(list)
    for node in graph.nodes:
        groups[inside.get(node.name, node.name) if whole else node.name].append(node)
    for key, nodes in groups.items():
        if isinstance(key, int):
            size = plural(len(nodes), "operator")
            names = tuple(node.name for node in nodes)
            boxes[key] = Box("region", f"region {key}", f"region {key}: {size}", size, key, names)
        else:
            boxes[key] = _operator(nodes[0], inside.get(nodes[0].name), outside.get(nodes[0].name))
    quotient: nx.DiGraph[Key] = nx.DiGraph()
    quotient.add_nodes_from(boxes)
    quotient.add_edges_from((("input", v.name), node.name, {"kind": "flow"}) for v in inputs for node in v.users)
    key_of = {node: key for key, nodes in groups.items() for node in nodes}
    for a, b in dependences(graph):
        before, after = key_of[a], key_of[b]
        if before != after:
            data = any(value.producer is a for value in b.inputs)
            known = quotient.edges[before, after]["kind"] if quotient.has_edge(before, after) else None
            quotient.add_edge(before, after, kind="flow" if data else known or "order")
    return quotient, boxes


def _input(value: Value) -> Box:
    return Box("input", _short(value.name), f"%{value.name} : {type_text(value.type)}\n{value.role}")


def _operator(node: KernelNode, region: int | None, outside: Uncaptured | None) -> Box:
    kind = "region" if region is not None else "outside" if outside else "host"
    label = node.op.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
    title = "\n".join(_title(node, region, outside))
    note = _short(outside.reason) if outside else ""
    return Box(kind, _short(label), title, note, region, (node.name,), node.cost.launches == 0)


def _title(node: KernelNode, region: int | None, outside: Uncaptured | None) -> Iterator[str]:
    yield node.op
    types = ", ".join(type_text(out.type) for out in node.outputs)
    yield f"%{node.name}" + (f" : {types}" if types else "")
    if region is not None:
        yield f"region {region}"
    if outside is not None:
        yield "not captured: " + ": ".join(filter(None, (outside.reason, outside.detail)))
    if node.loc is not None:
        yield f"{node.loc}  {clean(node.loc.code)}".rstrip()


def _short(text: str) -> str:
    return text if len(text) <= _WORDS else f"{text[: _WORDS - 1]}…"


def _in_order(quotient: nx.DiGraph[Key]) -> list[Key]:
    """A topological order; program order when regions that depend on each other leave none."""
    place = {key: i for i, key in enumerate(quotient.nodes)}
    if nx.is_directed_acyclic_graph(quotient):
        return list(nx.lexicographical_topological_sort(quotient, key=place.__getitem__))
    return list(place)


# -- where it goes -----------------------------------------------------------------------------------------------------


def _lay_out(boxes: list[Box], edges: Sequence[tuple[int, int, str]], note: str) -> Picture:
    rows = _rows(len(boxes), [(a, b) for a, b, _ in edges])
    x = _arrange([box.width for box in boxes], rows, [(a, b) for a, b, _ in edges])
    left = min(middle - box.width / 2 for middle, box in zip(x, boxes, strict=True)) - _MARGIN
    top = _MARGIN
    row_of = [0] * len(boxes)
    for number, members in enumerate(rows):
        height = max(boxes[i].height for i in members)
        for i in members:
            row_of[i] = number
            boxes[i].x = round(x[i] - left - boxes[i].width / 2, 1)
            boxes[i].y = round(top + (height - boxes[i].height) / 2, 1)
        top += height + _ROW_GAP
    paths: dict[str, list[str]] = defaultdict(list)
    for a, b, kind in edges:
        passed = row_of[b] - row_of[a] - 1
        paths["far" if passed and kind == "flow" else kind].append(_curve(boxes[a], boxes[b], passed))
    width = max(box.x + box.width for box in boxes) + _MARGIN
    flow, order, far = (" ".join(paths[kind]) for kind in ("flow", "order", "far"))
    return Picture(tuple(boxes), flow, order, far, round(width), round(top - _ROW_GAP + _MARGIN), note)


def _rows(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Longest-path rows from top to bottom, then each box as near to its users as that shortens edges."""
    before, after = _neighbours(edges)
    row = [0] * count
    for box in range(count):
        row[box] = max((row[a] + 1 for a in before[box]), default=0)
    for box in reversed(range(count)):
        if after[box] and len(after[box]) >= len(before[box]):
            row[box] = min(row[b] for b in after[box]) - 1
    rows: list[list[int]] = [[] for _ in range(max(row) + 1)]
    for box, number in enumerate(row):
        rows[number].append(box)
    return [members for members in rows if members]


def _neighbours(edges: Sequence[tuple[int, int]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    return before, after


def _arrange(widths: Sequence[float], rows: list[list[int]], edges: Sequence[tuple[int, int]]) -> list[float]:
    """The middle x of each box: sorts ``rows`` so that few edges cross, then moves boxes towards their neighbours."""
    before, after = _neighbours(edges)
    x = [0.0] * len(widths)
    for sweep in range(_SWEEPS):
        near = after if sweep % 2 else before
        for members in reversed(rows) if sweep % 2 else rows:
            wish = {box: _mean([x[other] for other in near[box]], x[box]) for box in members}
            members.sort(key=wish.__getitem__)
            for i, box in enumerate(members):
                x[box] = i - (len(members) - 1) / 2
    for sweep in range(_SETTLE):
        near, other = (after, before) if sweep % 2 else (before, after)
        for members in reversed(rows) if sweep % 2 else rows:
            pulls = [[x[to] for to in (*near[box], *near[box], *other[box])] for box in members]
            wishes = [_mean(pull, x[box] if sweep else 0.0) for pull, box in zip(pulls, members, strict=True)]
            _spread(members, wishes, widths, x)
    return x


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _spread(members: Sequence[int], wishes: Sequence[float], widths: Sequence[float], x: list[float]) -> None:
    """Set the x of one row as near to ``wishes`` as order and widths allow (pool adjacent violators)."""
    offsets = [0.0]
    for one, other in pairwise(members):
        offsets.append(offsets[-1] + (widths[one] + widths[other]) / 2 + _GAP)
    pools: list[tuple[float, int]] = []
    for wish, offset in zip(wishes, offsets, strict=True):
        total, count = wish - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            last, size = pools.pop()
            total, count = total + last, count + size
        pools.append((total, count))
    free = [total / count for total, count in pools for _ in range(count)]
    for box, value, offset in zip(members, free, offsets, strict=True):
        x[box] = value + offset


def _curve(source: Box, target: Box, passed: int) -> str:
    """Path data from the foot of one box to the head of another; bent to the side where it passes rows."""
    x, y, to_x, to_y = source.middle, source.y + source.height, target.middle, target.y
    if not passed:
        middle = (y + to_y) / 2
        return f"M{x:g} {y:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"
    side = min(60 + 12 * passed, 240)
    return f"M{x:g} {y:g}C{x + side:g} {y:g} {to_x + side:g} {to_y:g} {to_x:g} {to_y:g}"
