"""The benchmark's command line, and what it runs in which order."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cuda import __main__ as benchmark
from benchmarks.cuda.measure import MODES, Workload
from benchmarks.cuda.processes import Processes, Side
from benchmarks.cuda.results import Results
from benchmarks.cuda.workloads import WORKLOADS

PROGRAM = """
import json, sys, torch
name, mode, phase, result = sys.argv[1:5]
sys.stdin.readline()
if phase == "compile":
    print(json.dumps({"compile_s": 1.0}))
else:
    torch.save(torch.ones(2) * (2 if (name, mode) == ("wrong", "pygraph") else 1), result)
    print(json.dumps({"wall_us": 2.0, "host_us": 1.0}))
"""


def test_defaults_and_names() -> None:
    chosen = benchmark.arguments([])
    assert (chosen.names, chosen.jobs, chosen.compile_time, chosen.out) == ([], 8, False, None)
    assert benchmark.arguments(["mlp-host", "--seconds", "30"]).seconds == 30.0


@pytest.mark.parametrize(
    "argv",
    [["no-such-workload"], ["--jobs", "0"], ["--seconds", "-1"], ["--compile-time", "--caches", "somewhere"]],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.arguments(argv)
    assert "error:" in capsys.readouterr().err


def test_sides_of_a_workload_stand_together_and_compile_apart() -> None:
    sides = benchmark.sides_of(["mlp-host", "capture-cost", "decode-kv"])
    assert [side.workload for side in sides] == ["mlp-host"] * 3 + ["capture-cost"] + ["decode-kv"] * 3
    assert [side.mode for side in sides[:3]] == list(MODES)
    order = [str(side) for side in benchmark.compile_order(sides)]
    assert order[:2] == ["mlp-host default", "decode-kv default"]
    assert sorted(order) == sorted(map(str, sides))


def test_every_workload_is_known_by_its_name() -> None:
    assert all(name == workload.name for name, workload in WORKLOADS.items())
    assert all((workload.build is None) != (workload.own is None) for workload in WORKLOADS.values())


def options(tmp_path: Path, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"out": tmp_path / "out.json", "jobs": 4, "compile_time": False, **more})


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, **more: Any) -> dict[str, Any]:
    def command(side: Side, phase: str, result: Path) -> Sequence[str]:
        return [sys.executable, "-c", PROGRAM, side.workload, side.mode, phase, str(result)]

    known = {name: Workload(name) for name in ("right", "wrong")}
    monkeypatch.setattr(benchmark, "WORKLOADS", known)
    sides = benchmark.sides_of(list(known))
    results = Results({}, sides, {name: workload.tolerance for name, workload in known.items()})
    processes = Processes(tmp_path / "work", time.monotonic() + seconds, command=command)
    benchmark.run(options(tmp_path, **more), processes, results, sides)
    read: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return read


def test_both_phases_end_in_ratios_where_results_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, monkeypatch, 300.0, compile_time=True)
    assert found["left_out"] == found["compile_errors"] == {}
    assert found["workloads"]["right"]["ratios"] == {
        f"{key} {mode}": 1.0 for mode in ("default", "reduce-overhead") for key in ("wall_us", "host_us", "compile_s")
    }
    assert found["workloads"]["wrong"]["ratios"] == {}
    assert set(found["workloads"]["wrong"]["errors"]) == {"pygraph"}
    printed = capsys.readouterr().out
    assert "wall_us" not in next(line for line in printed.splitlines() if line.startswith("wrong"))


def test_when_the_time_is_up_everything_left_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, 0.0)
    expected = {f"{name} {mode}" for name in ("right", "wrong") for mode in MODES}
    assert set(found["left_out"]) == expected
