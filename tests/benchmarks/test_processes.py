"""The processes of a benchmark, with small programs in place of workloads: order, caches, failures, time limits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.cuda.processes import Outcome, Processes, Side

LOG = """
import json, os, pathlib, sys, time
name, mode, phase, log = sys.argv[1:5]
def note(what):
    with open(log, "a") as file:
        file.write(f"{phase} {name} {mode} {what} {time.monotonic()}\\n")
note("loaded")
if not sys.stdin.readline():
    note("not wanted")
    sys.exit()
note("began")
"""
FINE = LOG + 'time.sleep(0.1)\nnote("done")\nprint("noise")\nprint(json.dumps({"wall_us": 1.0}))'
RAISES = LOG + 'raise ValueError("no such kernel")'
SILENT = LOG + 'print("nothing that is a row")'
HANGS = LOG + "time.sleep(600)"
CACHES = LOG + 'print(json.dumps({k: v for k, v in os.environ.items() if "CACHE_DIR" in k or "THREADS" in k}))'

Made = Callable[..., Processes]


@pytest.fixture
def make(tmp_path: Path) -> Made:
    def processes(program: str, seconds: float = 60.0, *, cold: bool = False) -> Processes:
        def command(side: Side, phase: str, result: Path) -> Sequence[str]:
            return [sys.executable, "-c", program, side.workload, side.mode, phase, str(tmp_path / "log")]

        return Processes(tmp_path / "work", time.monotonic() + seconds, cold=cold, command=command)

    return processes


def events(folder: Path) -> list[tuple[str, str, float]]:
    """``(phase name mode, what, when)`` of every line that the programs wrote, by time."""
    rows = [line.split() for line in (folder / "log").read_text().splitlines()]
    return sorted(((" ".join(r[:3]), " ".join(r[3:-1]), float(r[-1])) for r in rows), key=lambda event: event[2])


def timed(processes: Processes, sides: Sequence[Side]) -> dict[Side, Outcome]:
    found: dict[Side, Outcome] = {}
    processes.time_each(sides, found.__setitem__)
    return found


SIDES = [Side("a", "default"), Side("a", "pygraph"), Side("b", "default")]


def test_sides_are_timed_one_after_the_other_and_the_next_one_waits(make: Made, tmp_path: Path) -> None:
    found = timed(make(FINE), SIDES)
    assert [found[side].row for side in SIDES] == [{"wall_us": 1.0}] * 3
    order = [(who, what) for who, what, _ in events(tmp_path) if what != "loaded"]
    assert order == [(f"time {side}", what) for side in SIDES for what in ("began", "done")]


def test_the_next_side_is_loaded_while_one_is_timed(make: Made, tmp_path: Path) -> None:
    slow = FINE.replace("time.sleep(0.1)", "time.sleep(2)")
    timed(make(slow), SIDES[:2])
    when = {(who, what): at for who, what, at in events(tmp_path)}
    assert when["time a pygraph", "loaded"] < when["time a default", "done"] < when["time a pygraph", "began"]


def test_sides_are_compiled_at_once(make: Made, tmp_path: Path) -> None:
    slow = FINE.replace("time.sleep(0.1)", "time.sleep(2)")
    processes = make(slow)
    found = processes.compile_all(SIDES, jobs=3, until=processes.end)
    assert all(outcome.row for outcome in found.values())
    what = [event for _, event, _ in events(tmp_path) if event != "loaded"]
    assert what == ["began"] * 3 + ["done"] * 3


def test_a_failure_is_told_and_the_others_go_on(make: Made) -> None:
    found = timed(make(RAISES), SIDES[:2])
    assert all("no such kernel" in outcome.error and not outcome.late for outcome in found.values())
    silent = timed(make(SILENT), SIDES[:1])[SIDES[0]]
    assert silent.row is None
    assert "no row" in silent.error


def test_what_outlasts_the_time_is_ended_and_the_rest_is_left_out(make: Made) -> None:
    start = time.monotonic()
    found = timed(make(HANGS, seconds=1.5), SIDES)
    assert time.monotonic() - start < 20
    assert [outcome.late for outcome in found.values()] == [True] * 3
    assert "not done" in found[SIDES[0]].error


def test_compiling_ahead_ends_in_time(make: Made) -> None:
    processes = make(HANGS)
    start = time.monotonic()
    found = processes.compile_all(SIDES, jobs=1, until=start + 1.0)
    assert time.monotonic() - start < 20
    assert [outcome.late for outcome in found.values()] == [True] * 3


def test_each_side_has_its_own_caches_which_both_phases_share(make: Made) -> None:
    processes = make(CACHES)
    compiled = processes.compile_all(SIDES[:2], jobs=2, until=processes.end)
    threads = [(outcome.row or {}).pop("TORCHINDUCTOR_COMPILE_THREADS") for outcome in compiled.values()]
    assert all(int(count) >= 1 for count in threads)
    found = timed(processes, SIDES[:2])
    for side in SIDES[:2]:
        row, then = found[side].row, compiled[side].row
        assert row is not None
        assert then is not None
        assert (row["TORCHINDUCTOR_CACHE_DIR"], row["TRITON_CACHE_DIR"]) == tuple(then[key] for key in sorted(then))
    first, second = (found[side].row or {} for side in SIDES[:2])
    assert first["TORCHINDUCTOR_CACHE_DIR"] != second["TORCHINDUCTOR_CACHE_DIR"]
    assert first["TRITON_CACHE_DIR"] == second["TRITON_CACHE_DIR"]


def test_compilations_from_nothing_share_nothing(make: Made) -> None:
    found = timed(make(CACHES, cold=True), SIDES[:2])
    rows = [outcome.row or {} for outcome in found.values()]
    assert rows[0]["TRITON_CACHE_DIR"] != rows[1]["TRITON_CACHE_DIR"]


def test_choices_that_were_timed_while_others_ran_are_forgotten(make: Made) -> None:
    processes = make(FINE)
    choice = processes.folder / "a" / "default" / "inductor" / "xy" / "kernel.best_config"
    choice.parent.mkdir(parents=True)
    choice.write_text("{}")
    kept = choice.with_name("kernel.py")
    kept.write_text("")
    processes.compile_all(SIDES[:1], jobs=1, until=processes.end)
    assert not choice.exists()
    assert kept.exists()


def test_results_of_an_earlier_benchmark_are_not_taken_for_new_ones(make: Made) -> None:
    processes = make(FINE)
    stale = processes.result(SIDES[0])
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"old")
    timed(processes, SIDES[:1])
    assert not stale.exists()
