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
OFTEN = ("gradients_are_sent_as_soon_as_they_are_known", "buffers_are_those_of_rank_0", "a_break_on_one_rank")
"""Steps of each kind: one takes some ten seconds of CPU time to compile."""
SELDOM = tuple(name for name in STEPS if name not in OFTEN)
TOGETHER = (*VOTES, *HAZARDS, *OFTEN)
"""Made by one pair of processes: until a process has compiled anything, it takes some ten seconds of CPU time. Votes
come first: ranks know their graphs by number, and in a hazard one rank may compile more of them."""
FOUR = ("captures_at_different_calls", "one_rank_evicts", "groups_take_turns", "sizes_are_each_ranks_own")
"""What depends on how many ranks there are."""


@pytest.mark.parametrize("name", HAZARDS)
def test_two_ranks_that_decide_otherwise(name: str) -> None:
    passes(2, TOGETHER, name)


@pytest.mark.parametrize("name", VOTES)
def test_two_ranks_that_vote(name: str) -> None:
    passes(2, TOGETHER, name)


@pytest.mark.parametrize("name", OFTEN)
def test_two_ranks_that_train(name: str) -> None:
    passes(2, TOGETHER, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", SELDOM)
def test_two_ranks_that_train_in_other_ways(name: str) -> None:
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


def _episodes(size: int, count: int, seconds: float) -> None:
    for rank in launch("tests.distributed.episodes", size, [str(count), "0"], seconds=seconds):
        assert [line["error"] for line in rank if "error" in line] == []
        assert rank[-1]["episodes"] == count
        assert rank[-1]["happened"]["replays"] > count


def test_random_programs_in_random_regions() -> None:
    _episodes(2, 4, 300)


@pytest.mark.sweep
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("size", "count"), [(2, 1000), (4, 100)])
def test_no_random_run_hangs(size: int, count: int) -> None:
    _episodes(size, count, 5000)
