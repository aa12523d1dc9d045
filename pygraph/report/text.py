"""The sections of a report, and their layout as terminal text with rich.

The page of ``html`` also shows ``head`` and ``sections``. Text from users is cleaned, and never interpreted as
markup.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pygraph.colours import colour
from pygraph.report.facts import (
    CostRow,
    Quantity,
    Summary,
    advice,
    bytes_text,
    clean,
    coloured_as,
    cost_rows,
    duration,
    folded,
    percent,
    plural,
    summarize,
    why,
)
from pygraph.report.model import CALLABLE, GraphReport, RegionReport, Uncaptured

MIN_WIDTH = 60
"""Minimum width of the output of render_text: narrower tables cannot be read."""

NOTHING = "PyGraph compiled no graph: there was none, or it had been compiled before."

_ROWS = 40
_NOTES = 12
_NAME = 26
_BAR = 16
_NUMBERS = ("kernels", "replays", "captures", "slots", "workspace", "held")
_SUMS = ("operators", "flops", "share", "moved", "share", "time", "share")
_LEFT = (("operator", "name"), ("reason", "name"), ("detail", "words"), ("user line", "words"))
_REGIONS = (
    ("region", "name"),
    ("state", "name"),
    *((name, "number") for name in _NUMBERS),
    ("decision", "words"),
    ("module", "words"),
)
_COSTS = (("where", "name"), *((name, "number") for name in _SUMS))
_RANKS = (("rank", "words"), ("differs from rank 0", "words"))
_PASSES = (("pass", "name"), ("ms", "number"), ("changed", "name"), ("notes", "words"))
_STYLES = {"replay": "green", "warm": "yellow", "cold": "cyan", "uncaptured": "red", "reason": "red", "dim": "dim"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: ``style`` is a region's state, ``reason`` or ``dim``; ``title`` is shown on hover.

    ``node`` is the operator in the cell, ``region`` the IR region whose colour it has.
    """

    text: str
    style: str = ""
    title: str = ""
    node: str | None = None
    region: int | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A table under a title, with ``notes`` below it.

    A column has a head and a kind: ``name``, ``number`` or ``words``.
    """

    title: str
    columns: tuple[tuple[str, str], ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()


def badges(report: GraphReport) -> list[str]:
    """Function and line of a graph, if known, its kind and its device."""
    start = report.origin.start
    function = report.origin.function + ("" if start is None else f" at {start}")
    return [clean(part) for part in (function, report.kind, report.device) if part]


def head(report: GraphReport) -> Iterator[tuple[str, str]]:
    """Facts of a graph, one per line: name and text."""
    yield "coverage", _coverage(report)
    if report.graph is None and report.kind != CALLABLE:
        yield "operators", "unknown: the graph was not lifted"
    elif report.graph is not None:
        yield "operators", f"{len(report.graph)}, of which {sum(1 for _ in report.uncaptured())} not captured"
    for line, reason in report.origin.breaks.items():
        yield "graph break", f"{line}: {reason}" + (f": {line.code}" if line.code else "")
    held = sum(region.record.held_bytes for region in report.regions if region.record is not None)
    if held:
        yield "captures", f"hold {bytes_text(held)}"
    if report.pipeline:
        yield "pipeline", report.pipeline
    if report.times_ms:
        yield "times", ", ".join(f"{name} {ms:.1f} ms" for name, ms in report.times_ms.items())


def _coverage(report: GraphReport) -> str:
    if report.error is not None:
        return "none: the callable runs as it is" if report.kind == CALLABLE else "none: plain Inductor runs this graph"
    if report.kind == CALLABLE:
        replays = sum(region.record.replays for region in report.regions if region.record is not None)
        return f"the whole step as it runs, {plural(replays, 'replay')}"
    if report.emitted is None:
        return "unknown: no program was emitted"
    launches = f"{report.selected_launches} of {plural(report.launches, 'launch', 'launches')}"
    outside = f"{report.replayed_launches} replayed, {len(report.emitted.outside)} outside"
    return f"{percent(report.coverage)}: {launches} selected, {outside}"


def sections(report: GraphReport) -> Iterator[Section]:
    """The tables on a graph; empty ones are left out."""
    left, colours = list(report.uncaptured()), coloured_as(report)
    if left:
        told = tuple(f"{code}: {text}" for code, text in advice(left))
        yield Section("Not captured", _LEFT, tuple(map(_uncaptured, folded(left))), told)
    if report.regions:
        said = tuple(f"region {region.index}: {text}" for region in report.regions for text in why(report, region))
        rows = tuple(_region(region, colours[region.index]) for region in report.regions)
        yield Section("Regions", _REGIONS, rows, said)
    costs = cost_rows(report)
    if costs and report.model is not None:
        title = f"Cost (before fusion; time modelled on {report.model.label})"
        yield Section(title, _COSTS, tuple(_costs(costs, colours)))
    if report.passes:
        facts = ((p.text, f"{p.time_ms:.2f}", "yes" if p.modified else "no", "\n".join(p.notes)) for p in report.passes)
        yield Section("Passes", _PASSES, tuple(tuple(map(Cell, row)) for row in facts))
    if report.notes:
        yield Section("Notes", notes=tuple(report.notes))


def _uncaptured(row: Uncaptured) -> tuple[Cell, ...]:
    where = row.loc.removeprefix(os.path.join(os.getcwd(), "")) if row.loc else "unknown line"
    where += f" in {row.module}" if row.module else ""
    line = f"{where}\n{clean(row.code)}" if row.code else where
    return Cell(row.op, node=row.node), Cell(row.reason, "reason"), Cell(row.detail), Cell(line)


def _region(region: RegionReport, coloured: int) -> tuple[Cell, ...]:
    record = region.record
    counts: tuple[str, ...] = ("–",) * 5
    if record is not None:
        numbers = map(str, (record.replays, record.captures, record.slots))
        counts = (*numbers, *map(bytes_text, (record.workspace_bytes, record.held_bytes)))
    return (
        Cell(str(region.index), region=coloured),
        Cell("replayed" if region.state == "replay" else region.state, region.state),
        Cell(str(len(region.kernels)), title="\n".join(region.kernels)),
        *map(Cell, counts),
        Cell("selected" if region.wrapped else "not selected"),
        Cell(region.module),
    )


def _costs(rows: Sequence[CostRow], colours: Mapping[int, int]) -> Iterator[tuple[Cell, ...]]:
    kinds = ("flops", "bytes", "time_us")
    totals = [sum((getattr(row, kind) for row in rows), Quantity()) for kind in kinds]
    total = CostRow(None, sum(row.operators for row in rows), *totals)
    for row in [*rows, total] if len(rows) > 1 else rows:
        label = "total" if row is total else "outside" if row.region is None else f"region {row.region}"
        texts = [str(row.operators)]
        for kind, whole in zip(kinds, totals, strict=True):
            share = getattr(row, kind).share_of(whole)
            texts += [getattr(row, kind).text(kind), "–" if share is None else percent(share)]
        style = "dim" if row is total else ""
        coloured = None if row.region is None else colours.get(row.region, row.region)
        yield Cell(label, style, region=coloured), *(Cell(text, style) for text in texts)


def summary_lines(summary: Summary) -> Iterator[str]:
    """Lines of the summary of several graphs."""
    if summary.errors:
        yield f"{summary.errors} of {plural(summary.graphs, 'graph')} given up"
    if summary.programs:
        share = percent(summary.coverage) if summary.coverage is not None else str(summary.selected_launches)
        regions = f"in {plural(summary.regions, 'region')}; {summary.replayed_launches} replayed"
        counted = plural(summary.launches, "launch", "launches")
        if summary.breaks and summary.coverage is not None:
            counted += f" and {plural(summary.breaks, 'graph break')}"
        yield f"{share} of {counted} selected, {regions}"
    else:
        yield "coverage unknown: no program was emitted"
    yield (
        f"{plural(summary.captures, 'capture')}, {plural(summary.replays, 'replay')}, "
        f"{plural(summary.uncaptured, 'operator')} not captured, {plural(summary.breaks, 'graph break')}"
    )
    if summary.held_bytes:
        yield f"captures hold {bytes_text(summary.held_bytes)}"
    if summary.spent_us:
        saved = f", replays saved {duration(summary.saved_us)}" if summary.saved_us else ""
        yield f"captures took {duration(summary.spent_us)}{saved}"


def ranks_section(ranks: Sequence[Any]) -> Section:
    """Differences of ``ranks``, from ``compared``, from rank 0; ranks with equal differences share a row. Rank 0 itself
    is shown only if it failed."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for told in ranks:
        error = [f"failed: {told['error'].splitlines()[-1]}"] if told["error"] else []
        if told["rank"] or error:
            rows.setdefault((*error, *told["differences"]), []).append(told["rank"])
    return Section("Ranks", _RANKS, tuple(_rank(numbers, lines) for lines, numbers in rows.items()))


def _rank(numbers: Sequence[int], lines: Sequence[str]) -> tuple[Cell, ...]:
    more = [f"… and {len(lines) - _NOTES} more"] if len(lines) > _NOTES else []
    text = "\n".join((*map(clean, lines[:_NOTES]), *more)) or "nothing"
    return Cell(", ".join(map(str, numbers))), Cell(text, "" if lines else "dim")


def render_text(
    reports: Sequence[GraphReport], width: int = 100, color: bool = False, ranks: Sequence[Any] | None = None
) -> str:
    """The report on all ``reports``, and on differences between ``ranks``, as one string.

    No line is wider than ``width`` columns (at least MIN_WIDTH). With ``color``, it has ANSI escapes; otherwise it is
    plain text.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(width, MIN_WIDTH),
        height=100,
        force_terminal=color,
        color_system="256" if color else None,
        highlight=False,
        _environ={},
    )
    for renderable in _document(reports, ranks):
        console.print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip("\n") + "\n"


def _document(reports: Sequence[GraphReport], ranks: Sequence[Any] | None) -> Iterator[RenderableType]:
    if not reports:
        yield NOTHING
        yield ""
    for report in reports:
        yield Text.assemble((report.name, "bold"), (f"  {', '.join(badges(report))}", "dim"))
        if report.error is not None:
            yield _indented(Text(f"error: {clean(report.error)}", style="bold red"))
        yield _indented(_head(report))
        for section in sections(report):
            yield ""
            yield _indented(Group(Text(section.title, style="bold"), *_section(section)))
        yield ""
    if len(reports) > 1 or any(report.origin.breaks for report in reports):
        yield Text(plural(len(reports), "graph"), style="bold")
        yield _indented(Text("\n".join(summary_lines(summarize(reports)))))
        yield ""
    if ranks is not None:
        section = ranks_section(ranks)
        yield Text(section.title, style="bold")
        yield _indented(Group(*_section(section)))


def _indented(body: RenderableType) -> Padding:
    return Padding(body, (0, 0, 0, 2))


def _head(report: GraphReport) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in head(report):
        shown = Text(clean(text))
        if name == "coverage" and report.error is None and report.emitted is not None:
            full = int(_BAR * report.coverage)  # rounded down: only 100 % fills the bar
            shown = Text.assemble(("█" * full, "green"), ("░" * (_BAR - full), "dim"), f" {text}")
        table.add_row(name, shown)
    return table


def _section(section: Section) -> Iterator[RenderableType]:
    if section.rows:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
        for i, (name, kind) in enumerate(section.columns):
            longest = max(len(row[i].text) for row in section.rows)
            least = {"name": min(_NAME, longest) if i == 0 else None, "words": 8}.get(kind)
            table.add_column(name, justify="right" if kind == "number" else "left", overflow="fold", min_width=least)
        for row in section.rows[:_ROWS]:
            table.add_row(*map(_text, row))
        if len(section.rows) > _ROWS:
            table.add_row(Text(f"… and {len(section.rows) - _ROWS} more", style="dim"))
        yield table
    if section.notes:
        bullets = Table.grid("", "", padding=(0, 1, 0, 0))
        for note in section.notes[:_NOTES]:
            bullets.add_row("•", Text(clean(note), overflow="fold"))
        if len(section.notes) > _NOTES:
            bullets.add_row("•", f"… and {len(section.notes) - _NOTES} more")
        yield bullets


def _text(cell: Cell) -> Text:
    style = _STYLES.get(cell.style, "") if cell.region is None else colour(cell.region)
    return Text("\n".join(map(clean, cell.text.split("\n"))), style=style)
