"""The single measurements run, and measure what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pygraph
from benchmarks import capture_cost, compile_time, gpu_time, sizes, versions, warm_start
from pygraph.version import PACKAGE

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("fresh")]


def test_what_a_capture_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cost, "DEVICE", "cpu")
    found = capture_cost.cost_of(capture_cost.perceptron, (16, 32, 48, 64))
    medians = found["medians"]
    calls = {kind: row["calls"] for kind, row in medians.items()}
    # The call that compiles comes before those that are timed, so that the first size is captured one call earlier.
    captured = calls.get("captured", 0) + calls.get("captured twice", 0)
    assert (calls["uncaptured"], captured, calls["replayed"]) == (2 * 4 - 1, 4, 2 * 4 + 1)
    for row in (medians[kind] for kind in ("captured", "captured twice") if kind in medians):
        assert 0 < row["capture_us"] + row["instantiate_us"] + row.get("comparison_us", 0) < 4 * row["wall_us"]
    assert len(pygraph.reports()) == 1


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


def test_kernels_are_told_by_their_names() -> None:
    names = (
        "triton_poi_fused_add_0",
        "nvjet_sm90_tst_96x64_64x8_1x2_h_bz_NNN",
        "void at::native::unrolled_elementwise_kernel",
    )
    assert [gpu_time.kind_of(name) for name in (*names, "x")] == ["Inductor", "product", "torch", "other"]


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
    assert [run[side]["package"] for side in ("old", "new")] == [f"{folder}/pygraph" for folder in folders]
    assert run["old"]["result"] == run["new"]["result"]
    assert len(run["ratios"]) == 2
