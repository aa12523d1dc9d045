"""The report as one self-contained HTML page: no script, no font, no image from anywhere; everything escaped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import jinja2

from pygraph import __version__
from pygraph.report.facts import clean, percent, plural, summarize
from pygraph.report.model import GraphReport
from pygraph.report.picture import MAX_BOXES, Picture, draw
from pygraph.report.text import NOTHING, Section, badges, head, sections

__all__ = ["render_html"]

HUES = 12
"""Regions take their colours in turn from this many."""

_TEXT_LIMIT = 400_000


@dataclass(frozen=True, slots=True)
class _Page:
    """All that the template shows of one graph. ``links`` has the id of the box that each operator is drawn in."""

    name: str
    badges: list[str]
    coverage: str
    error: str | None
    head: list[tuple[str, str]]
    sections: list[Section]
    picture: Picture
    links: dict[str, str]
    texts: list[tuple[str, str]]


def render_html(reports: Iterable[GraphReport], max_boxes: int = MAX_BOXES) -> str:
    """The page on all ``reports``. Graphs of more than ``max_boxes`` operators are drawn region by region.

    Raises TypeError where a graph has an operand without text.
    """
    chosen = list(reports)
    pages = [_page(report, max_boxes) for report in chosen]
    return _template().render(summary=summarize(chosen), pages=pages, version=__version__, nothing=NOTHING)


def _page(report: GraphReport, max_boxes: int) -> _Page:
    picture = draw(report, max_boxes)
    texts = (
        ("IR after the passes", "" if report.graph is None else str(report.graph)),
        ("Program emitted by Inductor", report.source),
    )
    return _Page(
        name=report.name,
        badges=badges(report),
        coverage=percent(report.coverage) if report.emitted else "unknown",
        error=report.error,
        head=list(head(report)),
        sections=list(sections(report)),
        picture=picture,
        links={name: f"{report.name}-{i}" for i, box in enumerate(picture.boxes) for name in box.names},
        texts=[(title, _limited(text)) for title, text in texts if text],
    )


def _limited(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    return f"{text[:_TEXT_LIMIT]}\n… {len(text) - _TEXT_LIMIT} more characters are in the dump directory"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pygraph.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(HUES=HUES)
    environment.filters.update(percent=percent, plural=plural, clean=clean)
    return environment.get_template("report.html.jinja")
