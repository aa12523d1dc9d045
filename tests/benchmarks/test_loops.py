"""The benchmark of loops, in its small form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import loops


@pytest.mark.usefixtures("fresh")
def test_a_row_is_measured_and_one_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str, tiny: bool) -> loops.Sides:
        raise RuntimeError("no room")

    monkeypatch.setitem(loops.ROWS, "fails", fails)
    rows = loops.run_all(["fails", "unrolled"], "cpu", True, 2, 60.0, tmp_path / "loops.json")
    assert rows["fails"]["error"] == "RuntimeError: no room"
    ours = rows["unrolled"]["sides"]["loop"]
    assert ours["replays"] > 2
    assert ours["reasons"] == []
    assert rows["unrolled"]["ratio"] == pytest.approx(rows["unrolled"]["sides"]["eager"]["ms"] / ours["ms"])
    assert json.loads((tmp_path / "loops.json").read_text())["rows"] == rows


@pytest.mark.usefixtures("fresh")
def test_results_that_differ_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = torch.zeros(2), torch.ones(2)
    monkeypatch.setitem(loops.ROWS, "wrong", lambda device, tiny: {"loop": lambda: first, "host": lambda: other})
    rows = loops.run_all(["wrong"], "cpu", True, 2, 60.0, None)
    assert rows["wrong"]["error"].startswith("AssertionError: a result is off")
