"""What a benchmark found, as JSON that is valid at any moment: each side's row, and ratios where results agree.

A side whose results differ from the first side's gets an error and no ratio, nor does any other against it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda.processes import Outcome, Side

__all__ = ["OURS", "RATIOS", "Results", "difference", "ratios"]

OURS = "pygraph"
RATIOS = ("wall_us", "host_us", "compile_s", "peak_mb", "reserved_mb", "device_mb")


def difference(reference: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference over the largest magnitude of the reference; infinite where sizes or NaNs differ."""
    if reference.shape != other.shape or not bool(torch.equal(reference.isnan(), other.isnan())):
        return float("inf")
    if not reference.numel():
        return 0.0
    scale = float(reference.nan_to_num().abs().max()) or 1.0
    return float((reference.nan_to_num() - other.nan_to_num()).abs().max()) / scale


def ratios(sides: Mapping[str, Mapping[str, Any]], errors: Iterable[str]) -> dict[str, float]:
    """The other sides' figures over PyGraph's: above 1, PyGraph takes less. None against a side with an error."""
    wrong = frozenset(errors)
    ours = sides.get(OURS)
    if ours is None or OURS in wrong:
        return {}
    found = {}
    for mode, row in sides.items():
        for key in RATIOS if mode != OURS and mode not in wrong else ():
            if row.get(key) is not None and ours.get(key):
                found[f"{key} {mode}"] = round(row[key] / ours[key], 3)
    return found


class Results:
    """Rows as they come in. ``tolerances`` bound the difference between the sides of each workload."""

    def __init__(self, machine: Mapping[str, str], sides: Iterable[Side], tolerances: Mapping[str, float]) -> None:
        self._machine = dict(machine)
        self._tolerances = tolerances
        self._left_out = dict.fromkeys(sides, "the time was up before its turn")
        self._compile_errors: dict[str, str] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._references: dict[str, tuple[str, torch.Tensor]] = {}

    def compiled(self, side: Side, outcome: Outcome, *, timed: bool) -> None:
        """Note how compiling ahead went; the time that it took counts only where it was ``timed``."""
        if outcome.row is None:
            self._compile_errors[str(side)] = outcome.error
        elif timed:
            self._row(side)["sides"][side.mode] = dict(outcome.row)

    def add(self, side: Side, outcome: Outcome, result: Path) -> None:
        """Note a timed side; ``result`` is the file with what it computed, if it left one."""
        row = self._row(side)
        if outcome.late:
            self._left_out[side] = outcome.error
            return
        self._left_out.pop(side, None)
        if outcome.row is None:
            row["errors"][side.mode] = outcome.error
            return
        row["sides"][side.mode] = {**row["sides"].get(side.mode, {}), **outcome.row}
        if result.exists():
            self._compare(side, torch.load(result))

    def ratios(self, workload: str) -> dict[str, float]:
        """The ratios of a workload's sides so far; those without a result of the timed phase have none."""
        row = self._rows[workload]
        timed = {mode: figures for mode, figures in row["sides"].items() if "wall_us" in figures}
        return ratios(timed, row["errors"])

    def headline(self, workload: str) -> dict[str, Any]:
        """What is printed of a workload: ratios, errors by mode, and figures of its own; without what is empty."""
        row = self._rows[workload]
        own = {mode: side["figures"] for mode, side in row["sides"].items() if "figures" in side}
        found = {"ratios": self.ratios(workload), "errors": row["errors"], "figures": own}
        return {key: part for key, part in found.items() if part}

    def as_json(self) -> dict[str, Any]:
        """Everything found, with what was left out by name."""
        workloads = {name: {"ratios": self.ratios(name), **row} for name, row in self._rows.items()}
        return {
            "machine": self._machine,
            "workloads": workloads,
            "left_out": {str(side): why for side, why in self._left_out.items()},
            "compile_errors": self._compile_errors,
        }

    def write(self, path: Path) -> None:
        """Put everything into ``path`` at once: whoever reads it never finds half of it."""
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        os.replace(beside, path)

    def _row(self, side: Side) -> dict[str, Any]:
        return self._rows.setdefault(side.workload, {"errors": {}, "sides": {}})

    def _compare(self, side: Side, result: torch.Tensor) -> None:
        name, reference = self._references.setdefault(side.workload, (side.mode, result))
        apart = difference(reference, result)
        row = self._row(side)
        row["sides"][side.mode]["difference"] = apart if apart != float("inf") else "infinite"
        if not apart <= self._tolerances[side.workload]:
            row["errors"][side.mode] = f"results differ from {name}'s by {apart} of their magnitude"
