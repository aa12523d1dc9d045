"""Lifetimes and the workspace: nothing alive together overlaps, nothing takes space that needs none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.contract import Layout, Slot
from pygraph.runtime.cuda.phases import phases
from pygraph.runtime.layout import Lifetime, lifetimes, pack, plan
from pygraph.runtime.recording import AllocationKind, Output, OutputKind, Recording
from tests.runtime.branches import Branched, branched
from tests.runtime.captures import Capture

POOL = AllocationKind.POOL


@st.composite
def lives(draw: st.DrawFn, max_size: int = 12, sizes: st.SearchStrategy[int] | None = None) -> list[Lifetime]:
    """Intermediates of a program of ten launches."""
    chosen = st.integers(0, 1000) if sizes is None else sizes
    spans = draw(st.lists(st.tuples(chosen, st.integers(0, 9), st.integers(0, 4)), max_size=max_size))
    return [Lifetime(index, nbytes, first, min(first + more, 9)) for index, (nbytes, first, more) in enumerate(spans)]


def lower_bound(items: list[Lifetime]) -> int:
    """Bytes that no packing can do without: the most that is alive at one launch."""
    alive = ([item for item in items if item.first <= launch <= item.last] for launch in range(10))
    return max(sum(-(-item.nbytes // 64) * 64 for item in items) for items in alive)


def end(items: list[Lifetime], offsets: dict[int, int]) -> int:
    return max((-(-(offsets[item.index] + item.nbytes) // 64) * 64 for item in items), default=0)


def assert_sound(items: list[Lifetime], offsets: dict[int, int]) -> None:
    assert sorted(offsets) == sorted(item.index for item in items)
    assert all(offset >= 0 and offset % 64 == 0 for offset in offsets.values())
    for a, b in itertools.combinations(items, 2):
        if not a.meets(b):
            continue
        apart = offsets[a.index] + a.nbytes <= offsets[b.index] or offsets[b.index] + b.nbytes <= offsets[a.index]
        assert apart or not a.nbytes or not b.nbytes


@settings(deadline=None, max_examples=200)
@given(lives())
def test_what_is_alive_together_never_overlaps(items: list[Lifetime]) -> None:
    offsets = pack(items, 64).offsets
    assert_sound(items, offsets)
    total = sum(-(-item.nbytes // 64) * 64 for item in items)
    assert lower_bound(items) <= end(items, offsets) <= total


@settings(deadline=None, max_examples=200)
@given(lives(sizes=st.just(100)))
def test_equal_sizes_are_packed_exactly(items: list[Lifetime]) -> None:
    assert pack(items, 64).nbytes == lower_bound(items)


@settings(deadline=None, max_examples=60)
@given(lives(max_size=5, sizes=st.integers(1, 4).map(lambda n: n * 64)))
def test_small_cases_are_never_far_from_the_optimum(items: list[Lifetime]) -> None:
    best = _optimum(items)
    assert lower_bound(items) <= best <= pack(items, 64).nbytes <= 2 * best


def _optimum(items: list[Lifetime]) -> int:
    """By trying every order: in some order, placing each as low as it can be is optimal."""
    best = sum(item.nbytes for item in items)
    for order in itertools.permutations(items):
        offsets: dict[int, int] = {}
        for item in order:
            taken = sorted(
                (offsets[o.index], offsets[o.index] + o.nbytes) for o in order if o.index in offsets and o.meets(item)
            )
            cursor = 0
            for low, high in taken:
                if low - cursor >= item.nbytes:
                    break
                cursor = max(cursor, high)
            offsets[item.index] = cursor
        best = min(best, end(items, offsets))
    return best


def test_a_chain_needs_room_for_two() -> None:
    chain = [Lifetime(i, 64, i, i + 1) for i in range(50)]
    assert pack(chain, 64).nbytes == 128


def _recorded() -> tuple[Capture, list[Slot]]:
    capture = Capture()
    for nbytes in (100, 64, 0, 640, 8):
        capture.pool(nbytes)
    for _ in range(4):
        capture.launch()
    slots = [
        Slot(0, 0, POOL, 0, 0),
        Slot(1, 0, POOL, 0, 0),
        Slot(1, 1, POOL, 1, 0),
        Slot(3, 0, POOL, 1, 8),
        Slot(2, 0, POOL, 2, 0),
    ]
    return capture, slots


def test_lifetimes_are_from_the_first_to_the_last_launch() -> None:
    capture, slots = _recorded()
    assert lifetimes(capture.recording(), slots, ()) == (
        Lifetime(0, 100, 0, 1),
        Lifetime(1, 64, 1, 3),
        Lifetime(2, 0, 2, 2),
    )


def test_outputs_and_untouched_allocations_take_no_workspace() -> None:
    capture, slots = _recorded()
    capture.fresh(1)
    capture.fresh(1)
    capture.fresh(4)
    capture.outputs.append(Output(OutputKind.VIEW, argument=0))
    layout = plan(capture.recording(), slots)
    assert layout.fresh == (1, 4)
    assert sorted(layout.offsets) == [0, 2]
    assert layout.nbytes == 128


def test_a_dead_intermediate_makes_room() -> None:
    capture = Capture()
    for _ in range(2):
        capture.pool(64)
        capture.launch()
    slots = [Slot(0, 0, POOL, 0, 0), Slot(1, 0, POOL, 1, 0)]
    assert plan(capture.recording(), slots).nbytes == 64
    assert plan(capture.recording(alignment=256), slots).nbytes == 256


# -- branches -----------------------------------------------------------------------------------------------------


def test_lifetimes_are_those_of_the_phases() -> None:
    capture, slots = _recorded()
    recording = replace(capture.recording(), phases=(0, 1, 1, 2))
    assert lifetimes(recording, slots, ()) == (
        Lifetime(0, 100, 0, 2),
        Lifetime(1, 64, 1, 3),
        Lifetime(2, 0, 1, 2),
    )
    assert lifetimes(replace(recording, phases=(0, 0, 0, 0)), slots, ()) == tuple(
        Lifetime(index, nbytes, 0, 3) for index, nbytes in enumerate((100, 64, 0))
    )
    assert lifetimes(replace(recording, phases=(0, 1, 2, 3)), slots, ()) == lifetimes(capture.recording(), slots, ())


SIZE = 64


@st.composite
def dataflows(draw: st.DrawFn) -> tuple[Branched, Recording, list[Slot], list[set[int]]]:
    """A branched graph whose launch i writes intermediate i, and reads some that were written on paths to it."""
    graph = draw(branched())
    before, capture = graph.before(), Capture()
    inputs: list[set[int]] = []
    for node in range(graph.count):
        earlier = [other for other in range(node) if (other, node) in before]
        inputs.append(draw(st.sets(st.sampled_from(earlier), max_size=3)) if earlier else set())
        capture.pool(SIZE * draw(st.integers(1, 2)))
        capture.launch()
    slots = [Slot(node, 0, POOL, node, 0) for node in range(graph.count)]
    slots += [Slot(node, 1 + i, POOL, other, 0) for node, read in enumerate(inputs) for i, other in enumerate(read)]
    recording = replace(capture.recording(), phases=phases(graph.count, graph.edges))
    return graph, recording, slots, inputs


@settings(deadline=None, max_examples=200)
@given(dataflows())
def test_intermediates_share_bytes_only_if_one_is_done_with_before_the_other(
    case: tuple[Branched, Recording, list[Slot], list[set[int]]],
) -> None:
    graph, recording, slots, _ = case
    layout, before = plan(recording, slots), graph.before()
    uses: dict[int, set[int]] = {}
    for slot in slots:
        uses.setdefault(slot.index, set()).add(slot.launch)
    sizes = {allocation.index: allocation.nbytes for allocation in recording.allocations}
    for a, b in itertools.permutations(uses, 2):
        low, high = layout.offsets[a], layout.offsets[b]
        if low < high + sizes[b] and high < low + sizes[a]:
            ordered = all((x, y) in before for x in uses[a] for y in uses[b])
            assert ordered or all((y, x) in before for x in uses[a] for y in uses[b])


@settings(deadline=None, max_examples=200)
@given(dataflows(), st.integers(0, 1 << 30))
def test_branches_compute_the_same_in_every_order(
    case: tuple[Branched, Recording, list[Slot], list[set[int]]], seed: int
) -> None:
    """Launches read all they read and write all they write at once, in any order that keeps the edges."""
    graph, recording, slots, inputs = case
    layout = plan(recording, slots)
    captured = _computed(range(graph.count), layout, recording, inputs)
    for number in range(4):
        assert _computed(graph.order(Random(seed + number)), layout, recording, inputs) == captured


def _computed(order: Iterable[int], layout: Layout, recording: Recording, inputs: list[set[int]]) -> dict[int, int]:
    """What each launch made of what it read, where every byte of the workspace holds a number."""
    sizes = {allocation.index: allocation.nbytes for allocation in recording.allocations}
    memory, made = [0] * layout.nbytes, {}
    for node in order:
        places = [layout.offsets[other] for other in sorted(inputs[node])]
        made[node] = hash((node, *(memory[at] for at in places), *(memory[at + SIZE - 1] for at in places)))
        begin = layout.offsets[node]
        memory[begin : begin + sizes[node]] = [made[node]] * sizes[node]
    return made


def test_branches_share_nothing_and_what_follows_them_does() -> None:
    capture = Capture()
    for _ in range(5):
        capture.pool(64)
        capture.launch()
    slots = [Slot(node, 0, POOL, node, 0) for node in range(5)]
    assert plan(capture.recording(), slots).nbytes == 64
    forked = replace(capture.recording(), phases=(0, 1, 1, 1, 2))
    assert plan(forked, slots).nbytes == 3 * 64
    assert plan(replace(forked, phases=(0, 0, 0, 0, 0)), slots).nbytes == 5 * 64
