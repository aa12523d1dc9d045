"""Blocks of sides in turns: order, one at a time, what becomes of sides that are wrong, die, hang, or do not fit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pygraph.bench.plan import Program
from pygraph.bench.timing import Timed, Timing, block_calls
from tests.bench.fakes import Event, close_to, events, launcher, program, soon


def timed(
    folder: Path,
    plans: Any = None,
    programs: Sequence[Program] = (),
    *,
    seconds: float = 120.0,
    blocks: int = 4,
    seed: int = 0,
    ahead: Callable[[Program, str], bool] = lambda *_: False,
) -> dict[str, Timed]:
    found: dict[str, Timed] = {}
    timing = Timing(launcher(folder, plans), soon(seconds), blocks=blocks, seed=seed, ahead=ahead)
    timing.run(programs or [program()], lambda each: each.sides, lambda each, row: found.update({each.name: row}))
    return found


def blocks_of(log: Sequence[Event]) -> list[str]:
    return [side for _, side, _, what, _ in log if what == "block begins"]


def test_every_round_has_a_block_of_each_side_and_no_two_run_at_once(tmp_path: Path) -> None:
    found = timed(tmp_path)["first"]
    log = events(tmp_path)
    order = blocks_of(log)
    rounds = [order[at : at + 3] for at in range(0, len(order), 3)]
    assert [sorted(each) for each in rounds] == [["default", "eager", "pygraph"]] * 4
    timed_part = [(side, what) for _, side, _, what, _ in log if what.split()[0] in ("warm", "block")]
    for (side, what), (then, ends) in zip(timed_part[::2], timed_part[1::2], strict=True):
        assert (side, what.replace("begins", "ends")) == (then, ends)
    assert found.groups[0].sides == ("eager", "default", "pygraph")
    assert len(found.groups[0].rounds) == 4
    assert found.notes == []


def test_one_side_compiles_alone_the_others_at_once_and_all_warm_up_one_after_the_other(tmp_path: Path) -> None:
    timed(tmp_path, {side: {"takes": 0.3} for side in ("eager", "default", "pygraph")}, blocks=1)
    log = events(tmp_path)
    compiling = [(side, what) for _, side, _, what, _ in log if what.startswith("compile")]
    assert compiling[:2] == [("default", "compile begins"), ("default", "compile ends")]
    assert [what for _, what in compiling[2:]] == ["compile begins"] * 2 + ["compile ends"] * 2
    assert [what for _, _, _, what, _ in log if what.startswith("warm")] == ["warm begins", "warm ends"] * 3


def test_where_kernels_were_chosen_before_all_sides_compile_at_once(tmp_path: Path) -> None:
    plans = {side: {"takes": 0.3} for side in ("eager", "default", "pygraph")}
    timed(tmp_path, plans, blocks=1, ahead=lambda _, side: side == "default")
    compiling = [what for _, _, _, what, _ in events(tmp_path) if what.startswith("compile")]
    assert compiling == ["compile begins"] * 3 + ["compile ends"] * 3


def test_a_side_that_was_compiled_ahead_is_no_help_where_the_first_was_not(tmp_path: Path) -> None:
    plans = {side: {"takes": 0.3} for side in ("eager", "default", "pygraph")}
    timed(tmp_path, plans, blocks=1, ahead=lambda _, side: side == "pygraph")
    compiling = [(side, what) for _, side, _, what, _ in events(tmp_path) if what.startswith("compile")]
    assert compiling[:2] == [("default", "compile begins"), ("default", "compile ends")]


def test_the_order_is_random_and_repeats_with_the_seed(tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        timed(folder, blocks=8, seed=seed)
        orders.append(blocks_of(events(folder)))
    assert orders[0] == orders[1] != orders[2]
    assert len({tuple(orders[0][at : at + 3]) for at in range(0, 24, 3)}) > 1


def test_the_next_program_is_loaded_but_told_nothing_while_one_is_timed(tmp_path: Path) -> None:
    plans = {"default": {"importing": 0.5}}
    timed(tmp_path, plans, [program("first"), program("second"), program("third")], blocks=2)
    log = events(tmp_path)
    last_block = max(when for name, _, _, what, when in log if name == "first" and what == "block ends")
    first_block = min(when for name, _, _, what, when in log if name == "first" and what == "block begins")
    second = {what: when for name, side, _, what, when in log if name == "second" and side == "default"}
    third = {what: when for name, side, _, what, when in log if name == "third" and side == "default"}
    assert second["ready"] < first_block
    assert second["compile begins"] > last_block
    assert third["ready"] > last_block


def test_a_side_with_other_results_is_not_timed(tmp_path: Path) -> None:
    found = timed(tmp_path, {"pygraph": {"result": "wrong"}})["first"]
    assert found.sides["pygraph"].difference == pytest.approx(0.5)
    assert found.sides["default"].difference == 0.0
    assert set(blocks_of(events(tmp_path))) == {"eager", "default"}


def test_without_the_references_results_nothing_is_known_of_the_others(tmp_path: Path) -> None:
    found = timed(tmp_path, {"eager": {"die": "compile"}})["first"]
    assert found.sides["eager"].failure == "died"
    assert "no such kernel" in found.sides["eager"].error
    assert found.sides["default"].difference is None


@pytest.mark.parametrize("when", ["ready", "compile", "warm", "block", "finish"])
def test_a_side_that_dies_is_told_and_the_others_go_on(tmp_path: Path, when: str) -> None:
    found = timed(tmp_path, {"default": {"die": when}}, [program("first"), program("second", ("eager",))])
    assert found["first"].sides["default"].failure == "died"
    assert "no such" in found["first"].sides["default"].error
    assert found["first"].sides["pygraph"].failure is None
    assert all("pygraph" in rows for rows in found["first"].groups[0].rounds)
    assert len(found["first"].groups[0].rounds) == 4
    assert found["second"].sides["eager"].failure is None


def test_a_side_that_hangs_is_ended_and_what_comes_after_is_left_out(tmp_path: Path) -> None:
    start = time.monotonic()
    found = timed(tmp_path, {"default": {"hang": "block"}}, [program("first"), program("second")], seconds=4.0)
    assert time.monotonic() - start < 30
    assert found["first"].sides["default"].failure == "late"
    assert set(found) == {"first"}


@pytest.mark.parametrize("when", ["compile", "warm", "block", "finish"])
def test_it_returns_in_time_however_many_sides_hang(tmp_path: Path, when: str) -> None:
    sides = ("eager", "default", "pygraph", "pygraph-no-model", "pygraph-no-measuring", "pygraph-uncaptured")
    start = time.monotonic()
    timed(tmp_path, {side: {"hang": when} for side in sides}, [program(sides=sides)], seconds=3.0)
    assert time.monotonic() - start < 3.0 + 5.0


def test_what_was_measured_is_told_when_the_time_is_up(tmp_path: Path) -> None:
    plans = {side: {"takes": 0.2, "chosen": {"kernel": "8"}} for side in ("eager", "default", "pygraph")}
    found = timed(tmp_path, plans, blocks=100, seconds=6.0)["first"]
    assert 0 < len(found.groups[0].rounds) < 100
    assert all(set(rows) == {"eager", "default", "pygraph"} for rows in found.groups[0].rounds)
    assert found.notes == [f"there was time for {len(found.groups[0].rounds)} of 100 rounds"]
    told = {side: (outcome.failure, outcome.facts.get("chosen")) for side, outcome in found.sides.items()}
    assert told == dict.fromkeys(("eager", "default", "pygraph"), (None, {"kernel": "8"}))


def test_sides_that_do_not_fit_together_are_timed_in_pairs(tmp_path: Path) -> None:
    plans = {"default": {"fail": {"compile": "memory once"}}}  # when all are alive
    found = timed(tmp_path, plans)["first"]
    assert [group.sides for group in found.groups] == [("eager", "pygraph"), ("default", "pygraph")]
    assert all(len(group.rounds) == 4 and set(group.rounds[0]) == set(group.sides) for group in found.groups)
    assert found.notes == ["not all sides fit in memory at once: default; at most 2 at a time"]
    assert found.sides["default"].failure is None
    assert found.sides["default"].difference == 0.0


def test_a_side_that_is_wrong_beside_one_of_the_others_is_wrong(tmp_path: Path) -> None:
    plans = {"default": {"fail": {"compile": "memory once"}}, "pygraph": {"then": "wrong"}}
    found = timed(tmp_path, plans)["first"]
    assert [set(group.rounds[0]) for group in found.groups] == [{"eager", "pygraph"}, {"default"}]
    assert found.sides["pygraph"].difference == pytest.approx(0.5)


def test_results_are_compared_until_sizes_that_take_turns_were_replayed(tmp_path: Path) -> None:
    facts = timed(tmp_path, programs=[program(compared=32)], blocks=1)["first"].sides["pygraph"].facts
    assert facts["calls"] == 32


def test_a_side_that_never_fits_loses_its_row_alone(tmp_path: Path) -> None:
    found = timed(tmp_path, {"default": {"fail": {"warm": "memory"}}})["first"]
    assert [group.sides for group in found.groups] == [("eager",), ("default",), ("pygraph",)]
    assert found.sides["default"].failure == "memory"
    assert found.sides["pygraph"].failure is None
    assert len(found.notes) == 2


def test_a_script_that_ends_leaves_the_rounds_that_are_complete(tmp_path: Path) -> None:
    plans = {side: {"blocks": 2} for side in ("eager", "default", "pygraph")}
    found = timed(tmp_path, plans, [program(finite=True)])["first"]
    assert len(found.groups[0].rounds) == 2
    assert found.notes == ["the script ended in round 3 of 4"]
    assert all(outcome.failure is None for outcome in found.sides.values())


def test_a_program_gets_its_share_of_the_time_but_three_rounds_at_least(tmp_path: Path) -> None:
    plans = {side: {"takes": 0.2} for side in ("eager", "default", "pygraph")}
    found = timed(
        tmp_path, plans, [program("first"), *(program(f"other-{i}") for i in range(8))], seconds=12, blocks=50
    )
    assert len(found["first"].groups[0].rounds) == 3
    assert found["first"].notes == ["there was time for 3 of 50 rounds"]
    assert len(found) < 9


def test_without_time_nothing_is_started(tmp_path: Path) -> None:
    assert timed(tmp_path, seconds=0.0) == {}
    assert events(tmp_path) == []


def test_blocks_of_short_calls_are_longer_by_whole_blocks(tmp_path: Path) -> None:
    assert block_calls(30, 5000.0) == 30
    assert block_calls(30, 100.0) == 210
    assert block_calls(30, 0.0) == 30
    assert block_calls(30, 0.01) == 30 * (4000 // 30)


def test_scripts_have_blocks_of_as_many_calls_as_they_are_told(tmp_path: Path) -> None:
    short = {side: {"call_us": 1000.0} for side in ("eager", "default", "pygraph")}
    for name, finite, calls in (("script", True, 4), ("suite", False, 20)):
        folder = tmp_path / name
        folder.mkdir()
        group = timed(folder, short, [program(finite=finite)], blocks=1)["first"].groups[0]
        assert group.calls == calls
        assert group.rounds[0]["default"]["calls"] == calls


def test_no_process_survives(tmp_path: Path) -> None:
    timed(tmp_path, {"default": {"hang": "compile"}, "pygraph": {"result": "wrong"}}, seconds=3.0)
    logs = list((tmp_path / "work").rglob("*.log"))
    assert len(logs) == 3
    assert not _alive(str(tmp_path))


def _alive(marker: str) -> list[str]:
    """Command lines of running processes that mention ``marker``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if marker in text and "time.monotonic" in text:
            found.append(text)
    return found


def test_ratios_can_be_taken_within_rounds(tmp_path: Path) -> None:
    """A drift that hits all sides alike leaves no trace in them."""
    rounds = timed(tmp_path, {"default": {"wall": 6.0}})["first"].groups[0].rounds
    assert all(close_to(rows["default"]["wall_us"] / rows["pygraph"]["wall_us"], 3.0) for rows in rounds)
    assert rounds[0]["pygraph"]["wall_us"] < rounds[-1]["pygraph"]["wall_us"]
    assert json.dumps(rounds)
