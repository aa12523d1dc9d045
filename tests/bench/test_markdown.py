"""The page: tables, means, losses; wrong results are told loudly, and no ratio of theirs is anywhere."""

from __future__ import annotations

import re

import pytest

from pygraph.bench.facts import geometric, left_out_of_means, losses
from pygraph.bench.markdown import render_markdown
from tests.bench.documents import document


def section(page: str, title: str) -> str:
    """What stands below a heading, up to the next one."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title!r}"
    return found[1]


def row(page: str, name: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| {name} "))


def test_the_head_says_where_and_how() -> None:
    head = render_markdown(document()).splitlines()
    assert head[0] == "# NVIDIA H200, 2026-11-21"
    assert "torch 2.11.0, CUDA 13.0" in head[2]
    assert "9 rounds" in head[2]
    tiny = document()
    tiny["settings"]["tiny"] = True
    assert "say nothing of real ones" in render_markdown(tiny)


def test_a_table_for_each_domain() -> None:
    page = render_markdown(document())
    gains = row(section(page, "Language"), "gains-1")
    assert gains.startswith("| gains-1 (inference) | 4.00 ± 0.40 | 2.00 ± 0.20 | 1.25 ± 0.12 | ")
    assert "default 512, reduce-overhead 320, pygraph 256" in gains
    assert "75%" in gains
    assert "**0.90 ± 0.09**" in row(section(page, "Language"), "loses-1")
    for table in ("Language", "Vision"):
        lines = [line for line in section(page, table).splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("confidence", "interval", "shown"),
    [(0.9375, [1.5, 2.5], "2.00 ± 0.50 (94%)"), (0.0, [2.0, 2.0], "2.00 (1 round)"), (None, None, "2.00")],
)
def test_an_interval_says_where_it_is_less_sure(
    confidence: float | None, interval: list[float] | None, shown: str
) -> None:
    found = document()
    ratio = {"ratio": 2.0, "interval": interval, "confidence": confidence, "rounds": 1}
    found["workloads"]["gains-1"]["ratios"]["default"]["wall_us"] = ratio
    assert row(section(render_markdown(found), "Language"), "gains-1").split(" | ")[2] == shown


def test_wrong_results_are_told_first_and_have_no_ratio() -> None:
    page = render_markdown(document())
    assert page.index("## WRONG RESULTS") < page.index("## Overall")
    told = section(page, "WRONG RESULTS")
    assert "**wrong-1, pygraph**: results differ from eager's by 0.5" in told
    assert "**wrong-baseline-1, reduce-overhead**" in told
    cells = row(section(page, "Vision"), "wrong-1").split(" | ")
    assert cells[1:4] == ["**WRONG RESULTS**"] * 3
    assert not any(re.search(r"\d\.\d\d ±", line) for line in page.splitlines() if line.startswith("| wrong-1 "))
    baseline = row(section(page, "Vision"), "wrong-baseline-1").split(" | ")
    assert baseline[3] == "**WRONG RESULTS**"
    assert baseline[2] == "2.00 ± 0.20"


def test_means_are_of_what_is_right_and_say_of_how_many() -> None:
    found = document()
    mean, count = geometric(found, "default")
    assert (count, mean) == (4, pytest.approx((2.0 * 2.0 * 0.99 * 2.0) ** 0.25))
    assert left_out_of_means(found, "default") == ["wrong-1", "fails-1", "late-1", "absent-1"]
    assert left_out_of_means(found, "reduce-overhead") == ["wrong-1", "wrong-baseline-1", "late-1", "absent-1"]
    overall = section(render_markdown(found), "Overall")
    assert f"| default | **{mean:.3f}** | 4 | wrong-1, fails-1, late-1, absent-1 |" in overall


def test_losses_are_against_the_better_of_both_and_begin_at_two_percent() -> None:
    assert losses(document()) == [("loses-1", 0.9)]
    assert "- **loses-1**: 0.900" in section(render_markdown(document()), "Losses")
    fine = document()
    del fine["workloads"]["loses-1"]
    assert "None:" in section(render_markdown(fine), "Losses")
    fine["workloads"]["gains-1"]["ratios"]["eager"]["wall_us"]["ratio"] = 0.02
    assert "- **gains-1**: 0.020 over eager" in section(render_markdown(fine), "Losses")
    assert "None" not in section(render_markdown(fine), "Losses")


def test_ablations_and_decisions() -> None:
    page = render_markdown(document())
    table = section(page, "What each mechanism is worth")
    assert "without capture" in table
    assert "without placement" not in table
    assert row(table, "gains-1") == "| gains-1 | 1.90 ± 0.19 |"
    assert row(table, "geometric mean") == "| geometric mean | 1.900 of 5 |"
    assert row(section(page, "Measured selection"), "gains-1") == "| gains-1 | 2 replay | 72 |"


def test_what_was_left_out_failed_or_is_to_be_noted() -> None:
    rest = section(render_markdown(document()), "Left out, failed, and to be noted")
    assert "- late-1: the time was up before its turn" in rest
    assert "- absent-1: not installed: timm" in rest
    assert "- default failed (RuntimeError: a | b): fails-1" in rest
    assert "- fails-1: there was time for 5 of 9 rounds" in rest


def test_pictures_are_shown_where_there_are_any() -> None:
    assert "](" not in render_markdown(document())
    assert "![Gains over Inductor's modes](results-gains.png)" in render_markdown(document(), "results")


def test_a_document_of_nothing_is_a_page_too() -> None:
    empty = {**document(), "workloads": {}, "left_out": {}, "skipped": {}}
    assert render_markdown(empty).startswith("# NVIDIA H200")
    assert "##" not in render_markdown(empty)
