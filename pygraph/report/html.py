"""The report as one self-contained HTML page, and its pictures as one SVG: without scripts, and without external fonts
or images; all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from typing import Any

import jinja2

from pygraph import __version__
from pygraph.colours import HUES, colour, hue
from pygraph.report.facts import clean, coloured_as, percent, plural, summarize
from pygraph.report.model import GraphReport
from pygraph.report.picture import draw
from pygraph.report.text import NOTHING, badges, head, ranks_section, sections, summary_lines

_TITLE, _NARROWEST = 36, 560
"""Height of a name above a picture, and minimum width of a file of pictures, in pixels."""


def render_html(reports: Iterable[GraphReport], ranks: Sequence[Any] | None = None) -> str:
    """The page on all ``reports``, and on differences between ``ranks``.

    Raises TypeError if a graph has an operand without text."""
    chosen = list(reports)
    lines = [*summary_lines(summarize(chosen)), plural(len(chosen), "graph")]
    return template("report.html.jinja").render(
        lines=lines,
        pages=list(map(_page, chosen)),
        ranks=None if ranks is None else ranks_section(ranks),
        version=__version__,
        nothing=NOTHING,
    )


def framed(reports: Iterable[GraphReport]) -> str:
    """The page in a frame for notebooks, which keeps its style apart from the notebook's."""
    style = "width: 100%; height: 40rem; border: 0; resize: vertical"
    return f'<iframe sandbox title="PyGraph report" style="{style}" srcdoc="{escape(render_html(reports))}"></iframe>'


def render_svg(reports: Iterable[GraphReport]) -> str:
    """The pictures of all ``reports`` that have a graph, one below the other."""
    pictures, top = [], 0
    for report in reports:
        picture = draw(report)
        if picture.boxes:
            pictures.append((report.name, picture, top + _TITLE))
            top += picture.height + _TITLE
    width = max((picture.width for _, picture, _ in pictures), default=0)
    return template("report.svg.jinja").render(
        pictures=pictures, width=max(width, _NARROWEST), height=max(top, _TITLE), nothing=NOTHING
    )


def _page(report: GraphReport) -> dict[str, Any]:
    """Data of one graph for the template. ``links`` has the id of each operator's box in the picture."""
    picture, colours = draw(report), coloured_as(report)
    ir = "" if report.graph is None else str(report.graph)
    texts = (("IR after the passes", ir), ("Program emitted by Inductor", report.source))
    return {
        "report": report,
        "coverage": percent(report.coverage) if report.emitted else "unknown",
        "badges": badges(report),
        "head": [(name, clean(text)) for name, text in head(report)],
        "sections": list(sections(report)),
        "picture": picture,
        "links": {box.node: f"{report.name}-{i}" for i, box in enumerate(picture.boxes) if box.node},
        "timelines": [
            (region.index, colours[region.index], region.record.timeline)
            for region in report.regions
            if region.record is not None and region.record.timeline
        ],
        "texts": [(title, text) for title, text in texts if text],
    }


@cache
def template(name: str) -> jinja2.Template:
    """A template of this package; it escapes all values."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pygraph.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(HUES=HUES, hue=hue, colour=colour)
    return environment.get_template(name)
