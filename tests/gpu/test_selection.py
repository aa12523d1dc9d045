"""Measured selection on a GPU decides right where the candidates are far apart, and gives memory back."""

from __future__ import annotations

import pytest

from benchmarks.selection import CALLERS, PROGRAMS, Program, decide

SLOWED = Program(PROGRAMS["device-bound"].size, slowed=2.0, where="device")
"""The device sleeps after each replay, for twice as long as the program itself takes."""


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(
    ("program", "best"), [(PROGRAMS["host-bound"], "replay"), (SLOWED, "uncaptured")], ids=["host-bound", "slowed"]
)
def test_what_is_far_faster_is_picked(program: Program, best: str, caller: str) -> None:
    found = decide(program, caller, "cuda")
    assert found["apart_us"][best] == min(found["apart_us"].values()), f"apart it is another one: {found}"
    assert found["choice"] == best, found
    assert found["calls"] <= 90, found
