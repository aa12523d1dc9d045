"""Blocks of sides in turns: order, one at a time, what becomes of sides that are wrong, die, hang or end early."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pygraph.bench.results import row_of
from pygraph.bench.timing import Measured, Program, block_calls
from tests.bench.fakes import Event, bench, events, program, soon

SIDES = ("eager", "default", "pygraph")


def measured(
    folder: Path, plans: Any = None, each: Program | None = None, *, seconds: float = 120.0, **more: Any
) -> Measured:
    return bench(folder, plans, **more).measure(each or program(), soon(seconds))


def blocks_of(log: Sequence[Event]) -> list[str]:
    return [side for _, side, _, what, _ in log if what == "block begins"]


def test_every_round_has_a_block_of_each_side_and_no_two_run_at_once(tmp_path: Path) -> None:
    found = measured(tmp_path)
    log = events(tmp_path)
    order = blocks_of(log)
    assert [sorted(order[at : at + 3]) for at in range(0, len(order), 3)] == [["default", "eager", "pygraph"]] * 4
    alone = [(side, what) for _, side, _, what, _ in log if what.split()[0] in ("warm", "block")]
    for (side, what), (then, ends) in zip(alone[::2], alone[1::2], strict=True):
        assert (side, what.replace("begins", "ends")) == (then, ends)
    assert [set(rows) for rows in found.rounds] == [set(SIDES)] * 4
    assert found.notes == []
    assert found.sides["pygraph"].facts["coverage"] == {"share": 1.0}


def test_one_side_compiles_alone_and_the_others_at_once(tmp_path: Path) -> None:
    measured(tmp_path, {side: {"takes": {"compile": 0.3}} for side in SIDES}, blocks=1)
    compiling = [(side, what) for _, side, _, what, _ in events(tmp_path) if what.startswith("compile")]
    assert compiling[:2] == [("default", "compile begins"), ("default", "compile ends")]
    assert [what for _, what in compiling[2:]] == ["compile begins"] * 2 + ["compile ends"] * 2


def test_the_order_is_random_and_repeats_with_the_seed(tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        measured(tmp_path / str(number), blocks=4, seed=seed)
        orders.append(blocks_of(events(tmp_path / str(number))))
    assert orders[0] == orders[1] != orders[2]


def test_a_drift_that_hits_all_sides_alike_changes_no_ratio(tmp_path: Path) -> None:
    each = program()
    row = row_of(each, measured(tmp_path, {"default": {"wall": 6.0}}, each))
    found = row["ratios"]["default"]["wall_us"]
    assert (found["ratio"], found["interval"]) == (pytest.approx(3.0), [pytest.approx(3.0)] * 2)
    assert (found["confidence"], found["rounds"]) == (0.875, 4)
    assert row["ratios"]["eager"]["wall_us"]["ratio"] == 1.0
    assert row["rounds"][0]["pygraph"]["wall_us"] < row["rounds"][3]["pygraph"]["wall_us"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("result", "told"), [("wrong", "by 0.5 of"), ("longer", "by an infinite part of")])
def test_a_side_with_other_results_is_not_timed_and_has_no_ratio(
    tmp_path: Path, apart: bool, result: str, told: str
) -> None:
    each = program(apart=apart)
    row = row_of(each, measured(tmp_path, {"pygraph": {"result": result}}, each, blocks=1))
    assert (row["sides"]["pygraph"]["status"], row["sides"]["default"]["status"]) == ("wrong", "ok")
    assert row["sides"]["pygraph"]["error"].startswith(f"results differ from eager's {told} ")
    assert row["ratios"] == {}
    assert set(blocks_of(events(tmp_path))) == {"eager", "default"}
    json.dumps(row, allow_nan=False)


def test_random_programs_are_compared_in_processes_of_their_own(tmp_path: Path) -> None:
    plans = {"default": {"fail": {"compile": "inapplicable"}}}
    found = measured(tmp_path, plans, program(apart=True, compared=32))
    assert {side for _, side, check, *_ in events(tmp_path) if check} == set(SIDES)
    assert not [
        what for _, side, check, what, _ in events(tmp_path) if side == "default" and not check and "beg" in what
    ]
    assert (found.sides["default"].failure, found.sides["default"].error) == ("inapplicable", "cannot: inapplicable")
    assert found.sides["pygraph"].difference == 0.0
    assert found.sides["pygraph"].facts["calls"] == 32


def test_without_the_references_results_there_is_no_ratio(tmp_path: Path) -> None:
    each = program()
    row = row_of(each, measured(tmp_path, {"eager": {"die": "compile"}}, each))
    assert (row["sides"]["eager"]["status"], row["sides"]["default"]["status"]) == ("failed", "unchecked")
    assert "no such kernel" in row["sides"]["eager"]["error"]
    assert row["ratios"] == {}


@pytest.mark.parametrize("when", ["ready", "compile", "warm", "block", "finish"])
def test_a_side_that_dies_is_told_and_the_others_go_on(tmp_path: Path, when: str) -> None:
    found = measured(tmp_path, {"default": {"die": when}})
    assert found.sides["default"].failure == "died"
    assert "no such" in found.sides["default"].error
    assert found.sides["pygraph"].failure is None
    assert [("pygraph" in rows) for rows in found.rounds] == [True] * 4


@pytest.mark.parametrize("plan", [{"hang": "compile"}, {"hang": "block"}, {"linger": "compile"}], ids=str)
@pytest.mark.timeout(120)
def test_it_returns_whatever_processes_do_and_leaves_none(tmp_path: Path, plan: Any) -> None:
    found = measured(tmp_path, dict.fromkeys(SIDES, plan), seconds=1.0)
    assert {outcome.failure for outcome in found.sides.values()} & {"late", "died"}
    assert not _alive(str(tmp_path))


def _alive(marker: str) -> list[Path]:
    """Running workers that mention ``marker`` in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            found += [path] if marker.encode() in text and b"time.monotonic" in text else []
    return found


def test_what_was_measured_is_told_when_the_time_is_up(tmp_path: Path) -> None:
    found = measured(tmp_path, {side: {"takes": {"block": 0.05}} for side in SIDES}, blocks=100, seconds=2.5)
    assert 0 < len(found.rounds) < 100
    assert all(set(rows) == set(SIDES) for rows in found.rounds)
    assert found.notes == [f"there was time for {len(found.rounds)} of 100 rounds"]
    assert {outcome.failure for outcome in found.sides.values()} == {None}


def test_a_program_gets_its_share_of_the_time_but_three_rounds_at_least(tmp_path: Path) -> None:
    found = bench(tmp_path, blocks=50).measure(program(), soon(), share=soon(-1.0))
    assert len(found.rounds) == 3


def test_a_script_that_ends_leaves_the_rounds_that_are_complete(tmp_path: Path) -> None:
    found = measured(tmp_path, {side: {"blocks": 2} for side in SIDES}, program(finite=True))
    assert len(found.rounds) == 2
    assert found.notes == ["the script ended in round 3 of 4"]
    assert all(outcome.failure is None for outcome in found.sides.values())


def test_blocks_of_short_calls_are_longer_by_whole_blocks_but_for_scripts(tmp_path: Path) -> None:
    assert [block_calls(30, us) for us in (5000.0, 100.0, 0.0, 0.01)] == [30, 210, 30, 30 * (4000 // 30)]
    for name, finite, calls in (("script", True, 4), ("suite", False, 20)):
        found = measured(
            tmp_path / name, {side: {"call_us": 1000.0} for side in SIDES}, program(finite=finite), blocks=1
        )
        assert (found.calls, found.rounds[0]["default"]["calls"]) == (calls, calls)


def test_each_side_has_a_cache_of_its_own(tmp_path: Path) -> None:
    found = measured(tmp_path, blocks=1)
    caches = [outcome.facts["caches"] for outcome in found.sides.values()]
    assert len({each["TORCHINDUCTOR_CACHE_DIR"] for each in caches}) == 3
    assert len({each["TRITON_CACHE_DIR"] for each in caches}) == 1


@pytest.mark.sweep
def test_processes_that_are_timed_have_cores_of_their_own(tmp_path: Path) -> None:
    everywhere = os.sched_getaffinity(0)
    own = [max(everywhere)]
    found = replace(bench(tmp_path, blocks=1), cores=own).measure(program(), soon())
    assert {tuple(row["cores"]) for row in found.rounds[0].values()} == {tuple(own)}
    assert os.sched_getaffinity(0) == everywhere


def test_several_programs_compile_at_once_and_are_timed_one_after_the_other(tmp_path: Path) -> None:
    both = [program(name="one"), program(name="other")]
    found = list(bench(tmp_path, {side: {"takes": {"compile": 0.3}} for side in SIDES}).measure_all(both, soon()))
    assert [len(each.rounds) for each in found] == [4, 4]
    what = [what for *_, what, _ in events(tmp_path)]
    assert what.index("warm begins") > max(at for at, each in enumerate(what) if each == "compile ends")


def test_a_program_that_compiles_for_long_is_left_out_and_the_others_are_timed(tmp_path: Path) -> None:
    plans = {f"slow {side}": {"hang": "compile"} for side in SIDES}
    slow, other = bench(tmp_path, plans, blocks=2).measure_all([program(name="slow"), program(name="other")], soon(6.0))
    assert {outcome.failure for outcome in slow.sides.values()} == {"late"}
    assert (len(slow.rounds), len(other.rounds)) == (0, 2)
