"""The pages of results: they are what the script makes, newest figures win, and each figure leads to its run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import COMMITS, ROOT, Results, page, pages, summary, with_table

ROW = {"kind": "inference", "rounds": [], "sides": {}, "ratios": {}}


def suite(ratio: float, side: str = "default", **sides: Any) -> dict[str, Any]:
    """A document of one workload."""
    row = {**ROW, "sides": {"pygraph": {"status": "ok"}, side: {"status": "ok"}, **sides}}
    row["ratios"] = {side: {"wall_us": {"ratio": ratio, "interval": [ratio - 0.1, ratio + 0.1]}}}
    return {"machine": {"torch": "2.11.0+cu130"}, "settings": {}, "workloads": {"mlp": row}}


def kept(folder: Path, **files: Any) -> Results:
    """Results of these files, in their order; names stand for the day."""
    names = {f"h100-2026-01-0{day}/results.json": found for day, found in zip((2, 1, 3), files.values(), strict=False)}
    for name, found in names.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(json.dumps(found))
    commits = dict(zip(names, files, strict=True))
    (folder / COMMITS).write_text(json.dumps(commits))
    return Results(folder)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_files_are_what_the_script_makes(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == pages()[path], "make results"


def test_every_kept_file_has_its_commit() -> None:
    assert [run.path for run in Results().runs if run.commit == "–"] == [], f"list them in {COMMITS}"


def test_the_readme_has_a_table() -> None:
    assert with_table((ROOT / "README.md").read_text(encoding="utf-8"), Results()).count("<!-- results -->\n|") == 1


def test_newer_figures_replace_older_ones_side_by_side(tmp_path: Path) -> None:
    results = kept(tmp_path, a1=suite(2.0), b2=suite(0.9), c3=suite(3.0, "reduce-overhead"))
    cells = results.parts["mlp"]
    assert {side: (cell.ratio, cell.run.commit, cell.lost) for side, cell in cells.items()} == {
        "default": (0.9, "b2", True),
        "reduce-overhead": (3.0, "c3", False),
    }


def test_a_side_that_is_wrong_has_no_figure(tmp_path: Path) -> None:
    wrong = suite(2.0, "reduce-overhead", default={"status": "wrong"})
    assert kept(tmp_path, a1=suite(2.0), b2=wrong).parts["mlp"]["default"].text == "wrong results"


def test_a_side_that_there_was_no_time_for_keeps_its_older_figure(tmp_path: Path) -> None:
    late = suite(2.0, "reduce-overhead", default={"status": "left out"})
    assert kept(tmp_path, a1=suite(2.5), b2=late).parts["mlp"]["default"].ratio == 2.5


def test_means_are_by_kind_and_decoding_is_inference(tmp_path: Path) -> None:
    found = suite(2.0)
    row = found["workloads"]["mlp"]
    for name, kind, ratio in (("cached", "decode", 8.0), ("trained", "training", 0.5)):
        found["workloads"][name] = {**row, "kind": kind, "ratios": {"default": {"wall_us": {"ratio": ratio}}}}
    results = kept(tmp_path, a1=found)
    assert results.ratios("inference", "default") == [2.0, 8.0]
    means = [line for line in summary(results) if "over `default`" in line]
    assert [line.split(" | ")[1:] for line in means[:2]] == [["4.00", "2 |"], ["**0.50**", "1 |"]]


def test_marks_lead_to_runs() -> None:
    text = page(Results())
    marks = {int(mark) for mark in re.findall(r"<sup>(\d+)</sup>", text)}
    assert marks == set(range(1, 1 + max(marks)))
    runs = text.partition("\n## Runs\n")[2]
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", runs, re.MULTILINE)] == sorted(marks)


def test_losses_are_listed_and_bold() -> None:
    text = page(Results())
    listed = text.partition("## Losses\n")[2].partition("\n## ")[0]
    tables = re.findall(r"^\|.*", text.partition("## Compiled models")[2], re.MULTILINE)
    bold = [re.findall(r"\*\*(.+?)\*\*", row) for row in tables if "**" in row]
    assert len(bold) == listed.count("\n- ") > 10
    assert [text for row in bold for text in row if text not in " ".join(listed.split())] == []
