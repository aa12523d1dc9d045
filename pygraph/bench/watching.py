"""What PyGraph captured in this process and what its trials decided, for the row of a side; nothing on other sides."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pygraph
from pygraph.report.facts import summarize
from pygraph.report.model import GraphReport, RegionReport
from pygraph.report.trials import trial_json
from pygraph.runtime.counters import RegionRecord

__all__ = ["decided", "settling", "what_was_captured"]


def settling() -> bool:
    """Whether a captured region has not decided yet what becomes of its captures."""
    return any(_on_trial(record) for record in _records())


def _records() -> list[RegionRecord]:
    regions = (region for report in pygraph.reports() for region in report.regions)
    return [region.record for region in regions if region.record is not None]


def _on_trial(record: RegionRecord) -> bool:
    return record.captures > len({trial["capture"] for trial in record.trials})


def decided() -> int:
    """How many trials have ended."""
    return sum(len(record.trials) for record in _records())


def what_was_captured() -> dict[str, Any]:
    """Coverage, what was left out and why, regions with their trials; empty where PyGraph compiled nothing."""
    reports = pygraph.reports()
    if not reports:
        return {}
    summary = summarize(reports)
    outside = Counter(row.reason for report in reports for row in report.uncaptured())
    return {
        "coverage": {
            "share": summary.coverage,
            "launches": summary.launches,
            "captured": summary.captured_launches,
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
    trials = [] if record is None else [_trial(trial_json(trial)) for trial in record.trials]
    return {"name": f"{report.name}.region{region.index}", "state": region.state, "why": region.why, "trials": trials}


def _trial(trial: Any) -> dict[str, Any]:
    kept = ("capture", "decision", "reason", "calls", "lost_us", "budget_us", "samples")
    return {key: trial[key] for key in kept}
