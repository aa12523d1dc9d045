"""What PyGraph captured in this process and what it measured, for the row of a side; nothing on other sides."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pygraph
from pygraph.report.facts import summarize
from pygraph.report.model import GraphReport, RegionReport
from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.measure import UNCAPTURED

__all__ = ["decided", "settling", "what_was_captured"]


def settling() -> bool:
    """Whether a captured region has not decided yet what becomes of its captures."""
    return any(_measuring(record) for record in _records())


def _records() -> list[RegionRecord]:
    regions = (region for report in pygraph.reports() for region in report.regions)
    return [region.record for region in regions if region.record is not None]


def _measuring(record: RegionRecord) -> bool:
    """Whether there are captures without a decision. One that was read from a file may be against capturing at all."""
    unmade = sum(each.path is not None and each.choice == UNCAPTURED for each in record.decisions)
    return record.captures > len(record.decisions) - unmade


def decided() -> int:
    """How many decisions there are."""
    return sum(len(record.decisions) for record in _records())


def what_was_captured() -> dict[str, Any]:
    """Coverage, what was left out and why, regions with what was measured; empty where PyGraph compiled nothing."""
    reports = pygraph.reports()
    if not reports:
        return {}
    summary = summarize(reports)
    outside = Counter(row.reason for report in reports for row in report.uncaptured())
    return {
        "coverage": {
            "share": summary.coverage,
            "launches": summary.launches,
            "captured": summary.replayed_launches,
            "graphs": summary.graphs,
            "regions": summary.regions,
            "captures": summary.captures,
            "replays": summary.replays,
            "uncaptured_calls": sum(record.uncaptured for record in _records()),
            "errors": [report.error for report in reports if report.error],
            "not_captured": dict(sorted(outside.items())),
        },
        "regions": [_region(report, region) for report in reports for region in report.regions],
    }


def _region(report: GraphReport, region: RegionReport) -> dict[str, Any]:
    record = region.record
    decisions = [] if record is None else [asdict(decision) for decision in record.decisions]
    name = f"{report.name}.region{region.index}"
    return {"name": name, "state": region.state, "why": region.why, "decisions": decisions}
