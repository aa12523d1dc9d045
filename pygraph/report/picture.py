"""A scene as drawn: rectangles, texts and curves in pixels, ready for the template that writes the SVG.

Which boxes there are is ``scene``'s business, where they go ``layout``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pygraph.report.layout import Layout, arrange
from pygraph.report.scene import Box, Link, Scene

__all__ = ["Drawn", "Picture", "draw"]

_HEIGHT = 24.0
_TALL = 38.0
_ROW_GAP = 26.0
_MARGIN = 12.0
_CHAR = 6.7
_NOTE_CHAR = 5.6
_PAD = 18.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """One rectangle: its box, its left upper corner and its size."""

    box: Box
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """The x of its texts."""
        return round(self.x + self.width / 2, 1)


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture. ``flow``, ``order``, ``far`` are path data: data edges, effect edges, edges over many rows."""

    drawn: tuple[Drawn, ...]
    flow: str
    order: str
    far: str
    width: int
    height: int
    note: str


def draw(scene: Scene) -> Picture:
    """Lay out ``scene``. The picture of an empty scene has no size."""
    if not scene.boxes:
        return Picture((), "", "", "", 0, 0, scene.note)
    widths = [_width(box) for box in scene.boxes]
    layout = arrange(widths, [(link.source, link.target) for link in scene.links])
    rows = _rows(scene.boxes, layout)
    drawn = tuple(_rectangle(box, layout, rows, i, widths[i]) for i, box in enumerate(scene.boxes))
    paths: dict[str, list[str]] = {"flow": [], "order": [], "far": []}
    for link, bends in zip(scene.links, layout.bends, strict=True):
        over = layout.layer[link.target] - layout.layer[link.source] - 1
        if over > len(bends):
            paths["far"].append(_detour(drawn[link.source], drawn[link.target], layout.width))
        else:
            paths["order" if link.order else "flow"].append(_curve(drawn, rows, layout, link, bends))
    width, height = round(layout.width + 2 * _MARGIN), round(sum(rows[-1]) + _MARGIN)
    flow, order, far = (" ".join(paths[kind]) for kind in ("flow", "order", "far"))
    return Picture(drawn, flow, order, far, width, height, scene.note)


def _width(box: Box) -> float:
    return max(len(box.label) * _CHAR, len(box.note) * _NOTE_CHAR, 10.0) + _PAD


def _rows(boxes: Sequence[Box], layout: Layout) -> list[tuple[float, float]]:
    """Top and height of each row."""
    heights = [_HEIGHT] * layout.rows
    for box, row in zip(boxes, layout.layer, strict=True):
        heights[row] = max(heights[row], _TALL if box.note else _HEIGHT)
    rows, y = [], _MARGIN
    for height in heights:
        rows.append((y, height))
        y += height + _ROW_GAP
    return rows


def _rectangle(box: Box, layout: Layout, rows: Sequence[tuple[float, float]], i: int, width: float) -> Drawn:
    top, room = rows[layout.layer[i]]
    height = _TALL if box.note else _HEIGHT
    left = layout.x[i] - width / 2 + _MARGIN
    return Drawn(box, round(left, 1), round(top + (room - height) / 2, 1), round(width, 1), height)


def _curve(
    drawn: Sequence[Drawn], rows: Sequence[tuple[float, float]], layout: Layout, link: Link, bends: Iterable[float]
) -> str:
    """Path data from the foot of one box to the head of another, straight down through each bend's row."""
    source, target = drawn[link.source], drawn[link.target]
    x, y = source.middle, source.y + source.height
    parts = [f"M{x:g} {y:g}"]
    for row, bend in enumerate(bends, layout.layer[link.source] + 1):
        top, height = rows[row]
        parts.append(_step(x, y, round(bend + _MARGIN, 1), top))
        x, y = round(bend + _MARGIN, 1), top + height
        parts.append(f"V{y:g}")
    parts.append(_step(x, y, target.middle, target.y))
    return "".join(parts)


def _detour(source: Drawn, target: Drawn, width: float) -> str:
    """Path data that leads along the nearer side of the picture, past everything in between."""
    side = _MARGIN / 2 if source.middle + target.middle < width else width + 1.5 * _MARGIN
    x, y, to_x, to_y = source.middle, source.y + source.height, target.middle, target.y
    out = f"M{x:g} {y:g}C{x:g} {y + 40:g} {side:g} {y:g} {side:g} {y + 60:g}"
    return f"{out}V{to_y - 60:g}C{side:g} {to_y:g} {to_x:g} {to_y - 40:g} {to_x:g} {to_y:g}"


def _step(x: float, y: float, to_x: float, to_y: float) -> str:
    if abs(to_x - x) < 0.5:
        return f"L{to_x:g} {to_y:g}"
    middle = (y + to_y) / 2
    return f"C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"
