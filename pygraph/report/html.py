"""The report as one self-contained HTML page: no script, no font, no image from anywhere; everything escaped.

This module gathers what the templates show. The picture comes from ``scene``, ``layout`` and ``picture``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import jinja2

from pygraph import __version__
from pygraph.report import facts
from pygraph.report.facts import CostRow, Quantity, Repeated, Summary
from pygraph.report.model import GraphReport
from pygraph.report.picture import Picture, draw
from pygraph.report.scene import MAX_BOXES, scene

__all__ = ["render_html"]

HUES = 12
"""Regions take their colours in turn from this many."""

_TEXT_LIMIT = 400_000


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a bar: ``share`` 0 to 1 of what is known, and ``title`` shown on hover."""

    region: int | None
    share: float
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar over regions and outside: its total as text, and whether part of the whole is unknown."""

    name: str
    total: str
    segments: tuple[Segment, ...]
    unknown: bool


@dataclass(frozen=True, slots=True)
class GraphPage:
    """All that the template of one graph shows, but for what it reads from the ``report`` itself."""

    report: GraphReport
    uncaptured: list[Repeated]
    advice: dict[str, str]
    links: dict[str, str]
    picture: Picture
    costs: list[CostRow]
    bars: list[Bar]
    model: str
    pgir: str
    source: str


def render_html(reports: Iterable[GraphReport], max_boxes: int = MAX_BOXES) -> str:
    """The page on all ``reports``. Graphs of more than ``max_boxes`` operators are drawn region by region.

    Raises TypeError where a graph has an operand without text.
    """
    chosen = list(reports)
    summary: Summary = facts.summarize(chosen)
    pages = [_page(report, max_boxes) for report in chosen]
    text: str = _template().render(summary=summary, pages=pages, version=__version__)
    return text


def _page(report: GraphReport, max_boxes: int) -> GraphPage:
    picture, costs = draw(scene(report, max_boxes)), facts.cost_rows(report)
    return GraphPage(
        report=report,
        uncaptured=facts.folded(report.uncaptured()),
        advice=facts.advice(report.uncaptured()),
        links=_links(report, picture),
        picture=picture,
        costs=costs,
        bars=list(_bars(costs)),
        model=facts.device_model(report).label,
        pgir=_limited(str(report.graph)) if report.graph is not None else "",
        source=_limited(report.source),
    )


def _links(report: GraphReport, picture: Picture) -> dict[str, str]:
    """The id of the box that each operator is drawn in."""
    return {name: f"{report.name}-{i}" for i, drawn in enumerate(picture.drawn) for name in drawn.box.names}


def _limited(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    return f"{text[:_TEXT_LIMIT]}\n… {len(text) - _TEXT_LIMIT} more characters are in the dump directory"


def _bars(rows: Sequence[CostRow]) -> Iterable[Bar]:
    if not rows:
        return
    yield _bar("Operations", rows, lambda row: row.flops, facts.count_text)
    yield _bar("Bytes moved", rows, lambda row: row.nbytes, facts.bytes_text)
    yield _bar("Modelled time", rows, lambda row: row.time_us, facts.us_text)


def _bar(
    name: str, rows: Sequence[CostRow], pick: Callable[[CostRow], Quantity], text: Callable[[Quantity], str]
) -> Bar:
    total = Quantity()
    for row in rows:
        total = total + pick(row)
    whole = total.known or 1.0
    segments = [Segment(row.region, pick(row).known / whole, f"{row.label}: {text(pick(row))}") for row in rows]
    return Bar(name, text(total), tuple(s for s in segments if s.share > 0), bool(total.unknown))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pygraph.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        decision=facts.decision_text, state=facts.state_text, why=facts.why, HUES=HUES, Quantity=Quantity
    )
    environment.filters.update(
        percent=facts.percent,
        plural=facts.plural,
        count=facts.count_text,
        size=facts.bytes_text,
        micros=facts.us_text,
        clean=facts.clean,
        start=facts.start_text,
        broken=facts.break_text,
    )
    return environment.get_template("report.html.jinja")
