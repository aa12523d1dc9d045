"""Compiled programs of several processes: whatever ranks decide, every rank has what it has without a compiler."""

from __future__ import annotations

import pytest

from tests.distributed import hazards, programs, steps, votes
from tests.distributed.checks import CHECKS, passes, wrong
from tests.distributed.processes import launch

HAZARDS = tuple(name for name, run in CHECKS.items() if run.__module__ == hazards.__name__)
VOTES = tuple(name for name, run in CHECKS.items() if run.__module__ == votes.__name__)
STEPS = tuple(name for name, run in CHECKS.items() if run.__module__ == steps.__name__)
PROGRAMS = tuple(name for name, run in CHECKS.items() if run.__module__ == programs.__name__)
OFTEN = {
    # ranks that vote on capturing collectives
    "all_agree",
    "one_rank_measured_it_slower",
    "one_rank_runs_other_sizes_while_it_measures",
    "all_ranks_run_other_sizes_while_they_measure",
    "each_rank_captures_in_an_order_of_its_own",
    "one_rank_tries_no_other_order",
    "one_rank_cannot_capture",
    "one_ranks_replay_is_wrong",
    "results_that_vary_are_held_against_more_runs",
    "one_rank_never_votes",
    "several_groups_stay_eager",
    "a_question_is_answered_once",
    "ranks_are_at_different_places",
    "one_ranks_call_raises",
    "one_rank_cannot_do_what_it_agreed_to",
    "a_region_is_closed_during_the_vote",
    "a_group_that_ends_takes_its_captures_along",
    # ranks that decide otherwise; the random programs have the other ways
    "captures_at_different_calls",
    "one_rank_cannot_capture_what_is_prepared",
    "one_rank_fails_to_capture",
    "one_rank_raises_in_the_middle",
    "memory_is_not_initialised",
    "one_rank_returns_what_is_not_initialised",
    "waits_stand_behind_their_collectives",
    "each_rank_has_an_order_of_its_own",
    "calls_in_a_row_keep_their_bits",
    # ranks that train, a step of which takes some ten seconds of CPU time to compile
    "gradients_are_sent_as_soon_as_they_are_known",  # with buffers
    "a_break_on_one_rank",
}
"""A check of each kind. The others are in the sweep."""
TWO = (*VOTES, *HAZARDS, *STEPS)
"""Votes come first: ranks know their graphs by number, and in a hazard one rank may compile more of them."""
assert OFTEN.issubset(TWO)
TOGETHER = tuple(name for name in TWO if name in OFTEN)
"""Made by one pair of processes: until a process has compiled anything, it takes some ten seconds of CPU time."""
SELDOM = tuple(name for name in TWO if name not in OFTEN)
FOUR = ("captures_at_different_calls", "one_rank_evicts", "groups_take_turns", "sizes_are_each_ranks_own")
"""What depends on how many ranks there are."""
EIGHT = tuple(name for name in (*VOTES, *HAZARDS) if name != "waits_stand_behind_their_collectives")
"""All but one whose matrices of four rows are split among the ranks."""


@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks(name: str) -> None:
    passes(2, TOGETHER, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", SELDOM)
def test_two_ranks_in_other_ways(name: str) -> None:
    passes(2, SELDOM, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", VOTES)
def test_four_ranks_that_vote(name: str) -> None:
    passes(4, VOTES, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_that_decide_otherwise(name: str) -> None:
    passes(4, FOUR, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks(name: str) -> None:
    passes(8, EIGHT, name)


@pytest.mark.sweep
@pytest.mark.parametrize(("size", "name"), [(size, name) for size in (2, 4) for name in PROGRAMS])
def test_programs_of_each_kind(size: int, name: str) -> None:
    passes(size, PROGRAMS, name)


@pytest.mark.sweep
def test_each_check_has_its_own_error() -> None:
    names = ("passes_everywhere", "fails_on_rank_0", "ends_rank_1", "never_made")
    found = wrong(2, names)
    assert found["passes_everywhere"] == {}
    assert list(found["fails_on_rank_0"]) == [0]
    assert "as asked" in found["fails_on_rank_0"][0]
    assert list(found["ends_rank_1"]) == [1]
    assert "rank 1: status 3\nends as asked" in found["ends_rank_1"][1]
    assert "the process ended" in found["never_made"][0]
    assert found["never_made"][1] == "not made: the process ended in ends_rank_1"
    assert wrong(2, names) is found, "processes are started once"


def episodes(size: int, count: int, seconds: float, device: str = "cpu") -> None:
    """So many random programs, which are right, and none hangs. Some capture collectives."""
    for rank in launch("tests.distributed.episodes", size, [str(count), "0", device], seconds=seconds):
        assert [line["error"] for line in rank if "error" in line] == []
        assert rank[-1]["episodes"] == count
        happened = rank[-1]["happened"]
        assert happened["replays"] > count
        assert happened["votes"] > count / 20, happened
        assert happened["collectives are captured"] >= count // 100, happened


def test_random_programs_in_random_regions() -> None:
    episodes(2, 8, 300)


@pytest.mark.sweep
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("size", "count"), [(2, 1000), (4, 100), (8, 20)])
def test_no_random_run_hangs(size: int, count: int) -> None:
    episodes(size, count, 5000)
