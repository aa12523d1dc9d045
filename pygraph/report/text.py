"""The report as terminal text, laid out with rich: coverage, passes, regions, what was not captured and why, cost.

The data is ``model``; sums and units are ``facts``. Everything a user wrote is cleaned, never read as markup.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pygraph.report.facts import (
    CostRow,
    Quantity,
    Repeated,
    Summary,
    advice,
    break_text,
    bytes_text,
    clean,
    cost_rows,
    count_text,
    decision_text,
    device_model,
    folded,
    percent,
    plural,
    start_text,
    state_text,
    summarize,
    us_text,
    why,
)
from pygraph.report.model import GraphReport, PassReport, RegionReport

__all__ = ["MIN_WIDTH", "NOTHING", "render_text"]

MIN_WIDTH = 60
"""Narrower than this, tables cannot be read; render_text does not go below it."""

NOTHING = "PyGraph compiled no graph: there was none, or it had been compiled before."

_ROWS = 40
_NOTES = 12
_OPERATOR = 26
_BAR = 16
_STATES = {"replay": "green", "warm": "yellow", "cold": "cyan", "uncaptured": "red"}


def render_text(reports: Sequence[GraphReport], width: int = 100, color: bool = False) -> str:
    """The report on all ``reports`` as one string of lines no wider than ``width`` columns (at least MIN_WIDTH).

    With ``color`` it holds ANSI escapes; without, it is plain text.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(width, MIN_WIDTH),
        height=100,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    for renderable in _document(reports):
        console.print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip("\n") + "\n"


def _document(reports: Sequence[GraphReport]) -> Iterator[RenderableType]:
    if not reports:
        yield NOTHING
        return
    for report in reports:
        yield from _graph(report)
        yield ""
    if len(reports) > 1:
        yield _heading(plural(len(reports), "graph"), "")
        yield _summary(summarize(reports))


def _graph(report: GraphReport) -> Iterator[RenderableType]:
    aside = ", ".join(part for part in (start_text(report), report.kind, report.device) if part)
    yield _heading(report.name, aside)
    if report.error is not None:
        yield _indented(Text(f"error: {clean(report.error)}", style="bold red"))
    yield _indented(_facts(report))
    if report.passes:
        yield from _section("Passes", _passes(report.passes))
    if report.regions:
        yield from _section("Regions", _regions(report))
        said = [f"region {region.index}: {text}" for region in report.regions for text in why(report, region)]
        yield _indented(_bullets(said))
    rows = folded(report.uncaptured())
    if rows:
        yield from _section("Not captured", _uncaptured(rows))
        yield _indented(_bullets([f"{code}: {text}" for code, text in advice(report.uncaptured()).items()]))
    costs = cost_rows(report)
    if costs:
        yield from _section(f"Cost (before fusion; time modelled on {device_model(report).label})", _costs(costs))
    if report.notes:
        yield from _section("Notes", _bullets(report.notes))


def _heading(title: str, aside: str) -> Text:
    return Text.assemble((clean(title), "bold"), (f"  {clean(aside)}" if aside else "", "dim"))


def _section(title: str, body: RenderableType) -> Iterator[RenderableType]:
    yield ""
    yield _indented(Text(title, style="bold"))
    yield _indented(body)


def _indented(body: RenderableType) -> Padding:
    return Padding(body, (0, 0, 0, 2))


# -- the head of a graph -----------------------------------------------------------------------------------------------


def _facts(report: GraphReport) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("coverage", _coverage(report))
    table.add_row("operators", _operators(report))
    if report.origin.graph_break is not None:
        table.add_row("graph break", Text(clean(break_text(report))))
    if report.pipeline:
        table.add_row("pipeline", Text(clean(report.pipeline)))
    if report.times_ms:
        times = (f"{clean(name)} {ms:.1f} ms" for name, ms in report.times_ms.items())
        table.add_row("times", Text(", ".join(times)))
    return table


def _coverage(report: GraphReport) -> Text:
    if report.error is not None:
        return Text("none: plain Inductor runs this graph", style="bold red")
    if report.emitted is None:
        return Text("unknown: no program was emitted")
    full = int(_BAR * report.coverage)  # rounded down: only a whole looks whole
    words = (
        f" {percent(report.coverage)}: {report.selected_launches} of {plural(report.launches, 'launch', 'launches')} "
        f"selected, {report.replayed_launches} replayed, {len(report.emitted.outside)} outside"
    )
    return Text.assemble(("█" * full, "green"), ("░" * (_BAR - full), "dim"), words)


def _operators(report: GraphReport) -> Text:
    if report.graph is None:
        return Text("unknown: the graph was not lifted")
    outside = sum(1 for _ in report.uncaptured())
    return Text(f"{len(report.graph)}, of which {outside} not captured")


def _summary(summary: Summary) -> Padding:
    launches = plural(summary.launches, "launch", "launches")
    regions = plural(summary.regions, "region")
    lines = []
    if summary.errors:
        lines.append(f"plain Inductor runs {summary.errors} of {plural(summary.graphs, 'graph')}")
    if summary.programs:
        share = percent(summary.coverage) if summary.coverage is not None else str(summary.selected_launches)
        lines.append(f"{share} of {launches} selected, in {regions}; {summary.replayed_launches} replayed")
    else:
        lines.append("coverage unknown: no program was emitted")
    lines.append(
        f"{plural(summary.captures, 'capture')}, {plural(summary.replays, 'replay')}, "
        f"{plural(summary.uncaptured, 'operator')} not captured, {plural(summary.breaks, 'graph break')}"
    )
    return _indented(Text("\n".join(lines)))


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(*left: str, right: Sequence[str] = (), last: Sequence[str] = ()) -> Table:
    """A table without frame: columns aligned left, then right, then the wordy ones that take what width is left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    for name in last:
        table.add_column(name, overflow="fold", min_width=8)
    return table


def _passes(passes: Iterable[PassReport]) -> Table:
    table = _table("pass", right=("ms",), last=("changed", "notes"))
    for item in passes:
        notes = "\n".join(clean(note) for note in item.notes)
        table.add_row(Text(clean(item.text)), f"{item.ms:.2f}", "yes" if item.modified else "no", Text(notes))
    return table


def _regions(report: GraphReport) -> Table:
    names = ("kernels", "replays", "captures", "slots", "workspace")
    table = _table("#", "state", right=names, last=("decision",))
    for region in report.regions:
        table.add_row(*_region_row(region))
    return table


def _region_row(region: RegionReport) -> Iterator[Text]:
    record = region.record
    yield Text(str(region.index))
    yield Text(state_text(region), style=_STATES.get(region.state, ""))
    yield Text(str(len(region.kernels)))
    if record is None:
        yield from [Text("–", style="dim")] * 4
    else:
        yield from (Text(str(count)) for count in (record.replays, record.captures, record.slots))
        yield Text(bytes_text(Quantity(record.workspace_bytes)))
    yield Text(decision_text(region))


def _uncaptured(rows: Sequence[Repeated]) -> Table:
    table = _table("operator", "reason", last=("detail", "user line"))
    table.columns[0].min_width = min(_OPERATOR, max(len(row.op) for row in rows))
    for row in rows[:_ROWS]:
        one = row.first
        where = Text(clean(_nearby(one.loc) if one.loc else "unknown line"), style="dim")
        if one.code:
            where.append(f"\n{clean(one.code)}", style="not dim")
        table.add_row(Text(clean(row.op)), Text(clean(one.reason), style="red"), Text(clean(row.detail)), where)
    left = sum(row.count for row in rows[_ROWS:])
    if left:
        table.add_row(Text(f"… and {left} more", style="dim"))
    return table


def _nearby(loc: str) -> str:
    """``loc`` relative to the working directory, when it is in there."""
    return loc.removeprefix(os.path.join(os.getcwd(), ""))


def _costs(rows: Sequence[CostRow]) -> Table:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    table = _table("where", right=("operators", "flops", "share", "moved", "share", "time", "share"))
    for row in rows:
        table.add_row(*_cost_row(row, total, row.label))
    if len(rows) > 1:
        table.add_row(*_cost_row(total, total, "total"), style="dim")
    return table


def _cost_row(row: CostRow, total: CostRow, label: str) -> Iterator[str]:
    yield label
    yield str(row.nodes)
    yield count_text(row.flops)
    yield _share(row.flops, total.flops)
    yield bytes_text(row.nbytes)
    yield _share(row.nbytes, total.nbytes)
    yield us_text(row.time_us)
    yield _share(row.time_us, total.time_us)


def _share(part: Quantity, total: Quantity) -> str:
    share = part.share_of(total)
    return percent(share) if share is not None else "–"


def _bullets(notes: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for note in notes[:_NOTES]:
        table.add_row("•", Text(clean(note)))
    if len(notes) > _NOTES:
        table.add_row("•", f"… and {len(notes) - _NOTES} more")
    return table
