"""The order of regions on bare positions; whole partitions are held against brute force in ``tests/property``."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.passes.region_order import Kind, assign, count_runs, earliest, fewest_runs, unit_order

L, F, O, U = Kind.LAUNCHES, Kind.FREE, Kind.OUTSIDE, Kind.UPLOAD  # noqa: E741 - read side by side in the cases below
CHAIN = [[], [0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("kinds", "before", "times"),
    [
        ([L, O, L, L, O], [[], [0], [1], [0], [3]], [1, 2, 3, 1, 2]),
        ([L, O, F, O, L], CHAIN, [1, 2, 2, 2, 3]),
        ([L, U, O, U, L], CHAIN, [1, 3, 4, 5, 5]),
    ],
    ids=["turns", "free nodes make no turn", "an upload begins a turn"],
)
def test_each_step_runs_at_the_earliest_turn(kinds: list[Kind], before: list[list[int]], times: list[int]) -> None:
    assert earliest(kinds, before) == times


@pytest.mark.parametrize(
    ("kinds", "before", "times"),
    [
        ([L, O, L, L], [[], [0], [], [1, 2]], [1, 2, 3, 3]),
        ([L, O, L, O, L], [[], [0], [], [2], [1, 3]], [1, 2, 1, 2, 3]),
        ([L, F, O, L], [[], [0], [0], [1, 2]], [1, 3, 2, 3]),
        ([L, O, F, O, L], CHAIN, [1, 2, 2, 2, 3]),
    ],
    ids=["a launch stays at its turn", "the host waits for it", "free with its first user", "free without a region"],
)
def test_steps_move_to_the_region_where_the_program_has_them(
    kinds: list[Kind], before: list[list[int]], times: list[int]
) -> None:
    early = earliest(kinds, before)
    after = [[v for v, sources in enumerate(before) if p in sources] for p in range(len(kinds))]
    assert assign(kinds, after, early, sorted({t for t, k in zip(early, kinds, strict=True) if k is L})) == times


def test_order_keeps_regions_together_and_the_rest_in_place() -> None:
    # 1 and 3 are one region; 2 may follow it, 0 and 4 stay where they are
    assert unit_order([0, 1, 2, 1, 4], [[], [0], [], [1], []]) == [0, 1, 3, 2, 4]


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[bool], list[list[int]]]:
    inside = draw(st.lists(st.booleans(), max_size=6))
    return inside, [[p for p in range(i) if draw(st.booleans())] for i in range(len(inside))]


def is_topological(order: tuple[int, ...], before: list[list[int]]) -> bool:
    place = {node: i for i, node in enumerate(order)}
    return all(place[p] < place[i] for i, sources in enumerate(before) for p in sources)


@settings(max_examples=150, deadline=None)
@given(dags())
def test_no_topological_order_has_fewer_runs(dag: tuple[list[bool], list[list[int]]]) -> None:
    inside, before = dag
    order = fewest_runs(inside, before)
    assert is_topological(tuple(order), before)
    best = min(
        count_runs([inside[i] for i in candidate])
        for candidate in itertools.permutations(range(len(inside)))
        if is_topological(candidate, before)
    )
    assert count_runs([inside[i] for i in order]) == best
