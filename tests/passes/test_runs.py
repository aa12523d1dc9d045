"""Ordering steps into the fewest runs, held against brute force over all topological orders."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.passes.region_order import count_runs, fewest_runs


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[bool], list[list[int]]]:
    size = draw(st.integers(0, 6))
    inside = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    before = [[p for p in range(i) if draw(st.booleans())] for i in range(size)]
    return inside, before


def is_topological(order: tuple[int, ...], before: list[list[int]]) -> bool:
    place = {node: i for i, node in enumerate(order)}
    return all(place[p] < place[i] for i, sources in enumerate(before) for p in sources)


@settings(max_examples=150, deadline=None)
@given(dags())
def test_no_topological_order_has_fewer_runs(dag: tuple[list[bool], list[list[int]]]) -> None:
    inside, before = dag
    order = fewest_runs(inside, before)
    assert sorted(order) == list(range(len(inside)))
    assert is_topological(tuple(order), before)
    best = min(
        count_runs([inside[i] for i in candidate])
        for candidate in itertools.permutations(range(len(inside)))
        if is_topological(candidate, before)
    )
    assert count_runs([inside[i] for i in order]) == best


def test_a_chain_keeps_its_order_and_runs() -> None:
    inside = [True, False, True, False, True]
    assert fewest_runs(inside, [[], [0], [1], [2], [3]]) == [0, 1, 2, 3, 4]
    assert count_runs(inside) == 3


def test_two_independent_cuts_are_merged() -> None:
    inside = [True, False, True, False, True]
    order = fewest_runs(inside, [[], [0], [], [2], [1, 3]])
    assert order == [0, 2, 1, 3, 4]
    assert count_runs([inside[i] for i in order]) == 2
