"""Trials of measured selection on a GPU decide right where the candidates are far apart, and lose what they may.

Candidates that are near each other, and callers with noise, are what ``benchmarks/selection.py`` is for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from benchmarks.scenarios import PROGRAMS, Program
from benchmarks.selection import line, run_scenario
from benchmarks.truth import Subject

DEVICE = "cuda"
CALLERS = ("steady", "waits", "period 2")
TRIALS = 3
"""Of which one may be spoilt by a pause of the machine."""
FAR_APART = 1.2

SLOWED = replace(PROGRAMS["device-bound, slowed"], ratio=3.0)
"""The device sleeps after each replay, for twice as long as the program itself takes."""


def outcome(program: Program, caller: str) -> dict[str, Any]:
    """The truth, and the trials."""
    subject = Subject(program, DEVICE)
    try:
        return run_scenario(subject, caller, TRIALS, math.inf)
    finally:
        subject.close()


def figures(row: dict[str, Any]) -> str:
    """For messages: the truth, and each trial."""
    rows = [line(row)]
    for each in row["trials"]:
        times = ", ".join(f"{name} {us:.1f} µs" for name, us in each["per_call_us"].items())
        lost = f"lost {each['lost_us']:.0f} of {each['budget_us']:.0f} µs in {each['calls']} calls"
        outside = f"from outside, noisily, {each['lost_from_outside_noisy_us']:.0f} µs in {each['timed_calls']}"
        rows.append(f"  {each['decision']} ({each['reason']}: {each['detail']}); {times}; {lost}, {outside}")
    return "\n".join(rows)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(
    ("program", "best", "other"),
    [(PROGRAMS["host-bound"], "patched", "uncaptured"), (SLOWED, "uncaptured", "patched")],
    ids=["host-bound", "slowed"],
)
def test_what_is_far_faster_is_picked_within_the_budget(program: Program, best: str, other: str, caller: str) -> None:
    row = outcome(program, caller)
    told = figures(row)
    assert row["truth"][other]["ratio"] >= FAR_APART, f"the candidates are nearer than they are meant to be:\n{told}"
    right = [each["decision"] for each in row["trials"]].count(best)
    assert right >= TRIALS - 1, f"{best} was picked {right} times of {TRIALS}:\n{told}"
    assert median(each["lost_of_budget"] for each in row["trials"]) <= 1, f"more was lost than may be:\n{told}"
