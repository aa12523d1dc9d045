"""What a benchmark found, as JSON that is complete and valid at any moment, and which figures may be shown.

The rule: no ratio against or of a side whose results are not known to be the reference's, or that failed. Everything
that is drawn or printed elsewhere reads this document, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pygraph import __version__
from pygraph.bench.choices import choice_notes, counted
from pygraph.bench.compile_phase import CompileLog
from pygraph.bench.plan import Program
from pygraph.bench.protocol import Phase
from pygraph.bench.sides import OURS, REFERENCE, SIDES
from pygraph.bench.statistics import ratio_within_rounds, spread
from pygraph.bench.timing import Group, SideOutcome, Timed
from pygraph.cache import write_atomically

__all__ = ["SCHEMA", "Results", "combine", "read"]

SCHEMA = 1
"""Raised when a key is renamed or removed, or its meaning changes."""

_TIMES = ("wall_us", "host_us", "gpu_us")
_MEMORY = ("peak_bytes", "reserved_bytes", "device_bytes")
_BINDING = {
    "machine": ("gpu", "device", "cpu", "cores", "torch", "cuda", "driver"),
    "settings": ("tiny", "blocks", "measure"),
}
"""What results have in common that are put together."""
_SKIPPING = ("failed", "inapplicable", "died")
"""Ways to fail when compiled ahead that are not tried again when it is timed."""


class Results:
    """The document, from the beginning: what is not measured yet is listed as left out.

    ``machine`` and ``settings`` say where and how; ``skipped`` are workloads that cannot run here, with the reason.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        log: CompileLog,
        machine: Mapping[str, Any],
        settings: Mapping[str, Any],
        skipped: Mapping[str, str],
    ) -> None:
        self._programs = {program.name: program for program in programs}
        self._log = log
        self._machine, self._settings = dict(machine), dict(settings)
        self._skipped = dict(skipped)
        self._workloads: dict[str, dict[str, Any]] = {}

    def to_time(self, program: Program) -> list[str]:
        """The sides that are worth timing: those that did not fail when they were compiled, or computed."""
        return [side for side in program.sides if self._ahead(program, side) is None]

    def add(self, program: Program, timed: Timed) -> dict[str, Any]:
        """Take in what was found of a program; returns its part of the document."""
        sides = {side: self._side(program, side, timed) for side in program.sides}
        chosen = _chosen(program, timed)
        for side, counts in counted(chosen).items():
            sides[side]["choices"] = counts
        self._workloads[program.name] = {
            "about": program.about,
            "kind": program.kind,
            "domain": program.domain,
            "tolerance": program.tolerance,
            "why_tolerance": program.why_tolerance,
            "results_compared": "apart, with Inductor drawing as eager does" if program.apart else "while timed",
            "sides": sides,
            "ratios": _ratios(timed.groups, sides),
            "groups": [_group(group) for group in timed.groups],
            "notes": [*timed.notes, *choice_notes(chosen)],
        }
        return self._workloads[program.name]

    def as_json(self) -> dict[str, Any]:
        """The document."""
        left_out = [name for name in self._programs if name not in self._workloads]
        return {
            "schema": SCHEMA,
            "pygraph": __version__,
            "machine": self._machine,
            "settings": self._settings,
            "sides": {name: side.about for name, side in SIDES.items()},
            "ablations": {name: side.off for name, side in SIDES.items() if side.off},
            "workloads": self._workloads,
            "left_out": dict.fromkeys(left_out, "the time was up before its turn"),
            "skipped": self._skipped,
        }

    def write(self, path: Path) -> None:
        """Put everything into ``path`` at once: whoever reads it never finds half of it. Raises OSError."""
        write_atomically(path, json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")

    def _ahead(self, program: Program, side: str) -> dict[str, Any] | None:
        """How a side failed before it was to be timed, for good; None if it did not."""
        phases: tuple[Phase, ...] = ("compile", "check")
        for phase in phases:
            row = self._log.row(program.name, side, phase)
            if row is not None and row.get("failure") in _SKIPPING:
                return row
        return None

    def _side(self, program: Program, side: str, timed: Timed) -> dict[str, Any]:
        outcome = timed.sides.get(side)
        ahead = self._ahead(program, side)
        if ahead is not None and outcome is None:
            return {"status": _failed(ahead["failure"]), "error": ahead["error"]}
        if outcome is None:
            return {"status": "left out", "error": "it was not timed"}
        apart = self._difference(program, side, outcome)
        found: dict[str, Any] = {"status": _status(program, outcome, apart), "error": outcome.error}
        found["difference"] = _number(apart)
        if found["status"] == "wrong":
            found["error"] = f"results differ from {REFERENCE}'s by {_shown(apart)} of their largest magnitude"
        if found["status"] == "unchecked":
            found["error"] = self._why_unchecked(program, side)
        compiled = self._log.row(program.name, side, "compile") or {}
        if self._settings.get("compile_time") and "compile_s" in compiled:
            found["compile_s"] = compiled["compile_s"]
        if found["status"] in ("ok", "unchecked"):
            found.update(_figures(side, outcome, timed.groups))
        return found

    def _difference(self, program: Program, side: str, outcome: SideOutcome) -> float | None:
        if not program.apart:
            return outcome.difference
        apart = (self._log.row(program.name, side, "check") or {}).get("difference")
        return math.inf if apart == "infinite" else apart

    def _why_unchecked(self, program: Program, side: str) -> str:
        if not program.apart:
            return f"there are no results of {REFERENCE} to compare with, or no numbers in them"
        for name in (REFERENCE, side):
            row = self._log.row(program.name, name, "check")
            if row is None or row.get("failure"):
                return f"results could not be compared: {name}: {row['error'] if row else 'not computed'}"
        return f"{REFERENCE}'s calls returned no numbers to compare with"


def read(path: Path) -> dict[str, Any]:
    """A document that ``Results.write`` wrote. Raises ValueError where it is none, and OSError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: no results of this version of PyGraph (schema {SCHEMA})")
    return document


def combine(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of several that were measured on one machine with the same settings; later ones win.

    Raises ValueError where they were not.
    """
    first = documents[0]
    combined = {**first, "workloads": {}, "left_out": {}, "skipped": {}}
    for document in documents:
        if document["pygraph"] != first["pygraph"]:
            raise ValueError("these results do not belong together: they differ in the version of PyGraph")
        for key in ("machine", "settings"):
            apart = [name for name in _BINDING[key] if document[key].get(name) != first[key].get(name)]
            if apart:
                raise ValueError(f"these results do not belong together: they differ in {apart[0]}")
        for key in ("workloads", "left_out", "skipped"):
            combined[key].update(document[key])
    for key in ("left_out", "skipped"):
        combined[key] = {name: why for name, why in combined[key].items() if name not in combined["workloads"]}
    return combined


def _chosen(program: Program, timed: Timed) -> dict[str, dict[str, str]]:
    """The configurations of kernels that each compiled side used, as far as it told."""
    facts = {side: timed.sides[side].facts for side in program.sides if side in timed.sides and SIDES[side].caches}
    return {side: known["chosen"] for side, known in facts.items() if "chosen" in known}


def _status(program: Program, outcome: SideOutcome, apart: float | None) -> str:
    if apart is not None and not apart <= program.tolerance:
        return "wrong"
    if outcome.failure is not None:
        return _failed(outcome.failure)
    return "unchecked" if apart is None else "ok"


def _failed(failure: str) -> str:
    return {"inapplicable": "does not apply", "late": "left out"}.get(failure, "failed")


def _figures(side: str, outcome: SideOutcome, groups: Sequence[Group]) -> dict[str, Any]:
    """Medians and memory of a side."""
    found: dict[str, Any] = {}
    for key in _TIMES:
        samples = [rows[side][key] for group in groups for rows in group.rounds if key in rows.get(side, {})]
        if samples:
            found[key] = spread(samples).as_json()
    found.update({key: outcome.facts[key] for key in (*_MEMORY, "coverage", "regions") if key in outcome.facts})
    first = outcome.facts.get("first_calls")
    if first and "wall_us" in found:
        found["first_calls"] = {**first, "over_later": round(first["us"] / found["wall_us"]["median"], 4)}
    return found


def _ratios(groups: Sequence[Group], sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What other sides take over what PyGraph takes: above 1, PyGraph takes less. Only among sides that are right."""
    right = [name for name, row in sides.items() if row["status"] == "ok"]
    if OURS not in right:
        return {}
    found = {}
    for name in right:
        row: dict[str, Any] = {key: _ratio(groups, name, key) for key in _TIMES}
        row.update({key: _over(sides[name].get(key), sides[OURS].get(key)) for key in (*_MEMORY, "compile_s")})
        if name != OURS:
            found[name] = {key: value for key, value in row.items() if value is not None}
    return {name: row for name, row in found.items() if row}


def _ratio(groups: Sequence[Group], side: str, key: str) -> dict[str, Any] | None:
    """Within rounds, of groups that hold both; of medians, with no interval, where no group does."""
    both = [
        rows for group in groups for rows in group.rounds if key in rows.get(side, {}) and key in rows.get(OURS, {})
    ]
    if both:
        return ratio_within_rounds([rows[side][key] for rows in both], [rows[OURS][key] for rows in both]).as_json()
    alone = [
        [rows[name][key] for group in groups for rows in group.rounds if key in rows.get(name, {})]
        for name in (side, OURS)
    ]
    if not all(alone):
        return None
    over = spread(alone[0]).median / spread(alone[1]).median
    return {"ratio": float(f"{over:.6g}"), "interval": None, "confidence": None, "rounds": 0}


def _over(above: float | None, below: float | None) -> float | None:
    return round(above / below, 4) if above is not None and below else None


def _group(group: Group) -> dict[str, Any]:
    rounds = [
        {side: {key: float(f"{value:.6g}") for key, value in row.items()} for side, row in rows.items()}
        for rows in group.rounds
    ]
    return {"sides": list(group.sides), "calls": group.calls, "rounds": rounds}


def _number(value: float | None) -> float | str | None:
    return "infinite" if value is not None and not math.isfinite(value) else value


def _shown(value: float | None) -> str:
    return "an infinite part" if value is None or not math.isfinite(value) else f"{value:.3g}"
