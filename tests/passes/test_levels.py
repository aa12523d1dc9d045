"""The algorithm of partitioning on bare positions, against brute force over every partition of small DAGs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.passes.region_order import Kind, assign, earliest, unit_order
from tests.passes.brute_force import Lists, acyclic, fewer_regions, inverse

L, F, O = Kind.LAUNCHES, Kind.FREE, Kind.OUTSIDE  # noqa: E741 - read side by side in the cases below


@st.composite
def dags(draw: st.DrawFn, most: int) -> tuple[list[Kind], Lists]:
    """Kinds, and for each position the earlier positions that it depends on."""
    kinds = draw(st.lists(st.sampled_from([L, L, F, O]), min_size=1, max_size=most))
    before = [sorted(draw(st.sets(st.integers(0, v - 1), max_size=3))) if v else [] for v in range(len(kinds))]
    return kinds, before


def solve(kinds: list[Kind], before: Lists, limit: int | None = None) -> tuple[list[int], list[int], list[int]]:
    """Times, kept region times, and each position's unit (its region's first member, or itself)."""
    early = earliest(kinds, before)
    levels = sorted({t for t, kind in zip(early, kinds, strict=True) if kind is L})
    kept = levels[:limit]
    times = assign(kinds, inverse(before), early, kept)
    first: dict[int, int] = {}
    units = [
        first.setdefault(t, v) if k is not O and t in kept else v
        for v, (t, k) in enumerate(zip(times, kinds, strict=True))
    ]
    return times, kept, units


def test_turns_of_host_and_device() -> None:
    #        0  1  2  3  4
    kinds = [L, O, L, L, O]
    before = [[], [0], [1], [0], [3]]
    assert earliest(kinds, before) == [1, 2, 3, 1, 2]


def test_free_nodes_make_no_turn() -> None:
    assert earliest([L, O, F, O, L], [[], [0], [1], [2], [3]]) == [1, 2, 2, 2, 3]


def test_a_launch_stays_at_its_turn_in_the_program() -> None:
    # 0: launch, 1: host, 2: launch that needs only the input, 3: launch that needs the host's result and 2
    times, _, _ = solve([L, O, L, L], [[], [0], [], [1, 2]])
    assert times == [1, 2, 3, 3]


def test_a_launch_that_the_host_waits_for_runs_early() -> None:
    times, _, _ = solve([L, O, L, O, L], [[], [0], [], [2], [1, 3]])
    assert times == [1, 2, 1, 2, 3]


def test_a_free_node_goes_with_its_first_user() -> None:
    times, _, units = solve([L, F, O, L], [[], [0], [0], [1, 2]])
    assert times == [1, 3, 2, 3]
    assert units == [0, 1, 2, 1]


def test_a_free_node_between_two_host_nodes_stays_outside() -> None:
    times, kept, units = solve([L, O, F, O, L], [[], [0], [1], [2], [3]])
    assert kept == [1, 3]
    assert times[2] == 2
    assert units == [0, 1, 2, 3, 4]


def test_order_keeps_regions_together_and_the_rest_in_place() -> None:
    # 1 and 3 are one region; 2 may follow it, 0 and 4 stay where they are
    assert unit_order([0, 1, 2, 1, 4], [[], [0], [], [1], []]) == [0, 1, 3, 2, 4]


@settings(deadline=None, max_examples=400)
@given(dags(7))
def test_fewest_regions_of_all_partitions(dag: tuple[list[Kind], Lists]) -> None:
    kinds, before = dag
    _, kept, units = solve(kinds, before)
    assert acyclic(units, before)
    better = fewer_regions(kinds, before, len(kept))
    assert better is None, f"{kinds} {before}: {better} has fewer regions than {units}"


@settings(deadline=None, max_examples=300)
@given(dags(40), st.none() | st.integers(0, 3))
def test_regions_are_sound_at_any_limit(dag: tuple[list[Kind], Lists], limit: int | None) -> None:
    kinds, before = dag
    times, kept, units = solve(kinds, before, limit)
    inside = [k is not O and t in kept for k, t in zip(kinds, times, strict=True)]
    assert acyclic(units, before)
    assert all(times[p] <= times[v] for v, sources in enumerate(before) for p in sources)
    assert all(inside[v] for v, kind in enumerate(kinds) if kind is L) or limit is not None
    for time in {t for t, i in zip(times, inside, strict=True) if i}:
        assert any(t == time and i and k is L for t, i, k in zip(times, inside, kinds, strict=True))


@settings(deadline=None, max_examples=300)
@given(dags(40))
def test_order_is_topological_with_units_adjacent(dag: tuple[list[Kind], Lists]) -> None:
    kinds, before = dag
    _, _, units = solve(kinds, before)
    order = unit_order(units, before)
    place = {v: i for i, v in enumerate(order)}
    assert sorted(order) == list(range(len(kinds)))
    assert all(place[p] < place[v] for v, sources in enumerate(before) for p in sources)
    runs = [units[v] for i, v in enumerate(order) if i == 0 or units[order[i - 1]] != units[v]]
    assert len(runs) == len(set(runs))
