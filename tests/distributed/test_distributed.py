"""Compiled programs of several processes: whatever ranks decide, every rank has what it has without a compiler."""

from __future__ import annotations

import functools

import pytest

from tests.distributed import hazards, programs, steps, votes
from tests.distributed.checks import CHECKS
from tests.distributed.processes import launch

HAZARDS = tuple(name for name, run in CHECKS.items() if run.__module__ == hazards.__name__)
VOTES = tuple(name for name, run in CHECKS.items() if run.__module__ == votes.__name__)
STEPS = tuple(name for name, run in CHECKS.items() if run.__module__ == steps.__name__)
PROGRAMS = tuple(name for name, run in CHECKS.items() if run.__module__ == programs.__name__)
FOUR = ("captures_at_different_calls", "one_rank_evicts", "groups_take_turns", "sizes_are_each_ranks_own")
"""What depends on how many ranks there are."""


@functools.cache
def found(size: int, names: tuple[str, ...]) -> list[dict[str, str | None]]:
    """The error of each check, by rank."""
    said = launch("tests.distributed", size, [",".join(names)], seconds=600)
    return [{line["name"]: line["error"] for line in rank} for rank in said]


def agree(size: int, names: tuple[str, ...], name: str) -> None:
    errors = {number: rank[name] for number, rank in enumerate(found(size, names)) if rank[name] is not None}
    assert not errors, "\n".join(f"rank {number}: {error}" for number, error in errors.items())


@pytest.mark.parametrize("name", HAZARDS)
def test_two_ranks_that_decide_otherwise(name: str) -> None:
    agree(2, HAZARDS, name)


@pytest.mark.parametrize("name", VOTES)
def test_two_ranks_that_vote(name: str) -> None:
    agree(2, VOTES, name)


@pytest.mark.parametrize("name", STEPS)
def test_two_ranks_that_train(name: str) -> None:
    agree(2, STEPS, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", VOTES)
def test_four_ranks_that_vote(name: str) -> None:
    agree(4, VOTES, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_that_decide_otherwise(name: str) -> None:
    agree(4, FOUR, name)


@pytest.mark.sweep
@pytest.mark.parametrize(("size", "name"), [(size, name) for size in (2, 4) for name in PROGRAMS])
def test_programs_of_each_kind(size: int, name: str) -> None:
    agree(size, PROGRAMS, name)


def _episodes(size: int, count: int, seconds: float) -> None:
    for rank in launch("tests.distributed.episodes", size, [str(count), "0"], seconds=seconds):
        assert [line["error"] for line in rank if "error" in line] == []
        assert rank[-1]["episodes"] == count
        assert rank[-1]["happened"]["replays"] > count


def test_random_programs_in_random_regions() -> None:
    _episodes(2, 8, 300)


@pytest.mark.sweep
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("size", "count"), [(2, 1000), (4, 100)])
def test_no_random_run_hangs(size: int, count: int) -> None:
    _episodes(size, count, 5000)
