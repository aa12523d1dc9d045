"""The picture of a graph: rectangles, texts and curves in pixels, ready for the template that writes the SVG; and as
DOT.

A layered drawing after Sugiyama: longest-path rows from top to bottom, whose boxes move towards the mean position of
their neighbours in a few sweeps. An edge that crosses rows runs in a lane between their boxes, or beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pygraph.colours import colour
from pygraph.ir import KernelNode, dependences
from pygraph.ir.text.print import type_text
from pygraph.program.order import levels
from pygraph.report.facts import clean, coloured_as, membership
from pygraph.report.model import GraphReport, Uncaptured

_WEIGHTS = ("parameter", "buffer", "constant")
_WORDS = 26
_GAP, _ROW_GAP, _LANE, _MARGIN = 14.0, 26.0, 7.0, 12.0
_ALL_LANES = 600.0
"""Maximum width of all lanes, in pixels: more lanes are closer to each other."""
_SWEEPS = 24


@dataclass(slots=True)
class Box:
    """One box: ``kind`` is region, outside, host or input; ``title`` is shown on hover, ``note`` is a second line.

    ``node`` is its operator, ``region`` the region that colours it, ``free`` is true if it is known to launch nothing
    (for example, a view). ``x`` and ``y`` are its upper left corner.
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
        """Width, with room for both texts."""
        return round(max(len(self.label) * 6.7, len(self.note) * 5.6, 10.0) + 18.0, 1)

    @property
    def height(self) -> float:
        """Height, with room for one or two lines."""
        return 38.0 if self.note else 24.0

    @property
    def middle(self) -> float:
        """The x of the centre of its texts."""
        return round(self.x + self.width / 2, 1)


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge between boxes, by index: ``kind`` is flow (data) or order (effects), ``path`` its SVG path data."""

    source: int
    target: int
    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture."""

    boxes: tuple[Box, ...] = ()
    edges: tuple[Edge, ...] = ()
    width: int = 0
    height: int = 0

    def path(self, kind: str) -> str:
        """The path data of all edges of a kind."""
        return " ".join(edge.path for edge in self.edges if edge.kind == kind)


def draw(report: GraphReport) -> Picture:
    """The picture of the graph of ``report``; without boxes if there is no graph."""
    graph = report.graph
    if graph is None or not len(graph):
        return Picture()
    inside, outside = membership(report), {row.node: row for row in report.uncaptured()}
    colours = coloured_as(report)
    inputs = [value for value in graph.inputs if value.users and value.role not in _WEIGHTS]
    boxes = [Box("input", value.name, f"{value!r} : {type_text(value.type)}\n{value.role}") for value in inputs]
    boxes += [_operator(node, inside.get(node.name), outside.get(node.name)) for node in graph.nodes]
    for box in boxes:
        box.region = None if box.region is None else colours.get(box.region, box.region)
        box.label, box.note = _short(clean(box.label)), _short(clean(box.note))
        box.title = "\n".join(map(clean, box.title.split("\n")))
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
    note = outside.reason if outside else ""
    return Box(kind, label, "\n".join(title), note, region, node.name, node.cost.launches == 0)


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
    lanes = _lanes(x, [box.width for box in boxes], rows, row_of, edges)
    left = min(*(middle - box.width / 2 for middle, box in zip(x, boxes, strict=True)), *lanes.values(), math.inf)
    spans: list[tuple[float, float]] = []
    top = _MARGIN
    for members in rows:
        height = max(boxes[i].height for i in members)
        for i in members:
            boxes[i].x = round(x[i] - left + _MARGIN - boxes[i].width / 2, 1)
            boxes[i].y = round(top + (height - boxes[i].height) / 2, 1)
        spans.append((top, top + height))
        top += height + _ROW_GAP
    drawn = [
        Edge(
            a,
            b,
            kind,
            _path(boxes[a], boxes[b], spans[row_of[a] : row_of[b] + 1], lanes.get((a, b), 0) - left + _MARGIN),
        )
        for a, b, kind in edges
    ]
    width = max(*(box.x + box.width for box in boxes), *(lane - left + _MARGIN for lane in lanes.values()), 0) + _MARGIN
    return Picture(tuple(boxes), tuple(drawn), round(width), round(top - _ROW_GAP + _MARGIN))


def _rows(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """The row of each box: that of its longest path, or nearer to its users if that shortens edges."""
    row = levels(before)
    for box in reversed(range(len(row))):
        if after[box] and len(after[box]) >= len(before[box]):
            row[box] = min(row[b] for b in after[box]) - 1
    number = {row: i for i, row in enumerate(sorted(set(row)))}  # drop rows that are empty now
    return [number[each] for each in row]


def _arrange(
    widths: list[float], rows: list[list[int]], before: list[list[int]], after: list[list[int]]
) -> list[float]:
    """The middle x of each box: sweeps down and up move the boxes of a row towards their neighbours. Neighbours in rows
    that the sweep has already moved have twice the weight."""
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


def _lanes(
    x: Sequence[float],
    widths: Sequence[float],
    rows: Sequence[Sequence[int]],
    row_of: Sequence[int],
    edges: Iterable[tuple[int, int, str]],
) -> dict[tuple[int, int], float]:
    """The x of the lane of each edge that crosses rows: the nearest to the mean of its ends without a box, or an edge
    from another box. Short edges choose first."""
    spans = [[(x[i] - widths[i] / 2 - _LANE, x[i] + widths[i] / 2 + _LANE) for i in members] for members in rows]
    long = {(a, b): row_of[b] - row_of[a] for a, b, _ in edges if row_of[b] - row_of[a] > 1}
    gap = min(_LANE, _ALL_LANES / max(len(long), 1))
    found: dict[tuple[int, int], float] = {}
    for a, b in sorted(long, key=lambda edge: (long[edge], edge)):
        first, last = row_of[a] + 1, row_of[b] - 1
        taken = [span for row in spans[first : last + 1] for span in row]
        taken += [
            (lane - gap, lane + gap)
            for (source, target), lane in found.items()
            if source != a and row_of[source] < last and row_of[target] > first
        ]
        found[a, b] = _nearest((x[a] + x[b]) / 2, taken)
    return found


def _nearest(wish: float, taken: list[tuple[float, float]]) -> float:
    """The position nearest to ``wish`` outside of all spans in ``taken``."""
    left = right = wish
    for start, end in sorted(taken):
        right = end if start < right < end else right
    for start, end in sorted(taken, key=lambda span: -span[1]):
        left = start if start < left < end else left
    return right if right - wish <= wish - left else left


def _path(source: Box, target: Box, rows: Sequence[tuple[float, float]], lane: float) -> str:
    """Path data from the bottom of one box to the top of another. ``rows`` has top and bottom of their rows and of the
    rows in between; the path crosses the latter at x = ``lane``."""
    x, (_, foot), to_x, (head, _) = source.middle, rows[0], target.middle, rows[-1]
    begin, end = source.y + source.height, target.y
    text = f"M{x:g} {begin:g}" + (f"L{x:g} {foot:g}" if begin < foot else "")
    if len(rows) > 2:
        text += _bend(x, foot, lane, rows[1][0]) + f"L{lane:g} {rows[-2][1]:g}"
        x, foot = lane, rows[-2][1]
    return text + _bend(x, foot, to_x, head) + (f"L{to_x:g} {end:g}" if head < end else "")


def _bend(x: float, y: float, to_x: float, to_y: float) -> str:
    """Path data from one point to another below it, vertical at both ends."""
    middle = (y + to_y) / 2
    return f"C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"


# -- DOT ---------------------------------------------------------------------------------------------------------------

_DOT_COLOURS = {"outside": ("#fdecec", "#d1242f"), "host": ("#ffffff", "#667080"), "input": ("#eef1f4", "#667080")}
"""Fill and border of a box outside of all regions, by kind."""


def render_dot(reports: Iterable[GraphReport]) -> str:
    """The pictures of all ``reports`` that have a graph, as one ``digraph`` each for Graphviz."""
    return "".join(f"{line}\n" for report in reports if report.graph is not None for line in _digraph(report))


def _digraph(report: GraphReport) -> Iterator[str]:
    picture = draw(report)
    yield f"digraph {_quoted(report.name)} {{"
    yield '  node [shape=box, style="filled,rounded", fontname="monospace", fontsize=10];'
    for i, box in enumerate(picture.boxes):
        inside = box.region is not None
        fill, edge = (colour(box.region or 0, soft=True), colour(box.region or 0)) if inside else _DOT_COLOURS[box.kind]
        label = "\n".join(filter(None, (box.label, box.note)))
        facts = {"label": label, "tooltip": box.title, "fillcolor": fill, "color": edge}
        yield f"  n{i} [{', '.join(f'{key}={_quoted(text)}' for key, text in facts.items())}];"
    for drawn in picture.edges:
        yield f"  n{drawn.source} -> n{drawn.target}" + (" [style=dashed];" if drawn.kind == "order" else ";")
    yield "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
