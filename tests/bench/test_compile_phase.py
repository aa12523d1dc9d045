"""Compiling ahead: what is compiled in which order and how many at once, caches, failures, results compared apart."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pygraph.bench.compile_phase import CompileLog, compile_all
from pygraph.bench.plan import Launcher, Program
from tests.bench.fakes import events, launcher, program, soon

STAMP = {"device": "cpu"}


def compiled(
    folder: Path, programs: Sequence[Program], plans: Any = None, *, jobs: int = 3, seconds: float = 120.0, **home: Any
) -> tuple[CompileLog, Launcher, list[str]]:
    starter = launcher(folder, plans, **home)
    log, told = CompileLog(folder / "compiled.json", STAMP), list[str]()
    compile_all(programs, starter, log, jobs, soon(seconds), told.append)
    return log, starter, told


def test_sides_that_compile_are_run_and_no_others(tmp_path: Path) -> None:
    log, _, told = compiled(tmp_path, [program("a"), program("b")])
    begun = [(name, side, phase) for name, side, phase, what, _ in events(tmp_path) if what == "compile begins"]
    assert sorted(begun) == [(name, side, "compile") for name in "ab" for side in ("default", "pygraph")]
    row = log.row("a", "pygraph", "compile")
    assert row is not None
    assert row["compile_s"] == 1.0
    assert len(told) == 4
    assert all("compiled in 1.0 s" in line for line in told)


def test_one_side_of_every_program_comes_before_the_next_side(tmp_path: Path) -> None:
    compiled(tmp_path, [program("a"), program("b")], jobs=1)
    begun = [f"{name} {side}" for name, side, _, what, _ in events(tmp_path) if what == "compile begins"]
    assert begun == ["a default", "b default", "a pygraph", "b pygraph"]


def test_as_many_compile_at_once_as_there_are_jobs(tmp_path: Path) -> None:
    compiled(
        tmp_path, [program(name) for name in "abc"], {"default": {"takes": 0.4}, "pygraph": {"takes": 0.4}}, jobs=2
    )
    running = most = 0
    for _, _, _, what, _ in events(tmp_path):
        running += {"compile begins": 1, "compile ends": -1}.get(what, 0)
        most = max(most, running)
    assert most == 2


def test_a_side_that_fails_is_logged_and_the_others_go_on(tmp_path: Path) -> None:
    plans = {"a default": {"die": "compile"}, "b default": {"fail": {"warm": "failed"}}}
    log, _, told = compiled(tmp_path, [program("a"), program("b")], plans)
    rows = {name: log.row(name, "default", "compile") or {} for name in "ab"}
    assert (rows["a"]["failure"], rows["b"]["failure"]) == ("died", "failed")
    assert "no such kernel" in rows["a"]["error"]
    assert (log.row("a", "pygraph", "compile") or {}).get("compile_s") == 1.0
    assert any("no such kernel" in line for line in told)


def test_what_there_is_no_time_for_is_late(tmp_path: Path) -> None:
    start = time.monotonic()
    log, _, _ = compiled(tmp_path, [program("a")], {"default": {"hang": "compile"}}, jobs=1, seconds=2.0)
    assert time.monotonic() - start < 20
    assert [(log.row("a", side, "compile") or {}).get("failure") for side in ("default", "pygraph")] == ["late", "late"]


def test_an_interrupt_ends_what_compiles_and_says_nothing_of_it(tmp_path: Path) -> None:
    """The pool waits for its threads, and each of them for a process that may take a quarter of an hour."""
    starter = launcher(tmp_path, {"b": {}, "b default": {"hang": "compile"}})
    log, start = CompileLog(tmp_path / "compiled.json", STAMP), time.monotonic()

    def interrupted(_: str) -> None:
        while not any(name == "b" and what == "compile begins" for name, _, _, what, _ in events(tmp_path)):
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all([program("a"), program("b")], starter, log, 2, soon(60.0), interrupted)
    assert time.monotonic() - start < 30
    assert log.row("b", "default", "compile") is None


def test_results_of_programs_that_draw_are_compared_on_every_side(tmp_path: Path) -> None:
    sides = ("eager", "default", "make-graphed-callables", "pygraph")
    plans = {"pygraph": {"result": "wrong"}, "make-graphed-callables": {"fail": {"compile": "inapplicable"}}}
    log, _, _ = compiled(tmp_path, [program("a", sides, apart=True)], plans)
    rows = {side: log.row("a", side, "check") or {} for side in sides}
    assert (rows["eager"]["difference"], rows["default"]["difference"]) == (0.0, 0.0)
    assert rows["pygraph"]["difference"] == pytest.approx(0.5)
    assert rows["make-graphed-callables"] == {"failure": "inapplicable", "error": "cannot: inapplicable"}
    assert log.row("a", "make-graphed-callables", "compile") is None


def test_a_script_that_ends_in_the_middle_has_compiled(tmp_path: Path) -> None:
    plans = {"default": {"fail": {"warm": "ended"}}, "pygraph": {"fail": {"compile": "ended"}}}
    log, _, _ = compiled(tmp_path, [program("a")], plans)
    assert (log.row("a", "default", "compile") or {})["compile_s"] == 1.0
    assert log.row("a", "pygraph", "compile") == {}


def test_the_log_is_kept_for_another_command_and_forgotten_when_it_does_not_apply(tmp_path: Path) -> None:
    compiled(tmp_path, [program("a")])
    assert CompileLog(tmp_path / "compiled.json", STAMP).row("a", "default", "compile") is not None
    assert CompileLog(tmp_path / "compiled.json", {"device": "cuda"}).row("a", "default", "compile") is None
    (tmp_path / "compiled.json").write_text(json.dumps({"stamp": STAMP}))
    assert CompileLog(tmp_path / "compiled.json", STAMP).row("a", "default", "compile") is None
    (tmp_path / "compiled.json").write_text("{")
    assert CompileLog(tmp_path / "compiled.json", STAMP).row("a", "default", "compile") is None


@pytest.mark.parametrize("cold", [False, True])
def test_each_side_has_caches_of_its_own_and_shares_triton_unless_cold(tmp_path: Path, cold: bool) -> None:
    log, _, _ = compiled(tmp_path, [program("a")], cold=cold)
    first, second = ((log.row("a", side, "compile") or {})["caches"] for side in ("default", "pygraph"))
    assert first["TORCHINDUCTOR_CACHE_DIR"] != second["TORCHINDUCTOR_CACHE_DIR"]
    assert (first["TRITON_CACHE_DIR"] != second["TRITON_CACHE_DIR"]) is cold


def test_what_is_chosen_by_timing_kernels_is_shared_by_all_sides_of_a_program(tmp_path: Path) -> None:
    log, _, _ = compiled(tmp_path, [program("a", apart=True), program("b")])
    rows = {
        (name, side, phase): log.row(name, side, phase) or {}
        for name, side, phase in (("a", "default", "compile"), ("a", "pygraph", "check"), ("b", "default", "compile"))
    }
    first, other, second = rows.values()
    assert first["choices"] == other["choices"] != second["choices"]
    assert first["gpu_lock"] == other["gpu_lock"] == second["gpu_lock"]
    assert Path(first["choices"]).is_absolute()


@pytest.mark.parametrize("cold", [False, True])
def test_kernels_are_timed_anew_where_compiling_is_measured(tmp_path: Path, cold: bool) -> None:
    log, _, _ = compiled(tmp_path, [program("a", apart=True)], cold=cold)
    assert (log.row("a", "pygraph", "compile") or {})["fresh"] is cold
    assert (log.row("a", "pygraph", "check") or {})["fresh"] is False


@pytest.mark.parametrize("plan", [{"hang": "compile"}, {"hang": "warm"}, {"linger": "compile"}, {"linger": "finish"}])
def test_it_returns_in_time_whatever_processes_do(tmp_path: Path, plan: Any) -> None:
    """Those that hang, that go on with their pipe closed, and that do not end when they are done."""
    start = time.monotonic()
    programs = [program(name) for name in "abcdef"]
    log, _, _ = compiled(tmp_path, programs, {"default": plan, "pygraph": plan}, jobs=3, seconds=2.0)
    assert time.monotonic() - start < 2.0 + 2.5
    assert all(log.row(name, side, "compile") for name in "abcdef" for side in ("default", "pygraph"))


def test_the_file_is_valid_whenever_it_is_read(tmp_path: Path) -> None:
    starter, log = launcher(tmp_path), CompileLog(tmp_path / "compiled.json", STAMP)
    seen = []

    def told(_: str) -> None:
        seen.append(len(json.loads((tmp_path / "compiled.json").read_text())["rows"]))

    compile_all([program("a"), program("b")], starter, log, 2, soon(), told)
    assert seen == [1, 2, 3, 4]
