"""The report of one compiled graph, or of a callable that is captured as it runs, and the reports of this process.

The backend fills a report in; renderers read it. A region's runtime record is live: the report shows its state at the
time of reading.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from pygraph.errors import first_line
from pygraph.frontend.location import UNKNOWN, GraphOrigin, note_breaks

if TYPE_CHECKING:
    from pygraph.inductor.emitted import EmittedProgram, ProgramRecord
    from pygraph.ir import DeviceModel, Graph
    from pygraph.passes.manager import PassRecord
    from pygraph.runtime.region import RegionRecord

_log = logging.getLogger("pygraph")

_latest: deque[GraphReport] = deque(maxlen=256)
"""Reports that are kept even after their programs are gone."""
_live: WeakValueDictionary[int, GraphReport] = WeakValueDictionary()
"""All reports, by index. A live program holds its own report, so endless recompilation does not accumulate reports."""
_numbers = itertools.count()

CALLABLE = "callable"
"""Kind of the report of a callable that is captured as it runs."""


@dataclass(frozen=True, slots=True)
class Uncaptured:
    """An operator that is not captured.

    Args:
        node: name of the node in the IR
        op: operator with overload
        reason: reason code
        detail: reason in words
        loc: the user's file and line; None if unknown
        code: text of that line
        module: path of the user's module that contains the line
    """

    node: str
    op: str
    reason: str
    detail: str
    loc: str | None
    code: str
    module: str = ""


@dataclass(slots=True, repr=False)
class RegionReport:
    """One region of the emitted program.

    Args:
        index: position among the regions of the program
        planned: IR regions whose operators the region holds
        nodes: names of these operators in the IR
        kernels: kernels and operators that the region launches
        wrapped: true if the region is selected
        reason: why the region is not selected; empty if it is
        record: live record of captures and replays; None if the region is not selected
        module: path of the innermost user module that contains the region; empty for the whole model
    """

    index: int
    planned: tuple[int, ...]
    nodes: tuple[str, ...]
    kernels: tuple[str, ...]
    wrapped: bool
    reason: str
    record: RegionRecord | None = None
    module: str = ""

    def __repr__(self) -> str:
        name = f"{self.index} {self.module}".rstrip()
        why = f"; {first_line(self.why)}" if self.why else ""
        return f"<RegionReport {name}: {self.state}; launches: {len(self.kernels)}, operators: {len(self.nodes)}{why}>"

    @property
    def state(self) -> str:
        """``cold``, ``warm``, ``replay`` or ``uncaptured``."""
        return "uncaptured" if self.record is None else self.record.state.value

    @property
    def why(self) -> str:
        """Reason for the state, in words."""
        return (self.record.reason if self.record is not None else None) or self.reason


@dataclass(repr=False)
class GraphReport:
    """Report of a compiled graph, or (kind ``callable``) of a callable of ``pygraph.graph``, which has only regions.

    Args:
        index: number of the graph in this process
        kind: ``forward``, ``backward``, ``inference`` or ``callable``
        device: kind of device whose work is captured
        graph: IR after the passes; None if it was not lifted
        model: device model with which the passes estimated times
        pipeline: pipeline text of the passes
        passes: passes that ran, in order
        record: steps of the program in and outside of regions, as scheduled by Inductor
        emitted: emitted program, compared with the decision
        source: source code of Inductor's program
        regions: regions in program order
        times_ms: time of each phase, ms: copy, lift, passes, write_back, inductor; or restore, from AOTAutograd's cache
        notes: differences between program and decision, or refusals of a callable, in sentences
        error: why PyGraph left the graph to plain Inductor; None if it did not
        origin: function of the graph, and, except for a backward graph, its graph breaks
        unread: reads the rest of a restored program; None once that is done
    """

    index: int
    kind: str
    device: str
    graph: Graph | None = None
    model: DeviceModel | None = None
    pipeline: str = ""
    passes: tuple[PassRecord, ...] = ()
    record: ProgramRecord | None = None
    emitted: EmittedProgram | None = None
    source: str = ""
    regions: list[RegionReport] = field(default_factory=list)
    times_ms: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    origin: GraphOrigin = UNKNOWN
    unread: Callable[[GraphReport], None] | None = None

    def __repr__(self) -> str:
        start, breaks = self.origin.start, len(self.origin.breaks)
        facts = [self.origin.function + (f" at {start}" if start is not None else ""), self.device]
        if self.error is not None:
            facts.append(f"given up: {first_line(self.error)}")
        elif self.kind == CALLABLE:
            facts.append(f"replays: {sum(one.record.replays for one in self.regions if one.record is not None)}")
        else:
            facts.append(
                f"selected {self.selected_launches} of {self.launches} launches, replayed {self.replayed_launches}"
            )
            facts.append(f"operators not captured: {sum(1 for _ in self.uncaptured())}")
        facts.append(f"graph breaks: {breaks}" if breaks else "")
        return f"<GraphReport {self.name}: {'; '.join(filter(None, facts))}>"

    def _repr_html_(self) -> str:
        """HTML page of this graph, for notebooks."""
        from pygraph.report.html import framed

        return framed([self])

    def complete(self) -> GraphReport:
        """Read the rest of a restored program, and return this report."""
        if self.unread is not None:
            self.unread(self)
            self.unread = None
        return self

    @property
    def name(self) -> str:
        """Name of the graph, unique in this process, such as ``graph0_forward``."""
        return f"graph{self.index}_{self.kind}"

    def give_up(self, error: Exception) -> None:
        """Record and log that plain Inductor compiles the graph because of ``error``; clear the program's facts."""
        self.error = f"{type(error).__name__}: {error}"
        self.record, self.emitted, self.source, self.regions = None, None, "", []
        _log.warning("PyGraph left %s to plain Inductor: %s", self.name, self.error)
        _log.debug("where it failed", exc_info=error)

    def uncaptured(self) -> Iterator[Uncaptured]:
        """Operators that are not captured, in program order: those outside of all regions, and those that regions call
        between segments. Operators that launch nothing, such as views, are left out."""
        from pygraph.ir import DETAIL, EAGER, REASON, REGION
        from pygraph.passes.partitioning import NO_LAUNCH

        for node in self.graph.nodes if self.graph is not None else ():
            reason = node.meta.get(REASON) or "not-partitioned"
            if reason != NO_LAUNCH and (REGION not in node.meta or node.meta.get(EAGER)):
                loc, code = (str(node.loc), node.loc.code) if node.loc else (None, "")
                yield Uncaptured(node.name, node.op, reason, node.meta.get(DETAIL) or "", loc, code, node.module)

    @property
    def launches(self) -> int:
        """Number of kernels and operators that the emitted program launches."""
        return len(self.emitted.outside) + sum(len(r.kernels) for r in self.regions) if self.emitted else 0

    @property
    def selected_launches(self) -> int:
        """Number of launches in selected regions."""
        return sum(len(region.kernels) for region in self.regions if region.wrapped)

    @property
    def replayed_launches(self) -> int:
        """Number of launches in regions that are replayed."""
        return sum(len(region.kernels) for region in self.regions if region.state == "replay")

    @property
    def coverage(self) -> float:
        """Fraction of launches in selected regions: 1.0 if the program launches nothing, 0.0 for plain Inductor."""
        return 0.0 if self.error is not None else self.selected_launches / self.launches if self.launches else 1.0


def open_report(kind: str, origin: GraphOrigin = UNKNOWN) -> GraphReport:
    """A new report for a graph that is about to be compiled. Graph breaks are not repeated for the backward graph."""
    if kind == "backward":
        origin = GraphOrigin(origin.function, origin.start)
    report = GraphReport(index=next(_numbers), kind=kind, device="", origin=origin)
    _latest.append(report)
    _live[report.index] = report
    return report


def reports() -> list[GraphReport]:
    """Reports of the last 256 graphs and of all live programs, oldest first."""
    note_breaks()
    known = [report for report in (each() for each in _live.valuerefs()) if report is not None]
    return [report.complete() for report in sorted(known, key=lambda report: report.index)]


def clear() -> None:
    """Forget every report."""
    _live.clear()
    _latest.clear()
