"""The layered layout: edges lead down, boxes never overlap, and a picture stays within its frame."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.report.layout import GAP, arrange


@st.composite
def drawings(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, int]]]:
    """Widths of boxes, and edges from lower to higher ones."""
    widths = draw(st.lists(st.floats(10, 200), min_size=1, max_size=20))
    pairs = st.tuples(st.integers(0, len(widths) - 1), st.integers(0, len(widths) - 1))
    edges = draw(st.lists(pairs.filter(lambda pair: pair[0] < pair[1]), max_size=40)) if len(widths) > 1 else []
    return widths, edges


@given(drawings())
@settings(deadline=None, max_examples=100)
def test_edges_lead_down_and_boxes_never_overlap(drawing: tuple[list[float], list[tuple[int, int]]]) -> None:
    widths, edges = drawing
    layout = arrange(widths, edges)
    for (a, b), bends in zip(edges, layout.bends, strict=True):
        assert layout.layer[a] < layout.layer[b]
        assert len(bends) in (0, layout.layer[b] - layout.layer[a] - 1)
    rows: dict[int, list[int]] = {}
    for box, row in enumerate(layout.layer):
        rows.setdefault(row, []).append(box)
    for row in rows.values():
        row.sort(key=lambda box: layout.x[box])
        for one, other in itertools.pairwise(row):
            assert layout.x[other] - layout.x[one] >= (widths[one] + widths[other]) / 2 + GAP - 1e-6
    assert all(
        width / 2 - 1e-6 <= x <= layout.width - width / 2 + 1e-6 for x, width in zip(layout.x, widths, strict=True)
    )


def test_no_box_at_all() -> None:
    layout = arrange([], [])
    assert (layout.rows, layout.width) == (0, 0)


def test_a_chain_is_straight() -> None:
    layout = arrange([40.0, 60.0, 20.0], [(0, 1), (1, 2)])
    assert layout.layer == (0, 1, 2)
    assert layout.x == pytest.approx((30.0, 30.0, 30.0))


def test_a_weight_stands_just_above_its_user() -> None:
    """A source that is used late, like the transpose of a weight, does not stand in the first row."""
    layout = arrange([40.0] * 5, [(0, 1), (1, 2), (2, 4), (3, 4)])
    assert layout.layer == (0, 1, 2, 2, 3)


def test_crossings_are_undone() -> None:
    layout = arrange([20.0] * 4, [(0, 3), (1, 2)])
    assert (layout.x[0] < layout.x[1]) == (layout.x[3] < layout.x[2])
