"""The report as JSON. The typed dictionaries below are its schema: every key is always there, None where unknown.

Units are in the names (``ms``, ``us``, ``bytes``); shares are 0 to 1. Keys are only added within one SCHEMA_VERSION.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypedDict

from pygraph import __version__
from pygraph.frontend.location import GraphOrigin
from pygraph.report.facts import (
    CostRow,
    Quantity,
    Summary,
    cost_rows,
    device_model,
    summarize,
    why,
)
from pygraph.report.model import GraphReport, PassReport, RegionReport, Uncaptured
from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.measure import Decision

__all__ = ["SCHEMA_VERSION", "ReportJson", "json_text", "to_json"]

SCHEMA_VERSION = 4
"""Raised when a key is renamed or removed, or its meaning changes."""


class SummaryJson(TypedDict):
    """Sums over all graphs, as ``pygraph.report.facts.Summary``."""

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
    coverage: float | None


class CoverageJson(TypedDict):
    """Launches of one emitted program: all, selected, replayed, outside; ``share`` of those selected."""

    launches: int
    selected_launches: int
    replayed_launches: int
    outside: list[str]
    share: float


class PassJson(TypedDict):
    """One pass as it ran."""

    text: str
    ms: float
    modified: bool
    notes: list[str]


class RefusalJson(TypedDict):
    """Why a capture was refused, and where."""

    reason: str
    detail: str
    launch: str | None
    loc: str | None


class DecisionJson(TypedDict):
    """What measured selection decided on one variant, as ``pygraph.runtime.measure.Decision``."""

    choice: str
    replay_us: float | None
    uncaptured_us: float | None
    calls: int
    disturbed: bool
    path: str | None


class RecordJson(TypedDict):
    """The live account of one region, as ``pygraph.runtime.counters.RegionRecord``."""

    keys: int
    captures: int
    replays: int
    uncaptured: int
    slots: int
    launches: int
    workspace_bytes: int
    python_runs: dict[str, int]
    decisions: list[DecisionJson]
    notes: list[str]
    refusals: list[RefusalJson]


class RegionJson(TypedDict):
    """One region of the emitted program. ``why`` explains its state."""

    index: int
    state: str
    selected: bool
    why: list[str]
    module: str
    planned: list[int]
    nodes: list[str]
    kernels: list[str]
    record: RecordJson | None


class UncapturedJson(TypedDict):
    """One operator outside of all regions."""

    node: str
    op: str
    reason: str
    detail: str
    loc: str | None
    code: str


class SumJson(TypedDict):
    """A sum of costs: its ``value`` if all is known, what of it is ``known``, and how many summands are ``unknown``."""

    value: float | None
    known: float
    unknown: int


class CostJson(TypedDict):
    """Cost before fusion of one region, or of what is outside (``region`` is None)."""

    region: int | None
    operators: int
    flops: SumJson
    bytes: SumJson
    time_us: SumJson


class BreakJson(TypedDict):
    """The graph break of Dynamo's that ended a graph: the user's line, and the reason that Dynamo gives."""

    loc: str
    code: str
    reason: str


class GraphJson(TypedDict):
    """One compiled graph, of ``function``, from line ``loc`` on.

    ``coverage`` is None when no program was emitted, ``pgir`` when the graph was not lifted.
    """

    index: int
    name: str
    kind: str
    device: str
    function: str | None
    loc: str | None
    graph_break: BreakJson | None
    error: str | None
    coverage: CoverageJson | None
    operators: int | None
    pipeline: str
    passes: list[PassJson]
    times_ms: dict[str, float]
    regions: list[RegionJson]
    uncaptured: list[UncapturedJson]
    cost_model: str
    cost: list[CostJson]
    notes: list[str]
    pgir: str | None


class ReportJson(TypedDict):
    """The whole document. ``pygraph`` is the version that wrote it."""

    schema: int
    pygraph: str
    summary: SummaryJson
    graphs: list[GraphJson]


def to_json(reports: Iterable[GraphReport]) -> dict[str, Any]:
    """The report on all ``reports`` as plain JSON values, of the form of ``ReportJson``.

    Raises TypeError where a graph has an operand without text.
    """
    return dict(_document(reports))


def _document(reports: Iterable[GraphReport]) -> ReportJson:
    chosen = list(reports)
    return ReportJson(
        schema=SCHEMA_VERSION,
        pygraph=__version__,
        summary=_summary(summarize(chosen)),
        graphs=[_graph(report) for report in chosen],
    )


def json_text(reports: Iterable[GraphReport]) -> str:
    """``to_json`` as text, indented, ending in a newline."""
    return json.dumps(to_json(reports), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _summary(summary: Summary) -> SummaryJson:
    return SummaryJson(
        graphs=summary.graphs,
        programs=summary.programs,
        launches=summary.launches,
        selected_launches=summary.selected_launches,
        replayed_launches=summary.replayed_launches,
        regions=summary.regions,
        replays=summary.replays,
        captures=summary.captures,
        uncaptured=summary.uncaptured,
        breaks=summary.breaks,
        errors=summary.errors,
        coverage=summary.coverage,
    )


def _graph(report: GraphReport) -> GraphJson:
    graph, start = report.graph, report.origin.start
    return GraphJson(
        index=report.index,
        name=report.name,
        kind=report.kind,
        device=report.device,
        function=report.origin.function or None,
        loc=None if start is None else str(start),
        graph_break=_break(report.origin),
        error=report.error,
        coverage=_coverage(report),
        operators=None if graph is None else len(graph),
        pipeline=report.pipeline,
        passes=[_pass(item) for item in report.passes],
        times_ms={name: float(ms) for name, ms in report.times_ms.items()},
        regions=[_region(report, region) for region in report.regions],
        uncaptured=[_uncaptured(row) for row in report.uncaptured()],
        cost_model=device_model(report).label,
        cost=[_cost(row) for row in cost_rows(report)],
        notes=list(report.notes),
        pgir=None if graph is None else str(graph),
    )


def _break(origin: GraphOrigin) -> BreakJson | None:
    line = origin.graph_break
    return None if line is None else BreakJson(loc=str(line), code=line.code, reason=origin.reason)


def _coverage(report: GraphReport) -> CoverageJson | None:
    if report.emitted is None:
        return None
    return CoverageJson(
        launches=report.launches,
        selected_launches=report.selected_launches,
        replayed_launches=report.replayed_launches,
        outside=list(report.emitted.outside),
        share=report.coverage,
    )


def _pass(item: PassReport) -> PassJson:
    return PassJson(text=item.text, ms=item.ms, modified=item.modified, notes=list(item.notes))


def _region(report: GraphReport, region: RegionReport) -> RegionJson:
    return RegionJson(
        index=region.index,
        state=region.state,
        selected=region.wrapped,
        why=list(why(report, region)),
        module=region.module,
        planned=list(region.planned),
        nodes=list(region.nodes),
        kernels=list(region.kernels),
        record=None if region.record is None else _record(region.record),
    )


def _record(record: RegionRecord) -> RecordJson:
    refusals = record.refusals.values()
    return RecordJson(
        keys=record.keys,
        captures=record.captures,
        replays=record.replays,
        uncaptured=record.uncaptured,
        slots=record.slots,
        launches=record.launches,
        workspace_bytes=record.workspace_bytes,
        python_runs=dict(sorted(record.python_runs.items())),
        decisions=[_decision(decision) for decision in record.decisions],
        notes=list(record.notes),
        refusals=[RefusalJson(reason=r.reason, detail=r.detail, launch=r.launch, loc=r.loc) for r in refusals],
    )


def _decision(decision: Decision) -> DecisionJson:
    return DecisionJson(
        choice=decision.choice,
        replay_us=decision.replay_us,
        uncaptured_us=decision.uncaptured_us,
        calls=decision.calls,
        disturbed=decision.disturbed,
        path=decision.path,
    )


def _uncaptured(row: Uncaptured) -> UncapturedJson:
    return UncapturedJson(node=row.node, op=row.op, reason=row.reason, detail=row.detail, loc=row.loc, code=row.code)


def _cost(row: CostRow) -> CostJson:
    return CostJson(
        region=row.region,
        operators=row.nodes,
        flops=_sum(row.flops),
        bytes=_sum(row.nbytes),
        time_us=_sum(row.time_us),
    )


def _sum(quantity: Quantity) -> SumJson:
    return SumJson(value=quantity.value, known=quantity.known, unknown=quantity.unknown)
