"""The document of a benchmark: medians, ratios within rounds with their intervals, and failures.

The rule: no ratio includes a side that failed, or whose results are not known to equal eager's. The page uses only
this document.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pygraph import __version__
from pygraph.bench.process import Outcome
from pygraph.bench.sides import OURS, REFERENCE
from pygraph.bench.timing import Measured, Program
from pygraph.cache import write_atomically
from pygraph.runtime.identity import kernel_driver

Document = Mapping[str, Any]
SCHEMA = 2
"""Version of the schema, increased when a key is renamed or removed, or its meaning changes."""
LEVEL = 0.95
"""Confidence level of an interval, if there are enough rounds."""

_TIMES = ("wall_us", "host_us")
_MEMORY = ("capturing_peak_bytes", "peak_bytes", "reserved_bytes")
"""Peaks of allocated memory, during calls that capture and during calls that replay; memory reserved by the process."""
_STATUS = {"inapplicable": "does not apply", "late": "left out", "wrong": "wrong"}


def document(about: Document, settings: Document, rows: Document, left_out: Document, skipped: Document) -> Document:
    """The document: ``about`` the machine, settings, a row for each program, and reasons for programs without a row."""
    head = {"schema": SCHEMA, "pygraph": __version__, "machine": about, "settings": settings}
    return {**head, "workloads": rows, "left_out": left_out, "skipped": skipped}


def write(path: Path, found: Document) -> None:
    """Replace the file atomically: a reader never finds a partial file. Raises OSError."""
    write_atomically(path, json.dumps(found, indent=1, allow_nan=False) + "\n")


def row_of(program: Program, found: Measured) -> dict[str, Any]:
    """The measurements of one program."""
    sides = {side: _side(side, outcome, found) for side, outcome in found.sides.items()}
    right = [name for name, row in sides.items() if row["status"] == "ok"]
    ratios = {name: _ratios(name, sides, found) for name in right if name != OURS and OURS in right}
    return {
        "kind": "script",
        "domain": "scripts",
        **program.about,
        "tolerance": program.tolerance,
        "sides": sides,
        "ratios": {name: row for name, row in ratios.items() if row},
        "calls": found.calls,
        "rounds": found.rounds,
        "notes": found.notes,
    }


def _side(side: str, outcome: Outcome, found: Measured) -> dict[str, Any]:
    status = "ok" if outcome.failure is None else _STATUS.get(outcome.failure, "failed")
    row: dict[str, Any] = {"status": status, "error": outcome.error, "difference": outcome.difference}
    if status != "ok":
        return row
    if outcome.difference is None:
        row.update(status="unchecked", error=f"there are no results of {REFERENCE}, or no numbers in them")
    for key in _TIMES:
        samples = [rows[side][key] for rows in found.rounds if side in rows]
        if samples:
            row[key] = {"median": statistics.median(samples), "count": len(samples)}
    facts = (*_MEMORY, "coverage", "regions", "given_up")
    return {**row, **{key: outcome.facts[key] for key in facts if key in outcome.facts}}


def _ratios(side: str, sides: Document, found: Measured) -> dict[str, Any]:
    """Ratios of a side to PyGraph: above 1, PyGraph takes less time or memory."""
    row: dict[str, Any] = {}
    for key in _TIMES:
        ratios = [rows[side][key] / rows[OURS][key] for rows in found.rounds if side in rows and OURS in rows]
        if ratios:
            *interval, sure = median_interval(ratios)
            row[key] = {"ratio": statistics.median(ratios), "interval": interval}
            row[key] |= {"confidence": round(sure, 4), "rounds": len(ratios)}
    for key in _MEMORY:
        above, below = sides[side].get(key), sides[OURS].get(key)
        if above and below:
            row[key] = round(above / below, 4)
    return row


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """A confidence interval for the median of the samples' distribution, whatever that is, and its confidence.

    The k-th smallest and k-th largest sample enclose the median with probability 1 - 2·P(B < k), B binomial with n
    trials of ½. Returns the narrowest interval that reaches ``LEVEL``; with fewer than six samples, the whole range.
    """
    ordered, count = sorted(samples), len(samples)
    chosen, tail = 1, 0.5**count
    confidence = 1 - 2 * tail
    for k in range(2, count // 2 + 1):
        tail += math.comb(count, k - 1) * 0.5**count
        if 1 - 2 * tail < LEVEL:
            break
        chosen, confidence = k, 1 - 2 * tail
    return ordered[chosen - 1], ordered[count - chosen], max(confidence, 0.0)


def machine(device: str) -> dict[str, Any]:
    """Description of this machine: GPU, driver, versions, date."""
    import torch

    found = {
        "device": device,
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    return {**found, "gpu": torch.cuda.get_device_name(), "driver": kernel_driver()} if device == "cuda" else found
