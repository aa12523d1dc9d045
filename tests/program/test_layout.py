"""Lifetimes and the workspace: nothing alive together overlaps, nothing takes space that needs none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.program.layout import Lifetime, lifetimes, pack
from pygraph.program.program import Slot
from pygraph.program.recording import AllocationKind, Output, OutputKind
from pygraph.runtime.cuda.phases import phases
from tests.program.layouts import meets, plan
from tests.runtime.branches import Branched, branched
from tests.runtime.captures import Capture

POOL = AllocationKind.POOL


@st.composite
def lives(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> list[Lifetime]:
    """Intermediates of a program of ten launches."""
    spans = draw(st.lists(st.tuples(sizes, st.integers(0, 9), st.integers(0, 4)), max_size=12))
    return [Lifetime(index, nbytes, first, min(first + more, 9)) for index, (nbytes, first, more) in enumerate(spans)]


def aligned(items: list[Lifetime]) -> int:
    """The bytes of all, each a multiple of 64."""
    return sum(-(-item.nbytes // 64) * 64 for item in items)


def lower_bound(items: list[Lifetime]) -> int:
    """Bytes that no packing can do without: the most that is alive at one launch."""
    return max(aligned([item for item in items if item.first <= launch <= item.last]) for launch in range(10))


@settings(max_examples=200)
@given(lives(st.integers(0, 1000)))
def test_what_is_alive_together_never_overlaps(items: list[Lifetime]) -> None:
    layout = pack(items, 64)
    offsets = layout.offsets
    assert sorted(offsets) == sorted(item.index for item in items)
    assert all(offset >= 0 and offset % 64 == 0 for offset in offsets.values())
    assert all(offsets[item.index] + item.nbytes <= layout.nbytes for item in items)
    assert lower_bound(items) <= layout.nbytes <= aligned(items)
    for a, b in itertools.combinations(items, 2):
        apart = offsets[a.index] + a.nbytes <= offsets[b.index] or offsets[b.index] + b.nbytes <= offsets[a.index]
        assert apart or not meets(a, b) or not a.nbytes or not b.nbytes


@settings(max_examples=200)
@given(lives(st.just(100)))
def test_equal_sizes_are_packed_exactly(items: list[Lifetime]) -> None:
    assert pack(items, 64).nbytes == lower_bound(items)


def recorded() -> tuple[Capture, list[Slot]]:
    """Launches that use three of five intermediates."""
    capture = Capture()
    for nbytes in (100, 64, 0, 640, 8):
        capture.pool(nbytes)
    for _ in range(4):
        capture.launch()
    places = [(0, 0), (1, 0), (1, 1), (3, 1), (2, 2)]
    return capture, [Slot(launch, index, POOL, index, 8 * launch) for launch, index in places]


@pytest.mark.parametrize(
    ("order", "spans"),
    [
        ((), [(0, 1), (1, 3), (2, 2)]),
        ((0, 1, 2, 3), [(0, 1), (1, 3), (2, 2)]),
        ((0, 1, 1, 2), [(0, 2), (1, 3), (1, 2)]),
        ((0, 0, 0, 0), [(0, 3)] * 3),
    ],
)
def test_lifetimes_are_from_the_first_phase_to_the_last(order: tuple[int, ...], spans: list[tuple[int, int]]) -> None:
    capture, slots = recorded()
    expected = [Lifetime(index, nbytes, *spans[index]) for index, nbytes in enumerate((100, 64, 0))]
    assert lifetimes(capture.recording(phases=order), slots, ()) == tuple(expected)


def test_outputs_and_untouched_allocations_take_no_workspace() -> None:
    capture, slots = recorded()
    for index in (1, 1, 4):
        capture.fresh(index)
    capture.outputs.append(Output(OutputKind.VIEW, 0))
    layout = plan(capture.recording(), slots)
    assert layout.fresh == (1, 4)
    assert sorted(layout.offsets) == [0, 2]
    assert layout.nbytes == 128
    assert plan(capture.recording(alignment=256), slots).nbytes == 256


# -- branches ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(branched(), st.data())
def test_intermediates_share_bytes_only_if_one_is_done_with_before_the_other(
    graph: Branched, data: st.DataObject
) -> None:
    """Launch i writes intermediate i, and reads some that were written on paths to it."""
    before, capture = graph.before(), Capture()
    slots: list[Slot] = []
    for node in range(graph.count):
        earlier = [other for other in range(node) if (other, node) in before]
        read = data.draw(st.sets(st.sampled_from(earlier), max_size=3)) if earlier else set()
        slots += [Slot(node, word, POOL, index, 0) for word, index in enumerate((node, *read))]
        capture.pool(64 * data.draw(st.integers(1, 2)))
        capture.launch()
    layout = plan(capture.recording(phases=phases(graph.count, graph.edges)), slots)
    ends = {a.index: layout.offsets[a.index] + a.nbytes for a in capture.allocations}
    for a, b in itertools.permutations(ends, 2):
        if layout.offsets[a] < ends[b] and layout.offsets[b] < ends[a]:
            pairs = [(x.launch, y.launch) for x in slots for y in slots if (x.index, y.index) == (a, b)]
            assert before.issuperset(pairs) or before.issuperset((y, x) for x, y in pairs)
