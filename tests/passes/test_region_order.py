"""Orders of steps with few runs, on bare positions; whole partitions are held against brute force in property tests."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.passes.region_order import count_runs, fewest_runs


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
