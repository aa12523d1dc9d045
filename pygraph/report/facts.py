"""Facts computed from reports: regions of nodes, cost by region, sums over graphs, words for numbers, and JSON.

The JSON document is ``{schema, pygraph, summary, graphs, ranks}``. ``pygraph`` is the version that wrote it, and
``summary`` is a ``Summary``. Every key is always present; unknown values are null. Units are in the names; shares
are 0 to 1. A graph has:

- ``index``, ``name``, ``kind``, ``device``: ``kind`` is forward, backward or inference; or callable, for
  ``pygraph.graph``, which has no graph.
- ``function``, ``loc``, ``graph_breaks``: the user's function, the line at which the graph begins, and the lines at
  which Dynamo had to stop, ``{loc, code, reason}`` each: the one that ended the graph, and adjacent ones without a
  graph in between; for the last graph, also those of functions without a graph.
- ``error``, ``notes``: why PyGraph left the graph to plain Inductor; differences between program and decision, or why
  calls of a callable ran uncaptured.
- ``coverage``: ``{launches, selected_launches, replayed_launches, outside, share}`` of the emitted program; null
  without one. ``outside`` names the launches outside of regions; ``share`` is the fraction of selected launches.
- ``operators``, ``pgir``: the number of operators, and the IR text after the passes; null if the graph was not lifted.
- ``pipeline``, ``passes``, ``times_ms``: pipeline text, a ``PassRecord`` for each pass, and the time of each phase of
  the compilation.
- ``regions``: ``{index, state, selected, why, module, planned, nodes, kernels, record}`` each. ``why`` explains the
  state. ``record`` is the runtime's ``RegionRecord`` with ``held_bytes``; null if the region is not selected.
- ``uncaptured``: an ``Uncaptured`` for each operator that is not captured.
- ``cost_model``, ``cost``: the device model, and a ``CostRow`` for each region and, with a null ``region``, for all
  nodes outside. Each sum is ``{known, unknown}``: the known part, and the number of unknown summands.

``ranks`` is null except for ``pygraph explain`` under torchrun, where other keys describe rank 0. For each rank, it has
``{rank, error, incomplete, differences, summary, graphs}``. ``error`` says why the report is not whole, ``incomplete``
is true if ``--strict`` fails, and ``differences`` from rank 0 are in words. ``summary`` is null without a report.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pygraph import __version__
from pygraph.ir import DETAIL, REASON, REGION, SELECTED, KernelNode
from pygraph.ir.cost import evaluate
from pygraph.passes.analysis import node_time_us
from pygraph.passes.legality.reasons import REASONS
from pygraph.passes.partitioning import NO_LAUNCH
from pygraph.report.model import GraphReport, RegionReport, Uncaptured
from pygraph.runtime.contest import DEPENDENCES, PROGRAM, Decision

SCHEMA_VERSION = 9
"""Version of the JSON schema, increased when a key is renamed or removed, or when its meaning changes."""

_VALUE = re.compile(r'%("(?:[^"\\]|\\.)*"|[\w.]*\w)')


# -- regions -----------------------------------------------------------------------------------------------------------


def membership(report: GraphReport) -> dict[str, int]:
    """The region of each node in a region: of the emitted program, or the planned one if no program was emitted.

    A node that several emitted regions compute belongs to the first of them. A node that Inductor folded away belongs
    to the first emitted region that holds a part of its planned region.
    """
    found = ((node.name, node.meta.get(REGION)) for node in report.graph.nodes) if report.graph is not None else ()
    planned = {name: index for name, index in found if index is not None}
    if not report.regions:
        return planned
    emitted = {name: region.index for region in reversed(report.regions) for name in region.nodes}
    home = {index: region.index for region in reversed(report.regions) for index in region.planned}
    return {**{name: home[index] for name, index in planned.items() if index in home}, **emitted}


def coloured_as(report: GraphReport) -> dict[int, int]:
    """The IR region whose colour each emitted region has: the first of its planned regions that no earlier one took.
    So pictures, tables and the IR agree, even if Inductor recomputes a node of one region in another."""
    found: dict[int, int] = {}
    for region in report.regions:
        own = [index for index in region.planned if index not in found.values()]
        found[region.index] = next(iter((*own, *region.planned, region.index)))
    return found


def unselected(report: GraphReport, region: RegionReport) -> bool:
    """True if selection left out ``region``, because a graph would not pay."""
    regions = {} if report.graph is None else report.graph.regions
    return bool(region.planned) and all(regions[index].meta.get(SELECTED) is False for index in region.planned)


def why(report: GraphReport, region: RegionReport) -> Iterator[str]:
    """Lines on ``region``: the reason for its state, measurements, notes, refusals of variants."""
    if region.why:
        yield region.why
    if unselected(report, region) and report.graph is not None:
        yield from filter(None, (report.graph.regions[index].meta.get(DETAIL) for index in region.planned))
    record = region.record
    if record is None:
        return
    if record.ledger is not None and record.ledger.attempts:
        record.settle()
        declined = (
            f"; at least {plural(record.ledger.declined, 'call')} uncaptured, since a further capture did not pay"
        )
        sums = f"captures took {duration(record.ledger.spent_us)}"
        saved = f", replays saved {duration(record.ledger.saved_us)}" if record.ledger.saved_us else ""
        yield sums + saved + declined * bool(record.ledger.declined)
    if record.orders:
        yield order_text(record.orders)
    if record.longest_path:
        launches = plural(record.launches, "launch", "launches")
        yield f"order: the longest path of dependences has {record.longest_path} of {launches}"
    if record.passes:
        yield f"launch passes: {'; '.join(record.passes)}"
    if record.timeline:
        lanes = plural(1 + max(lane for _, lane, _ in record.timeline), "lane")
        length = 1 + max(start for *_, start in record.timeline)
        beside = len(record.timeline) / length
        yield f"side by side: {lanes}, {length} launches one after the other, {beside:.1f} at once on average"
    if record.eager:
        calls = plural(sum(call.count for call in record.eager), "eager call")
        yield f"{plural(record.segments, 'segment')}, and {calls} between them"
    for call in record.eager:
        times = f" ×{call.count}" if call.count > 1 else ""
        yield f"eager call: {call.operator}{times} at {call.loc or 'unknown line'}"
    for names, reason in record.eager_since.items():
        yield f"called by each replay, since a capture failed: {names}: {reason}"
    for name, runs in sorted(record.python_runs.items()):
        yield f"{name} is written in Python: its body ran {plural(runs, 'time')} to be captured and compared"
    yield from record.notes
    yield from (str(refusal) for refusal in record.refusals.values() if refusal.reason not in region.why)


def duration(us: float) -> str:
    """A time, such as ``12.3 ms``."""
    size, unit = next(((size, unit) for size, unit in ((1e6, "s"), (1e3, "ms")) if abs(us) >= size), (1.0, "µs"))
    return f"{us / size:.{unit != 'µs':d}f} {unit}"


def order_text(decisions: Sequence[Decision]) -> str:
    """The orders of launches in which a region's variants are replayed, in one line; for several variants, counts and
    the latest decision."""
    last, counts = decisions[-1], Counter(each.order for each in decisions)
    several = ", ".join(f"{counts[order]} {order}" for order in (PROGRAM, DEPENDENCES) if counts[order])
    order = last.order if len(decisions) == 1 else f"{several}; last {last.order}"
    source = f"read from {last.path}" if last.path else f"{last.calls} calls"
    times = f"{PROGRAM} {last.program_us:.1f}, {DEPENDENCES} {last.dependences_us:.1f}"
    loop = "; the other is slower in the caller's loop" if last.slower_loop else ""
    return f"measured: {order}; µs of the device per call: {times} ({source}){loop}"


# -- cost --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quantity:
    """A sum with known and unknown summands.

    Args:
        known: sum of the known summands
        unknown: number of unknown summands
    """

    known: float = 0.0
    unknown: int = 0

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Quantity:
        """The sum of ``values``; None is unknown."""
        summands = list(values)
        return cls(float(sum(value or 0.0 for value in summands)), summands.count(None))

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(self.known + other.known, self.unknown + other.unknown)

    def share_of(self, total: Quantity) -> float | None:
        """Share of ``total``; None if either has unknown summands, or if the total is zero."""
        return None if self.unknown or total.unknown or not total.known else self.known / total.known

    def text(self, kind: str) -> str:
        """``33.6 M`` (``flops``), ``1.50 MiB`` (``bytes``), ``12.3 µs`` (``time_us``); ``≥ …`` if some summands are
        unknown, ``unknown`` if no known one is above zero."""
        if self.unknown and not self.known:
            return "unknown"
        step, *units = _UNITS[kind]
        value, power = self.known, 0
        while value >= step * 0.9995 and power < len(units) - 1:
            value, power = value / step, power + 1
        first = 1 if kind == "time_us" else 0  # digits behind the point in the first unit
        digits = 0 if value >= 100 else first if not power else 1 if value >= 10 else 2
        return ("≥ " if self.unknown else "") + f"{value:.{digits}f} {units[power]}".rstrip()


_UNITS: dict[str, Any] = {
    "flops": (1000, "", "k", "M", "G", "T", "P"),
    "bytes": (1024, "B", "KiB", "MiB", "GiB", "TiB"),
    "time_us": (1000, "µs", "ms", "s"),
}
"""Factor from each unit to the next, then the units."""


def bytes_text(nbytes: float) -> str:
    """``1.50 MiB``."""
    return Quantity(nbytes).text("bytes")


@dataclass(frozen=True, slots=True)
class CostRow:
    """Cost of one region, or of all nodes outside. It counts operators before fusion, so bytes and time are upper
    bounds.

    Args:
        region: index of the region; None for all nodes outside
        operators: number of operators that launch
        flops: floating-point operations
        bytes: bytes read and written
        time_us: modelled device time, µs
    """

    region: int | None
    operators: int
    flops: Quantity
    bytes: Quantity
    time_us: Quantity


def cost_rows(report: GraphReport) -> list[CostRow]:
    """One row per region, by index, then one for nodes outside, if some of these launch; empty without a graph."""
    graph, model = report.graph, report.model
    if graph is None or model is None:
        return []
    inside, hints = membership(report), graph.hints
    nodes: dict[int | None, list[KernelNode]] = defaultdict(list)
    for node in graph.nodes:
        if node.meta.get(REASON) != NO_LAUNCH:
            nodes[inside.get(node.name)].append(node)
    return [
        CostRow(
            region,
            len(held),
            Quantity.of(evaluate(node.cost.flops, hints) for node in held),
            Quantity.of(_moved(node, hints) for node in held),
            Quantity.of(node_time_us(node, model, hints) for node in held),
        )
        for region, held in sorted(nodes.items(), key=lambda item: (item[0] is None, item[0] or 0))
    ]


def _moved(node: KernelNode, hints: dict[str, int]) -> float | None:
    read, written = evaluate(node.cost.read, hints), evaluate(node.cost.written, hints)
    return None if read is None or written is None else read + written


# -- several graphs and operators --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts over several graphs.

    Args:
        graphs: number of graphs
        programs: number of graphs with an emitted program
        launches: kernels and operators that these programs launch
        selected_launches: launches in selected regions
        replayed_launches: launches in regions that are replayed
        regions: number of regions
        replays: number of region calls answered by a replay
        captures: number of captures
        held_bytes: bytes of the device that live captures take, by the driver's estimate
        spent_us: host time that captures took, µs, in regions with a ledger
        saved_us: host time that replays saved there, compared with uncaptured calls, µs
        uncaptured: number of operators that are not captured
        breaks: number of source lines with a graph break
        errors: number of graphs left to plain Inductor
        coverage: fraction of launches in selected regions, 0 to 1; 1.0 if nothing is launched. A graph break counts as
            one launch outside, since launches between graphs are unknown. None without a program, or if plain Inductor
            compiles a graph
    """

    graphs: int
    programs: int
    launches: int
    selected_launches: int
    replayed_launches: int
    regions: int
    replays: int
    captures: int
    held_bytes: int
    spent_us: float
    saved_us: float
    uncaptured: int
    breaks: int
    errors: int
    coverage: float | None


def summarize(reports: Iterable[GraphReport]) -> Summary:
    """Add up ``reports``."""
    chosen = list(reports)
    records = [region.record for report in chosen for region in report.regions if region.record is not None]
    for record in records:
        record.settle()
    ledgers = [record.ledger for record in records if record.ledger is not None]
    programs = sum(report.emitted is not None for report in chosen)
    errors = sum(report.error is not None for report in chosen)
    launches, selected = sum(r.launches for r in chosen), sum(r.selected_launches for r in chosen)
    breaks = sum(len(report.origin.breaks) for report in chosen)
    return Summary(
        graphs=len(chosen),
        programs=programs,
        launches=launches,
        selected_launches=selected,
        replayed_launches=sum(report.replayed_launches for report in chosen),
        regions=sum(len(report.regions) for report in chosen),
        replays=sum(record.replays for record in records),
        captures=sum(record.captures for record in records),
        held_bytes=sum(record.held_bytes for record in records),
        spent_us=sum(ledger.spent_us for ledger in ledgers),
        saved_us=sum(ledger.saved_us for ledger in ledgers),
        uncaptured=sum(1 for report in chosen for _ in report.uncaptured()),
        breaks=breaks,
        errors=errors,
        coverage=None if errors or not programs else selected / (launches + breaks) if launches + breaks else 1.0,
    )


def advice(rows: Iterable[Uncaptured]) -> Iterator[tuple[str, str]]:
    """Each built-in reason in ``rows``, with its explanation and advice."""
    for code in dict.fromkeys(row.reason for row in rows if row.reason in REASONS):
        texts = (REASONS[code].explanation, REASONS[code].advice.removeprefix("none").removeprefix(": "))
        yield code, " ".join(f"{text[0].upper()}{text[1:]}." for text in texts if text)


def folded(rows: Iterable[Uncaptured]) -> Iterator[Uncaptured]:
    """``rows`` in order, with equal ones folded into the first: ``op`` then has their number, ``detail`` omits names of
    values that differ, and ``module`` has a star for parts that differ (``layers.*.attn``)."""
    groups: dict[Uncaptured, list[Uncaptured]] = defaultdict(list)
    for row in rows:
        op, detail = row.op.removesuffix(".default"), _VALUE.sub("%…", row.detail)
        groups[dataclasses.replace(row, node="", op=op, detail=detail, module="")].append(row)
    for same, group in groups.items():
        op = f"{same.op} ×{len(group)}" if len(group) > 1 else same.op
        detail = group[0].detail if len({row.detail for row in group}) == 1 else same.detail
        yield dataclasses.replace(group[0], op=op, detail=detail, module=_modules(row.module for row in group))


def _modules(paths: Iterable[str]) -> str:
    """The common pattern of ``paths``, with a star for each part that differs, up to the shortest path's length."""
    columns = [set(column) for column in zip(*(path.split(".") for path in paths), strict=False)]
    return ".".join(column.pop() if len(column) == 1 else "*" for column in columns)


# -- words -------------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """``text`` on one line and without control characters, so that it cannot steer a terminal or break a table."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "�" for char in text).strip()


def percent(share: float | None) -> str:
    """``85.7 %``; ``unknown`` for None. Only 1 is shown as 100 %, only 0 as 0 %."""
    if share is None:
        return "unknown"
    shown = min(max(share * 100, 0.1), 99.9) if 0 < share < 1 else share * 100
    return f"{shown:.0f} %" if shown in (0, 100) else f"{shown:.1f} %"


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 region``, ``2 regions``."""
    return f"{count} {one if count == 1 else many or one + 's'}"


# -- JSON --------------------------------------------------------------------------------------------------------------


def to_json(reports: Iterable[GraphReport], ranks: Sequence[Any] | None = None) -> dict[str, Any]:
    """The report on all ``reports``, and on ``ranks`` from ``compared``, as plain JSON values.

    The module's docstring lists the keys. Raises TypeError if a graph has an operand without text.
    """
    chosen = list(reports)
    head = {"schema": SCHEMA_VERSION, "pygraph": __version__, "summary": _plain(summarize(chosen))}
    return {**head, "graphs": [_graph(report) for report in chosen], "ranks": ranks}


def json_text(reports: Iterable[GraphReport], ranks: Sequence[Any] | None = None) -> str:
    """``to_json`` as text, indented, ending in a newline."""
    return json.dumps(to_json(reports, ranks), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


_SAME = ("index", "name", "kind", "device", "error", "notes", "pipeline", "passes", "times_ms")
_COVERAGE = ("launches", "selected_launches", "replayed_launches")


def _graph(report: GraphReport) -> dict[str, Any]:
    graph, origin, emitted = report.graph, report.origin, report.emitted
    counts = {name: getattr(report, name) for name in _COVERAGE}
    return {
        **{name: _plain(getattr(report, name)) for name in _SAME},
        "function": origin.function or None,
        "loc": None if origin.start is None else str(origin.start),
        "graph_breaks": [{"loc": str(at), "code": at.code, "reason": why} for at, why in origin.breaks.items()],
        "coverage": emitted and {**counts, "outside": list(emitted.outside), "share": report.coverage},
        "operators": None if graph is None else len(graph),
        "pgir": None if graph is None else str(graph),
        "regions": [_region(report, region) for region in report.regions],
        "uncaptured": _plain(list(report.uncaptured())),
        "cost_model": None if report.model is None else report.model.label,
        "cost": _plain(cost_rows(report)),
    }


def _region(report: GraphReport, region: RegionReport) -> dict[str, Any]:
    if region.record is not None:
        region.record.settle()
    plain = _plain(region)
    if region.record is not None:
        plain["record"]["held_bytes"] = region.record.held_bytes
    head = {"index": region.index, "state": region.state, "selected": plain.pop("wrapped")}
    del plain["reason"]
    return {**head, "why": list(why(report, region)), **plain}


def _plain(value: Any) -> Any:
    """``value`` as plain JSON values: dataclasses become objects with their fields, in order."""
    return json.loads(json.dumps(value, default=_fields))


def _fields(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name[0] != "_"}
    return value.value if isinstance(value, Enum) else str(value)
