"""Ratios of a benchmark: which way round, when there are none, and a file that is valid whenever it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cuda.processes import Outcome, Side
from benchmarks.cuda.results import Results, difference, ratios

SIDES = [Side("mlp", mode) for mode in ("default", "reduce-overhead", "pygraph")]


def row(wall: float, **more: float) -> dict[str, Any]:
    return {"wall_us": wall, "host_us": wall / 2, "peak_mb": 10.0, "reserved_mb": 20.0, "device_mb": 30.0, **more}


def made(tolerance: float = 1e-2) -> Results:
    return Results({"gpu": "none"}, SIDES, {"mlp": tolerance})


def add(results: Results, folder: Path, values: dict[str, tuple[float, torch.Tensor]]) -> None:
    for side in SIDES:
        if side.mode in values:
            wall, computed = values[side.mode]
            path = folder / f"{side.mode}.pt"
            torch.save(computed, path)
            results.add(side, Outcome(row(wall)), path)


def test_a_ratio_above_one_says_that_pygraph_takes_less(tmp_path: Path) -> None:
    results, same = made(), torch.ones(3)
    add(results, tmp_path, {"default": (300.0, same), "reduce-overhead": (80.0, same), "pygraph": (100.0, same)})
    found = results.ratios("mlp")
    assert found["wall_us default"] == 3.0
    assert found["wall_us reduce-overhead"] == 0.8
    assert found["device_mb default"] == 1.0
    assert results.as_json()["left_out"] == {}


@pytest.mark.parametrize(
    ("wrong", "left"), [("pygraph", set()), ("reduce-overhead", {"default"}), ("default", {"default"})]
)
def test_no_ratio_against_a_side_with_other_results(tmp_path: Path, wrong: str, left: set[str]) -> None:
    """Results are held against the first side's: if that one is wrong, all others are told apart from it."""
    results = made()
    values = {side.mode: (100.0, torch.full((3,), 1.5 if side.mode == wrong else 1.0)) for side in SIDES}
    add(results, tmp_path, values)
    expected = {"reduce-overhead", "pygraph"} if wrong == "default" else {wrong}
    assert set(results.as_json()["workloads"]["mlp"]["errors"]) == expected
    others = {key.split()[1] for key in results.ratios("mlp")}
    assert others == (set() if wrong == "default" else left)


def test_a_side_that_fails_has_its_error_and_no_ratio(tmp_path: Path) -> None:
    results, same = made(), torch.ones(3)
    results.add(SIDES[0], Outcome(None, "out of memory"), tmp_path / "none.pt")
    add(results, tmp_path, {"reduce-overhead": (80.0, same), "pygraph": (100.0, same)})
    assert results.headline("mlp")["errors"] == {"default": "out of memory"}
    assert {key.split()[1] for key in results.ratios("mlp")} == {"reduce-overhead"}


def test_what_there_was_no_time_for_is_named(tmp_path: Path) -> None:
    results = made()
    add(results, tmp_path, {"default": (300.0, torch.ones(3))})
    results.add(SIDES[1], Outcome(None, "it was not done in time", late=True), tmp_path / "none.pt")
    found = results.as_json()
    assert set(found["left_out"]) == {"mlp reduce-overhead", "mlp pygraph"}
    assert found["workloads"]["mlp"]["ratios"] == {}
    assert found["workloads"]["mlp"]["errors"] == {}


def test_compile_time_counts_only_where_it_was_measured(tmp_path: Path) -> None:
    for timed in (False, True):
        results, same = made(), torch.ones(3)
        for side in SIDES:
            results.compiled(side, Outcome({"compile_s": 4.0 if side.mode == "pygraph" else 2.0}), timed=timed)
        assert results.as_json()["left_out"]
        add(results, tmp_path, {side.mode: (100.0, same) for side in SIDES})
        assert results.ratios("mlp").get("compile_s default") == (0.5 if timed else None)


def test_the_file_is_valid_from_the_beginning(tmp_path: Path) -> None:
    results, path = made(), tmp_path / "out.json"
    results.write(path)
    assert len(json.loads(path.read_text())["left_out"]) == len(SIDES)
    add(results, tmp_path, {"default": (1.0, torch.ones(2)), "pygraph": (1.0, torch.ones(3))})
    results.write(path)
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read["workloads"]["mlp"]["sides"]["pygraph"]["difference"] == "infinite"
    assert list(tmp_path.glob("*.part")) == []


def test_differences_are_relative_to_the_largest_magnitude() -> None:
    reference = torch.tensor([1.0, -4.0, float("nan")])
    assert difference(reference, torch.tensor([1.0, -4.0, float("nan")])) == 0.0
    assert difference(reference, torch.tensor([1.2, -4.0, float("nan")])) == pytest.approx(0.05)
    assert difference(reference, torch.tensor([1.0, -4.0, 0.0])) == float("inf")
    assert difference(reference, torch.ones(2)) == float("inf")
    assert difference(torch.zeros(0), torch.zeros(0)) == 0.0


def test_a_figure_that_is_missing_or_zero_gives_no_ratio() -> None:
    sides = {"default": row(2.0), "pygraph": {**row(1.0), "peak_mb": 0.0}}
    found = ratios(sides, [])
    assert "peak_mb default" not in found
    assert "compile_s default" not in found
    assert ratios({"default": row(1.0)}, []) == {}
