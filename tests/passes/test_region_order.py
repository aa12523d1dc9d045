"""Orders of steps with few runs, on bare positions; whole partitions are held against brute force in property tests."""

from __future__ import annotations

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.passes.region_order import Kind, fewest_runs, runs, settle


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[Kind], list[list[int]]]:
    kinds = draw(st.lists(st.sampled_from([Kind.LAUNCHES, Kind.OUTSIDE, Kind.EAGER]), max_size=6))
    return kinds, [[p for p in range(i) if draw(st.booleans())] for i in range(len(kinds))]


def is_topological(order: tuple[int, ...], before: list[list[int]]) -> bool:
    place = {node: i for i, node in enumerate(order)}
    return all(place[p] < place[i] for i, sources in enumerate(before) for p in sources)


@settings(max_examples=150)
@given(dags())
def test_no_topological_order_has_fewer_runs(dag: tuple[list[Kind], list[list[int]]]) -> None:
    kinds, before = dag
    order = fewest_runs(kinds, before)
    assert is_topological(tuple(order), before)
    best = min(
        len(runs([kinds[i] for i in candidate]))
        for candidate in itertools.permutations(range(len(kinds)))
        if is_topological(candidate, before)
    )
    assert len(runs([kinds[i] for i in order])) == best


@settings(max_examples=150)
@given(st.lists(st.sampled_from([Kind.LAUNCHES, Kind.OUTSIDE, Kind.EAGER]), max_size=12))
def test_runs_begin_and_end_with_launches_and_are_as_long_as_can_be(kinds: list[Kind]) -> None:
    text = "".join({Kind.LAUNCHES: "l", Kind.OUTSIDE: "o", Kind.EAGER: "e"}[kind] for kind in kinds)
    expected = [match.span() for match in re.finditer("l[le]*l|l", text)]
    assert [(run.start, run.stop) for run in runs(kinds)] == expected


def test_a_region_is_cut_where_it_has_to_wait() -> None:
    turns, units, before = [1, 1, 1, 3], [0, None, 0, 1], [[], [0], [1], [2]]
    assert settle(turns, units, before) == [(1, 0, 0), (1, 1, None), (1, 2, 0), (3, 0, 1)]


def test_a_step_that_depends_on_a_later_region_runs_behind_it() -> None:
    assert settle([3, 1, 3], [1, 0, 1], [[], [0], []]) == [(3, 0, 1), (3, 1, 0), (3, 0, 1)]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[int | None], list[int | None], list[list[int]]]:
    """Steps with turns, of which odd ones are regions; some without a turn, some that the host has to run after all."""
    turns = draw(st.lists(st.none() | st.integers(0, 7), max_size=10))
    regions = [turn if turn is not None and turn % 2 and draw(st.integers(0, 4)) else None for turn in turns]
    return turns, regions, [[p for p in range(i) if draw(st.integers(0, 3)) == 0] for i in range(len(turns))]


@settings(max_examples=150)
@given(drawn())
def test_times_follow_dependences_and_no_unit_spans_two(case: tuple[list[int | None], ...]) -> None:
    turns, units, before = case
    times = settle(turns, units, before)
    for v, (turn, part, unit) in enumerate(times):
        assert turn >= (turns[v] or 0)
        assert unit == units[v] or turns[v] is None
        for p in before[v]:
            assert times[p][:2] < (turn, part) or times[p] == (turn, part, unit)
    if all(times[p][0] <= (turns[v] or 0) for v in range(len(turns)) for p in before[v]):
        assert all(time[0] == turns[v] for v, time in enumerate(times) if turns[v] is not None)
