"""The reports of this process, in order of compilation. Bounded, so that recompiling for ever does not grow it."""

from __future__ import annotations

import itertools
import logging
from collections import deque

from pygraph.frontend.location import UNKNOWN, GraphOrigin
from pygraph.report.model import GraphReport

__all__ = ["clear", "dumped", "give_up", "open_report", "reports"]

_log = logging.getLogger("pygraph")

LIMIT = 256
"""Reports kept; the oldest goes first."""

_reports: deque[GraphReport] = deque(maxlen=LIMIT)
_numbers = itertools.count()


def open_report(kind: str, origin: GraphOrigin = UNKNOWN) -> GraphReport:
    """A new report for a graph that is about to be compiled. The break behind it counts for the forward graph alone."""
    if kind == "backward":
        origin = GraphOrigin(origin.function, origin.start)
    report = GraphReport(index=next(_numbers), kind=kind, device="", origin=origin)
    _reports.append(report)
    return report


def reports() -> list[GraphReport]:
    """All reports that are kept, oldest first."""
    return [report.complete() for report in sorted(_reports.copy(), key=lambda report: report.index)]


def dumped() -> list[GraphReport]:
    """Those that are written to a folder."""
    return [report for report in _reports.copy() if report.dumped is not None]


def clear() -> None:
    """Forget every report."""
    _reports.clear()


def give_up(report: GraphReport, error: Exception) -> None:
    """Note in ``report``, and log, that its graph is left to plain Inductor."""
    report.give_up(error)
    _log.warning("PyGraph left %s to plain Inductor: %s", report.name, report.error)
    _log.debug("where it failed", exc_info=error)
