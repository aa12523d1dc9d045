"""Orders of steps with few runs, on bare positions; whole partitions are held against brute force in property tests."""

from __future__ import annotations

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.passes.region_order import Kind, fewest_runs, runs


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[Kind], list[list[int]]]:
    kinds = draw(st.lists(st.sampled_from([Kind.LAUNCHES, Kind.OUTSIDE, Kind.EAGER]), max_size=6))
    return kinds, [[p for p in range(i) if draw(st.booleans())] for i in range(len(kinds))]


def is_topological(order: tuple[int, ...], before: list[list[int]]) -> bool:
    place = {node: i for i, node in enumerate(order)}
    return all(place[p] < place[i] for i, sources in enumerate(before) for p in sources)


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([Kind.LAUNCHES, Kind.OUTSIDE, Kind.EAGER]), max_size=12))
def test_runs_begin_and_end_with_launches_and_are_as_long_as_can_be(kinds: list[Kind]) -> None:
    text = "".join({Kind.LAUNCHES: "l", Kind.OUTSIDE: "o", Kind.EAGER: "e"}[kind] for kind in kinds)
    expected = [match.span() for match in re.finditer("l[le]*l|l", text)]
    assert [(run.start, run.stop) for run in runs(kinds)] == expected
