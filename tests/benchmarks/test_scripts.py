"""The single measurements run, and measure what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import by_hand, callables, capture_cost, compile_time, new_sizes, sizes, versions, warm_start
from pygraph.runtime.native_build import waiting_for_builds
from pygraph.version import PACKAGE

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("fresh")]


def test_what_a_capture_of_another_size_costs() -> None:
    program = replace(capture_cost.PROGRAMS["llama-decode"], tiny=(8, 2, 4))
    found = capture_cost.cost_of(program, "cpu", tiny=True)
    assert (found["proven"] + found["compared"], found["uncaptured"], found["compiled later"]) == (2, 0, 0)
    assert 0 < found["host"] < found["first"]
    for row in found["sizes"]:
        parts = row["capture_us"] + row["instantiate_us"] + row.get("comparison_us", 0)
        assert 0 < parts < row["captured_us"]
        assert (row["kind"] == "compared") == ("comparison_us" in row)


def test_sizes_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_sizes, "TINY_BATCHES", (2, 4, 6))
    row = new_sizes.prepared("cpu", True, False)
    assert (row["ours"]["captures"], row["ours"]["replayed"], row["ours"]["refused"]) == (3, 3, {})
    assert row["ratio"] == row["ours"]["seconds"] / row["by hand"]["seconds"]


def test_passes_over_sizes(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    found = new_sizes.measure(("graphs",), "cpu", 0.0, out, tiny=True)
    (row,) = found["graphs"]
    assert json.loads(out.read_text())["rows"] == found
    assert [each["replays"] + each["uncaptured"] for each in row["passes"]] == [row["calls"]] * 3
    assert row["compiled later"] == 0
    (line,) = new_sizes.table(found)[1:]
    assert f"{row['all']:.2f}" in line


def test_results_are_compared() -> None:
    new_sizes.assert_close([torch.ones(2)], [torch.ones(2)], 1e-3)
    for wrong in (1.1, float("nan")):
        with pytest.raises(AssertionError, match="off by"):
            new_sizes.assert_close([torch.ones(2) * wrong], [torch.ones(2)], 1e-3)


def test_a_position_that_is_a_number_is_no_program_of_its_own() -> None:
    row = new_sizes.position("cpu", True, False)
    assert (row["calls"], len(row["passes"]), row["compiled later"]) == (12, 4, 0)


def test_a_later_process_restores_everything_and_replays() -> None:
    row = warm_start.measure("mlp", "cpu", 1)
    assert row["misses"] == 0
    assert row["replay"] > row["pygraph warm"] > 0


def test_a_program_of_one_size_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sizes.PROGRAMS, "few calls", lambda: sizes.sizes(1, 3))
    row = sizes.row("few calls", "cpu")
    assert (row["captures"], row["replays"], row["uncaptured"]) == (1, 3 * sizes.LAYERS - 1, 1)


def test_how_long_a_whole_step_compiles() -> None:
    row = compile_time.measure("mlp-training", "cpu", 1)
    for calls in row["calls_s"].values():
        assert max(calls[0][1:]) < calls[0][0]
    assert row["ratio"] == pytest.approx(row["step"] / row["default"], rel=0.01)


@pytest.mark.parametrize("name", warm_start.PROGRAMS)
def test_programs_run(name: str) -> None:
    warm_start.program(name, "cpu")(lambda fn: fn)()


def test_each_version_runs_its_own_package(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "pygraph", ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path / "versions.json"
    folders = (str(tmp_path), str(PACKAGE.parent))
    rest = ("mlp-host", "--device", "cpu", "--rounds", "2", "--out", str(out))
    subprocess.run([sys.executable, versions.__file__, *folders, *rest], check=True, timeout=400)
    (run,) = json.loads(out.read_text())["mlp-host"]
    assert [run[side]["package"] for side in ("old", "new")] == [f"{Path(folder).name}/pygraph" for folder in folders]
    assert run["old"]["result"] == run["new"]["result"]
    assert len(run["ratios"]) == 2


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, by_hand.Side]]:
    """Both sides, in this process."""
    monkeypatch.setattr(by_hand, "BLOCK_S", 0.0)
    sides = {name: by_hand.Side(name, "cpu", True) for name in (by_hand.OURS, by_hand.THEIRS)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad(), waiting_for_builds():
        yield sides
    torch.set_num_threads(threads)


def test_callables_are_timed_by_turns(tmp_path: Path, small_blocks: dict[str, by_hand.Side]) -> None:
    out, rows = tmp_path / "rows.json", ("mlp", "refused", "pieces")
    found = by_hand.measure(rows, small_blocks, 2, 60.0, out, {"device": "cpu"})
    told = json.loads(out.read_text())
    assert (told["device"], told["min"], list(told["rows"])) == ("cpu", found["mlp"]["ratio"], list(found))
    ours = {name: found[name]["ours"] for name in rows}
    assert {name: (row["captures"], row["replays of a call"]) for name, row in ours.items()} == {
        "mlp": (1, 1.0),
        "refused": (0, 0.0),
        "pieces": (3, 3.0),
    }
    assert ours["refused"]["reason"].startswith("host-read")


def test_what_was_replaced_is_used(small_blocks: dict[str, by_hand.Side]) -> None:
    row = small_blocks[by_hand.OURS].once("changes")
    assert {(kind["wrong"], kind["captures"], kind["replayed"]) for kind in row.values()} == {(0, 0, 1.0)}
    assert len(row) == 7


def test_memory_is_forecast(small_blocks: dict[str, by_hand.Side]) -> None:
    row = small_blocks[by_hand.OURS].once("forecast")
    assert len(row) == 11
    assert row["off"] < 0.1, row


def test_a_row_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, small_blocks: dict[str, by_hand.Side]
) -> None:
    monkeypatch.setattr(by_hand.Side, "start", lambda side: None)
    monkeypatch.setitem(callables.TIMED, "mlp", lambda side: 1 / 0)
    found = by_hand.measure(("mlp", "held-300"), small_blocks, 1, 60.0, None, {})
    assert found["mlp"]["error"] == "ZeroDivisionError: division by zero"
    assert found["held-300"]["ours"]["captures"] == 1


def test_a_side_that_dies_is_started_anew() -> None:
    side = by_hand.Apart(by_hand.OURS, "cpu", True)
    try:
        with pytest.raises(RuntimeError, match="AttributeError"):
            side.nothing()
        side.end_by = 0.0
        with pytest.raises(RuntimeError, match="took too long"):
            side.end()
        side.end_by = float("inf")
        assert side.end() is None
    finally:
        side.process.kill()
