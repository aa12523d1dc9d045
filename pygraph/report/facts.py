"""What the renderers share: whose region a node is in, cost by region, and numbers and texts as people read them.

Computed from a ``GraphReport`` alone; nothing here knows an output format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pygraph.ir import DETAIL, H200, HOST, REGION, DeviceModel, Graph, KernelNode
from pygraph.ir.cost import evaluate
from pygraph.passes.analysis import node_time_us
from pygraph.passes.legality.reasons import REASONS
from pygraph.passes.partitioning import NO_LAUNCH
from pygraph.report.model import GraphReport, RegionReport, Uncaptured
from pygraph.runtime.measure import REPLAY, UNCAPTURED, Decision

__all__ = [
    "CostRow",
    "Quantity",
    "Repeated",
    "Summary",
    "advice",
    "break_text",
    "bytes_text",
    "clean",
    "cost_rows",
    "count_text",
    "decision_text",
    "device_model",
    "folded",
    "measured_text",
    "membership",
    "percent",
    "plural",
    "start_text",
    "state_text",
    "summarize",
    "unselected",
    "us_text",
    "why",
]

_VALUE = re.compile(r'%("(?:[^"\\]|\\.)*"|[\w.]*\w)')


# -- regions -----------------------------------------------------------------------------------------------------------


def membership(report: GraphReport) -> dict[str, int]:
    """The region of each node that is in one: of the emitted program, or as planned where no program was emitted.

    A node that several emitted regions compute belongs to the first of them, and so does one that Inductor folded
    away, to the first of those that hold the rest of its planned region.
    """
    decided = planned(report.graph) if report.graph is not None else {}
    if not report.regions:
        return decided
    emitted = {name: region.index for region in reversed(report.regions) for name in region.nodes}
    home = {index: region.index for region in reversed(report.regions) for index in region.planned}
    return {**{name: home[index] for name, index in decided.items() if index in home}, **emitted}


def planned(graph: Graph) -> dict[str, int]:
    """The region of each node as partitioning decided."""
    found = ((node.name, node.meta.get(REGION)) for node in graph.nodes)
    return {name: region for name, region in found if region is not None}


def decision_text(region: RegionReport) -> str:
    """What was decided on ``region``: ``selected`` or ``not selected``; ``why`` says why."""
    return "selected" if region.wrapped else "not selected"


def state_text(region: RegionReport) -> str:
    """The state of ``region`` in the words of the report."""
    return "replayed" if region.state == "replay" else region.state


def start_text(report: GraphReport) -> str:
    """``forward at model.py:12``: the function and the first line of a graph, as far as they are known."""
    start = report.origin.start
    return report.origin.function + ("" if start is None else f" at {start}")


def break_text(report: GraphReport) -> str:
    """Where Dynamo broke the graph off and why; nothing where the function ends with the graph."""
    line = report.origin.graph_break
    return "" if line is None else f"{line}: {report.origin.reason}" + (f": {line.code}" if line.code else "")


def unselected(report: GraphReport, region: RegionReport) -> bool:
    """Whether selection left ``region`` off, because a graph would not pay."""
    return bool(region.planned) and report.decision is not None and report.decision.selected.isdisjoint(region.planned)


def why(report: GraphReport, region: RegionReport) -> Iterator[str]:
    """What is to be said of ``region``: why it is in its state, what was measured, notes, refusals of variants."""
    if region.why:
        yield region.why
    if unselected(report, region):
        yield from _selection_details(report, region)
    record = region.record
    if record is None:
        return
    if record.decisions:
        yield measured_text(record.decisions)
    for name, runs in sorted(record.python_runs.items()):
        yield f"{name} is written in Python: its body ran {plural(runs, 'time')} to be captured and compared"
    yield from record.notes
    yield from (str(refusal) for refusal in record.refusals.values() if refusal.reason not in region.why)


def measured_text(decisions: Sequence[Decision]) -> str:
    """What measured selection decided on a region, in one line; of several variants, how many and the latest."""
    last = decisions[-1]
    times = ((REPLAY, last.replay_us), (UNCAPTURED, last.uncaptured_us))
    medians = ", ".join(f"{name} {us:.1f}" for name, us in times if us is not None)
    counts = {choice: sum(each.choice == choice for each in decisions) for choice in (REPLAY, UNCAPTURED)}
    several = ", ".join(f"{count} {choice}" for choice, count in counts.items() if count)
    choice = last.choice if len(decisions) == 1 else f"{several}; last {last.choice}"
    why = ", its calls were never undisturbed for long enough" if last.disturbed else ""
    figures = f"; µs per call of the program: {medians}" if medians else ""
    source = f"read from {last.path}" if last.path else f"{last.calls} calls"
    return f"measured: {choice}{why}{figures} ({source})"


def _selection_details(report: GraphReport, region: RegionReport) -> Iterator[str]:
    regions = report.graph.regions if report.graph is not None else {}
    found = (regions[index].meta.get(DETAIL) for index in region.planned if index in regions)
    yield from (detail for detail in found if detail)


# -- cost --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quantity:
    """A sum: what is known of it, and the number of summands that nobody knows."""

    known: float = 0.0
    unknown: int = 0

    @property
    def value(self) -> float | None:
        """The sum, or None when a summand is unknown."""
        return None if self.unknown else self.known

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(self.known + other.known, self.unknown + other.unknown)

    def share_of(self, total: Quantity) -> float | None:
        """The share of ``total``, or None when either is unknown or the total is zero."""
        if self.unknown or total.unknown or not total.known:
            return None
        return self.known / total.known


def _quantity(value: float | None) -> Quantity:
    return Quantity(0.0, 1) if value is None else Quantity(value)


@dataclass(frozen=True, slots=True)
class CostRow:
    """Cost of one region, or of what is outside (``region`` is None): operations, bytes moved, modelled µs.

    The costs are those of the operators before fusion, so bytes and time are upper bounds of what runs.
    """

    region: int | None
    nodes: int
    flops: Quantity
    nbytes: Quantity
    time_us: Quantity

    @property
    def label(self) -> str:
        """``region 3`` or ``outside``."""
        return "outside" if self.region is None else f"region {self.region}"

    def __add__(self, other: CostRow) -> CostRow:
        return CostRow(
            self.region,
            self.nodes + other.nodes,
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.time_us + other.time_us,
        )


def device_model(report: GraphReport) -> DeviceModel:
    """The model that turns cost into time: the one that the passes had, or the built-in one of the device."""
    if report.model is not None:
        return report.model
    return H200 if report.device.startswith("cuda") else HOST


def cost_rows(report: GraphReport) -> list[CostRow]:
    """One row per region, by index, then one for what is outside, if anything there costs; empty without a graph."""
    if report.graph is None:
        return []
    inside, model, hints = membership(report), device_model(report), report.graph.hints
    rows: dict[int | None, CostRow] = {}
    for node in _launching(report, report.graph):
        region = inside.get(node.name)
        row = _node_row(region, node, model, hints)
        rows[region] = rows[region] + row if region in rows else row
    return sorted(rows.values(), key=lambda row: (row.region is None, row.region or 0))


def _launching(report: GraphReport, graph: Graph) -> Iterator[KernelNode]:
    judged = report.decision.nodes if report.decision is not None else {}
    for node in graph.nodes:
        placed = judged.get(node.name)
        if placed is None or placed.reason != NO_LAUNCH:
            yield node


def _node_row(region: int | None, node: KernelNode, model: DeviceModel, hints: dict[str, int]) -> CostRow:
    cost = node.cost
    read, written = evaluate(cost.read, hints), evaluate(cost.written, hints)
    moved = None if read is None or written is None else read + written
    time = node_time_us(node, model, hints)
    return CostRow(region, 1, _quantity(evaluate(cost.flops, hints)), _quantity(moved), _quantity(time))


# -- several graphs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts over several graphs: ``programs`` that were emitted, their ``launches``, ``breaks`` of Dynamo's that ended
    a graph, ``errors`` of graphs given up to plain Inductor."""

    graphs: int
    programs: int
    launches: int
    selected_launches: int
    replayed_launches: int
    regions: int
    replays: int
    captures: int
    uncaptured: int
    breaks: int
    errors: int

    @property
    def coverage(self) -> float | None:
        """Share of launches in selected regions; 1.0 when nothing is launched. None when it is unknown: without a
        program, and where a graph was given up to plain Inductor, whose launches nobody counts."""
        if self.errors or not self.programs:
            return None
        return self.selected_launches / self.launches if self.launches else 1.0


def summarize(reports: Iterable[GraphReport]) -> Summary:
    """Add up ``reports``."""
    chosen = list(reports)
    records = [region.record for report in chosen for region in report.regions if region.record is not None]
    return Summary(
        graphs=len(chosen),
        programs=sum(1 for report in chosen if report.emitted is not None),
        launches=sum(report.launches for report in chosen),
        selected_launches=sum(report.selected_launches for report in chosen),
        replayed_launches=sum(report.replayed_launches for report in chosen),
        regions=sum(len(report.regions) for report in chosen),
        replays=sum(record.replays for record in records),
        captures=sum(record.captures for record in records),
        uncaptured=sum(1 for report in chosen for _ in report.uncaptured()),
        breaks=sum(1 for report in chosen if report.origin.graph_break is not None),
        errors=sum(1 for report in chosen if report.error is not None),
    )


def advice(rows: Iterable[Uncaptured]) -> dict[str, str]:
    """What each reason in ``rows`` means and what can be done about it, by code, in order; those of custom passes are
    not known."""
    codes = dict.fromkeys(row.reason for row in rows)
    known = (REASONS[code] for code in codes if code in REASONS)
    return {each.code: _sentences(each.explanation, each.advice) for each in known}


def _sentences(*texts: str) -> str:
    """``texts`` one after the other, each beginning with a capital; "none" says nothing."""
    said = (text.removeprefix("none").removeprefix(": ") for text in texts)
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in said if text)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Operators outside that say the same of themselves (operator, reason, detail, line), folded into one row.

    ``detail`` leaves out the names of values in which they differ.
    """

    first: Uncaptured
    count: int
    detail: str

    @property
    def op(self) -> str:
        """The operator, with how often it occurs if more than once."""
        name = self.first.op.removesuffix(".default")
        return name if self.count == 1 else f"{name} ×{self.count}"


def folded(rows: Iterable[Uncaptured]) -> list[Repeated]:
    """``rows`` with repetitions folded, in order of first occurrence."""
    groups: dict[tuple[object, ...], list[Uncaptured]] = {}
    for row in rows:
        groups.setdefault((row.op, row.reason, _nameless(row.detail), row.loc, row.code), []).append(row)
    return [_repeated(group) for group in groups.values()]


def _nameless(detail: str) -> str:
    return _VALUE.sub("%…", detail)


def _repeated(group: list[Uncaptured]) -> Repeated:
    details = {row.detail for row in group}
    return Repeated(group[0], len(group), group[0].detail if len(details) == 1 else _nameless(group[0].detail))


# -- numbers and texts -------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """``text`` on one line and without control characters, so that it cannot steer a terminal or break a table."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "�" for char in text).strip()


def percent(share: float | None) -> str:
    """``85.7 %``; ``unknown`` for None. Only a whole is 100 %, only nothing is 0 %."""
    if share is None:
        return "unknown"
    shown = min(max(share * 100, 0.1), 99.9) if 0 < share < 1 else share * 100
    return f"{shown:.0f} %" if shown in (0, 100) else f"{shown:.1f} %"


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 region``, ``2 regions``."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def _scaled(value: float, step: float, units: Sequence[str]) -> str:
    power = 0
    while abs(value) >= step * 0.9995 and power < len(units) - 1:
        value /= step
        power += 1
    digits = 0 if power == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {units[power]}".rstrip()


def _with_unknown(quantity: Quantity, text: str) -> str:
    if not quantity.unknown:
        return text
    return f"≥ {text}" if quantity.known else "unknown"


def count_text(quantity: Quantity) -> str:
    """A number of operations: ``33.6 M``; ``≥ …`` when some summands are unknown, ``unknown`` when all are."""
    return _with_unknown(quantity, _scaled(quantity.known, 1000, ("", "k", "M", "G", "T", "P")))


def bytes_text(quantity: Quantity) -> str:
    """A number of bytes: ``1.50 MiB``, as ``count_text``."""
    return _with_unknown(quantity, _scaled(quantity.known, 1024, ("B", "KiB", "MiB", "GiB", "TiB")))


def us_text(quantity: Quantity) -> str:
    """A time given in µs, as ``count_text``."""
    known = quantity.known
    shown = f"{known:.1f} µs" if known < 100 else _scaled(known, 1000, ("µs", "ms", "s"))
    return _with_unknown(quantity, shown if math.isfinite(known) else "unknown")
