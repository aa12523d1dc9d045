"""Intervals of medians, and the page and pictures of a document: no ratio of what is wrong is anywhere."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.bench.process import Outcome
from pygraph.bench.render import page
from pygraph.bench.results import document, median_interval, row_of
from pygraph.bench.timing import Measured
from tests.bench.fakes import program

SIDES = ("eager", "default", "reduce-overhead", "pygraph")
WALL = {"eager": 400.0, "default": 200.0, "reduce-overhead": 125.0, "pygraph": 100.0}
times = st.floats(min_value=1e-3, max_value=1e6)


@settings(max_examples=100)
@given(st.lists(times, min_size=1, max_size=40))
def test_a_median_lies_within_its_interval_in_any_order(found: list[float]) -> None:
    low, high, confidence = median_interval(found)
    assert low <= statistics.median(found) <= high
    assert {low, high} <= set(found)
    assert (confidence >= 0.95) == (len(found) >= 6)
    assert median_interval(sorted(found)) == (low, high, confidence)


@pytest.mark.parametrize(
    ("count", "ranks", "confidence"),
    [(1, (1, 1), 0.0), (5, (1, 5), 0.9375), (6, (1, 6), 0.96875), (9, (2, 8), 0.9609375), (20, (6, 15), 0.9586105)],
)
def test_intervals_are_those_of_the_binomial_distribution(
    count: int, ranks: tuple[int, int], confidence: float
) -> None:
    low, high, found = median_interval([float(rank) for rank in range(1, count + 1)])
    assert (low, high) == ranks
    assert found == pytest.approx(confidence, abs=1e-6)


def row(wall: dict[str, float] = WALL, domain: str = "language", **wrong: str) -> dict[str, Any]:
    """A program whose sides take ``wall``; those of ``wrong`` failed that way."""
    sides = {side: Outcome({"reserved_bytes": int(2**28 * wall[side] / 100)}, difference=0.0) for side in SIDES}
    sides["pygraph"].facts.update(
        coverage={"share": 0.75},
        regions=[{"state": "replay", "why": "", "decisions": [{"choice": "replay", "calls": 36}]}],
    )
    for name, failure in wrong.items():
        sides[name.replace("_", "-")] = Outcome(failure=failure, error="Traceback\nRuntimeError: a | b")
    rounds = [{side: {"wall_us": us * d, "host_us": us} for side, us in wall.items()} for d in (0.9, *[1.0] * 5, 1.1)]
    rounds[0]["pygraph"]["wall_us"] = 80.0
    return row_of(program(sides=SIDES, about={"domain": domain}), Measured(sides, 4, rounds, ["a note"]))


def found() -> Any:
    rows = {
        "gains-1": row(),
        "loses-1": row({**WALL, "reduce-overhead": 90.0}),
        "wrong-1": row(domain="vision", pygraph="wrong"),
        "wrong-baseline-1": row(domain="vision", reduce_overhead="wrong"),
        "fails-1": row(domain="vision", default="memory"),
    }
    about = {"gpu": "NVIDIA H200", "cores": 16, "torch": "2.11.0", "cuda": "13.0", "date": "2026-11-21"}
    return document(about, {"blocks": 7, "tiny": False}, rows, {"late-1": "the time was up"}, {"absent-1": "no timm"})


def cells(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"| {name} ")).split(" | ")


def test_the_page_has_a_table_for_each_domain() -> None:
    text = page(found(), more={"Overall": ["| over |"]})
    assert text.startswith("# NVIDIA H200, 2026-11-21\n")
    assert "torch 2.11.0, CUDA 13.0" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        *("## WRONG RESULTS", "## Overall", "## Language", "## Vision", "## Left out, failed, and to be noted")
    ]
    assert cells(text, "gains-1")[:4] == ["| gains-1 (script)", "4.00 ± 0.25", "2.00 ± 0.12", "1.25 ± 0.08"]
    assert "default 512, reduce-overhead 320, pygraph 256" in text
    assert cells(text, "loses-1")[3].startswith("**0.90")
    assert "75%" in cells(text, "gains-1")[-1]
    assert "- absent-1: no timm\n- late-1: the time was up\n" in text
    assert "- default failed (RuntimeError: a | b): fails-1" in text
    assert "- gains-1: a note" in text


def test_wrong_results_are_told_and_have_no_ratio() -> None:
    text = page(found())
    assert "**wrong-1, pygraph**: " in text
    assert cells(text, "wrong-1")[1:4] == ["**WRONG RESULTS**"] * 3
    assert cells(text, "wrong-baseline-1")[2:4] == ["2.00 ± 0.12", "**WRONG RESULTS**"]
    assert cells(text, "fails-1")[2] == "failed"
    assert not re.search(r"nan|inf\b", text)


def test_an_interval_says_where_it_is_less_sure() -> None:
    told, shown = found(), []
    for confidence, interval in ((0.9375, [1.5, 2.5]), (0.0, [2.0, 2.0])):
        facts = {"ratio": 2.0, "interval": interval, "confidence": confidence, "rounds": 1}
        told["workloads"]["gains-1"]["ratios"]["default"]["wall_us"] = facts
        shown.append(cells(page(told), "gains-1")[2])
    assert shown == ["2.00 ± 0.50 (94%)", "2.00 (1 round)"]
