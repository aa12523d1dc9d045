"""Launches in any order that their dependences allow: the same bits, in programs of Inductor's and in made-up ones.

The dependences themselves are held against the definition, pair by pair; their work grows with the launches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import CaptureError
from pygraph.program import steps
from pygraph.program.default import DefaultPasses, ordered
from pygraph.program.dependences import in_lanes, order_of
from pygraph.program.layout import Lifetime, lifetimes, pack
from pygraph.program.order import Order
from pygraph.program.program import Program, Slot
from pygraph.program.recording import Access, AllocationKind, Bytes, Recording
from pygraph.program.steps import cut, uncaptured_peak, with_steps
from pygraph.program.verify import verify_edges
from tests.program.layouts import meets, plan
from tests.program.programs import recordings
from tests.property.test_region_replays import Machine, draw_places
from tests.runtime.captures import Capture, reads, writes
from tests.runtime.fake import BYTES
from tests.runtime.programs import PROGRAMS, region_calls
from tests.runtime.regions import compile_regions
from tests.work import work

INPUT, POOL, CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT

# -- bytes -------------------------------------------------------------------------------------------------------------

layouts = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 24)), max_size=3)


def elements(start: int, layout: list[tuple[int, int]], itemsize: int) -> set[int]:
    found = {start}
    for count, stride in layout:
        found = {place + step * stride * itemsize for place in found for step in range(count)}
    return {place + byte for place in found for byte in range(itemsize)}


@given(st.integers(0, 40), layouts, st.integers(0, 40), layouts, st.sampled_from([1, 2, 4]))
def test_bytes_that_do_not_meet_have_none_in_common(
    start: int, one: list[tuple[int, int]], other_start: int, other: list[tuple[int, int]], itemsize: int
) -> None:
    a, b = (
        Bytes.of(at * itemsize, [n for n, _ in layout], [s for _, s in layout], itemsize)
        for at, layout in ((start, one), (other_start, other))
    )
    left, right = elements(start * itemsize, one, itemsize), elements(other_start * itemsize, other, itemsize)
    assert min(left) >= a.start
    assert max(left) < a.end
    assert a.meets(b) == b.meets(a)
    if left & right:
        assert a.meets(b)
    if a.covers(b):
        assert right <= set(range(a.start, a.end))


def test_slices_of_channels_are_apart_whichever_axis_comes_last() -> None:
    def slices(channels_last: bool) -> list[Bytes]:
        size, whole = (1, 64, 7, 7), 192
        stride = (49 * whole, 1, 7 * whole, whole) if channels_last else (49 * whole, 49, 7, 1)
        step = 64 if channels_last else 64 * 49
        return [Bytes.of(number * step * 2, size, stride, 2) for number in range(3)]

    for made in (slices(True), slices(False)):
        assert not any(a.meets(b) for a, b in combinations(made, 2))
        assert all(Bytes(0, 64 * 49 * 3 * 2).covers(each) for each in made)
    assert slices(True)[0].meets(slices(False)[0])


# -- dependences -------------------------------------------------------------------------------------------------------


def conflict(recording: Recording, slots: list[Slot], one: int, other: int) -> bool:
    """The definition."""
    a, b = recording.launches[one], recording.launches[other]
    if any(launch.uses is None and launch.operands is None for launch in (a, b)):
        return True
    if (a.random and b.random) or (a.call is not None and b.call is not None):
        return True

    def used(index: int) -> list[tuple[Any, int, int, bool]]:
        launch = recording.launches[index]
        if launch.operands is not None:
            return [(x.key, x.bytes.start, x.bytes.end, x.writes) for x in launch.operands]
        places = {slot.word: (slot.key, slot.offset) for slot in slots if slot.launch == index}
        found = []
        for use in launch.uses or ():
            key, at = places.get(use.word, ((CONSTANT, 0), launch.words[use.word] - 0x5500_0000_0000))
            found.append((key, at, at + use.nbytes, use.writes))
        return found

    return any(
        key == their and (w or their_w) and start < their_end and their_start < end
        for key, start, end, w in used(one)
        for their, their_start, their_end, their_w in used(other)
    )


@settings(max_examples=50)
@given(recordings())
def test_exactly_what_conflicts_is_ordered_and_no_edge_says_what_others_say(made: tuple[Recording, list[Slot]]) -> None:
    recording, slots = made
    order, count = order_of(recording, slots), len(recording.launches)
    expected = [0] * count
    for later in range(count):
        for earlier in range(later):
            if conflict(recording, slots, earlier, later):
                expected[later] |= expected[earlier] | 1 << earlier
    assert list(order.before) == expected
    for later, waited in enumerate(order.edges):
        assert not any(order.before[b] >> a & 1 for a, b in combinations(waited, 2)), "a path says it already"
        reached = 0
        for earlier in waited:
            reached |= order.before[earlier] | 1 << earlier
        assert reached == order.before[later]


@settings(max_examples=40)
@given(recordings(), st.integers(1, 3))
def test_no_more_launches_run_side_by_side_than_there_are_lanes(made: tuple[Recording, list[Slot]], lanes: int) -> None:
    order = order_of(*made)
    narrowed = in_lanes(order, lanes)
    for launch, (before, known) in enumerate(zip(narrowed.before, order.before, strict=True)):
        assert before & known == known
        assert before < 1 << launch
    for beside in combinations(range(len(order.edges)), lanes + 1):
        assert any(narrowed.before[later] >> earlier & 1 for earlier, later in combinations(beside, 2))
    if lanes == 1:
        assert narrowed.longest_path() == len(order.edges)


def test_a_lane_is_left_to_what_can_start_there_first() -> None:
    """Two chains of three, emitted one after the other, and what needs both: two lanes hold back nothing."""
    chains = Order.of([set(), {0}, {1}, set(), {3}, {4}, {2, 5}])
    assert in_lanes(chains, 2) == replace(chains, lanes=(0, 0, 0, 1, 1, 1, 0))
    assert chains.critical() == {0, 1, 2, 3, 4, 5, 6}
    assert Order.of([set(), {0}, set(), {1, 2}]).critical() == {0, 1, 3}
    assert Order.of([]).critical() == frozenset()


def test_launches_with_time_to_spare_share_a_lane() -> None:
    """A chain of which each third launch also needs one that needs nothing."""
    chain = Order.of([set(), {0}, set(), {1, 2}, {3}, {4}, set(), {5, 6}, {7}, {8}, set(), {9, 10}])
    narrowed = in_lanes(chain, 8)
    assert narrowed.lanes == (0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0)
    assert narrowed.longest_path() == chain.longest_path() == 9


def test_a_launch_that_would_come_just_in_time_from_another_lane_gets_one_of_its_own() -> None:
    """Query, key and value of attention, each rearranged: the value is needed two launches later than the others."""
    attention = Order.of([set(), {0}, {0}, {1}, {2}, {3, 4}, {5}, {0}, {7}, {6, 8}])
    assert in_lanes(attention, 8).lanes == (0, 0, 1, 0, 1, 1, 1, 2, 2, 1)
    assert in_lanes(attention, 2).lanes == (0, 0, 1, 0, 1, 1, 1, 0, 0, 1)


@settings(max_examples=50)
@given(recordings(), st.integers(0, 3))
def test_memory_is_shared_by_what_is_ordered_and_by_nothing_else(
    made: tuple[Recording, list[Slot]], lanes: int
) -> None:
    recording, slots = made
    order = in_lanes(order_of(recording, slots), lanes) if lanes else order_of(recording, slots)
    lives = lifetimes(recording, slots, (), order)
    layout = pack(lives, 8)
    for a, b in combinations(lives, 2):
        mine, theirs = ([s.launch for s in slots if s.key == (POOL, x.index)] for x in (a, b))
        one_way = all(order.before[j] >> i & 1 for i in mine for j in theirs)
        other_way = all(order.before[i] >> j & 1 for i in mine for j in theirs)
        assert meets(a, b) == meets(b, a) == (not one_way and not other_way)
        assert abs(layout.offsets[a.index] - layout.offsets[b.index]) == (8 if meets(a, b) else 0)


@settings(max_examples=40)
@given(recordings(), st.data())
def test_each_edge_is_missed_by_the_proof(made: tuple[Recording, list[Slot]], data: st.DataObject) -> None:
    recording, slots = made
    order = order_of(recording, slots)
    program = with_steps(Program(recording, tuple(slots), plan(recording, slots, order), order=order))
    assert len(program.steps) == 1
    edges = [(earlier, later) for later, waited in enumerate(order.edges) for earlier in waited]
    verify_edges(program, edges)
    if edges:
        left = data.draw(st.sampled_from(edges))
        with pytest.raises(CaptureError, match="does not wait"):
            verify_edges(program, [edge for edge in edges if edge != left])


@settings(max_examples=40)
@given(recordings(), st.data())
def test_launches_that_are_dropped_order_the_others_as_before(
    made: tuple[Recording, list[Slot]], data: st.DataObject
) -> None:
    recording, slots = made
    order = order_of(recording, slots)
    dropped = data.draw(st.sets(st.sampled_from(range(len(order.edges)))))
    left = order.without(dropped)
    mask = sum(1 << launch for launch in dropped)
    assert [before & ~mask for before in order.before] == list(left.before)
    program = with_steps(Program(recording, tuple(slots), plan(recording, slots, order), order=order))
    edges = [(a, b) for b, waited in enumerate(left.edges) for a in waited if b not in dropped]
    verify_edges(program, edges, dropped)
    kept = combinations([launch for launch in range(len(order.edges)) if launch not in dropped], 2)
    pairs = [pair for pair in kept if conflict(recording, slots, *pair)]
    if pairs:
        _, alone = data.draw(st.sampled_from(pairs))
        with pytest.raises(CaptureError, match="does not wait"):
            verify_edges(program, [edge for edge in edges if edge[1] != alone], dropped)


def test_memory_that_is_shared_without_order_is_found_by_the_proof() -> None:
    """Two chains of two launches each: after the first chain, its intermediate's memory serves the second one."""
    capture, slots = Capture(), list[Slot]()
    for chain in range(2):
        x, made, out = capture.input(64), capture.pool(64), capture.input(64)
        capture.launch(x, made, uses=[reads(0, 64), writes(1, 64)])
        capture.launch(made, out, uses=[reads(0, 64), writes(1, 64)])
        words = [(INPUT, 2 * chain), (POOL, chain), (POOL, chain), (INPUT, 2 * chain + 1)]
        slots += [Slot(2 * chain + word // 2, word % 2, *key, 0) for word, key in enumerate(words)]
    recording, chains = capture.recording(), [(0, 1), (2, 3)]
    order = order_of(recording, slots)
    assert order.edges == ((), (0,), (), (2,))
    serial = with_steps(Program(recording, tuple(slots), plan(recording, slots), order=order))
    with pytest.raises(CaptureError, match=r"l2 \(kernel\) does not wait for l0"):
        verify_edges(serial, chains)
    verify_edges(serial, [*chains, (1, 2)])
    apart = plan(recording, slots, order)
    assert (serial.layout.nbytes, apart.nbytes) == (64, 128)
    verify_edges(with_steps(replace(serial, layout=apart)), chains)


def test_a_kernel_that_finds_addresses_in_memory_waits_and_is_waited_for() -> None:
    """A call of two launches: one leaves the addresses of x and out in a table, the other one has the table's alone."""
    capture = Capture()
    x, table, out, spare, after = (
        capture.pool(64),
        capture.pool(64),
        capture.pool(64),
        capture.pool(64),
        capture.input(64),
    )
    given = (Access((POOL, 0), Bytes(0, 64), writes=False),)
    capture.launch(x, uses=[writes(0, 64)])
    capture.launch(x, out, table, operands=given, group=0)
    capture.launch(table, operands=given, group=0)
    capture.launch(out, after, uses=[reads(0, 64), writes(1, 64)])
    capture.launch(spare, uses=[writes(0, 64)])
    capture.launch(x, capture.pool(64), uses=[writes(0, 64), writes(1, 64)])
    keys = [
        [(POOL, 0)],
        [(POOL, 0), (POOL, 2), (POOL, 1)],
        [(POOL, 1)],
        [(POOL, 2), (INPUT, 0)],
        [(POOL, 3)],
        [(POOL, 0), (POOL, 4)],
    ]
    slots = [Slot(index, word, *key, 0) for index, words in enumerate(keys) for word, key in enumerate(words)]
    order = order_of(capture.recording(), slots)
    assert order.edges == ((), (0,), (1,), (2,), (), (2,))
    lives = {life.index: life for life in lifetimes(capture.recording(), slots, ())}
    assert (lives[2].first, lives[2].last, lives[1].last) == (1, 3, 2)
    met = {life.index: life.met for life in lifetimes(capture.recording(), slots, (), order)}
    assert met == {0: 0b11111, 1: 0b01111, 2: 0b11111, 3: 0b11111, 4: 0b11101}


def test_the_last_kernel_of_a_call_holds_on_to_its_operands() -> None:
    """No word of the second launch points to x, which a later intermediate must not take the place of meanwhile."""
    capture, given = Capture(), (Access((POOL, 0), Bytes(0, 64), writes=False),)
    x, table, late = capture.pool(64), capture.pool(64), capture.pool(64)
    capture.launch(x, table, operands=given, group=0)
    capture.launch(table, late, operands=given, group=0)
    slots = [Slot(0, 0, POOL, 0, 0), Slot(0, 1, POOL, 1, 0), Slot(1, 0, POOL, 1, 0), Slot(1, 1, POOL, 2, 0)]
    assert len(set(plan(capture.recording(), slots).offsets.values())) == 3


def test_a_call_holds_on_to_its_operands_around_calls_inside_of_it() -> None:
    """Its first launch leaves the address of x to its last one. What is made between them lies elsewhere."""
    capture = Capture()
    x, table, inside, late = (capture.pool(64) for _ in range(4))
    capture.launch(x, table, group=1)
    capture.launch(inside, uses=[writes(0, 64)], group=0)
    capture.launch(table, group=1)
    capture.launch(late, uses=[writes(0, 64)])
    slots = [Slot(0, 0, POOL, 0, 0), Slot(0, 1, POOL, 1, 0), Slot(1, 0, POOL, 2, 0), Slot(2, 0, POOL, 1, 0)]
    recording, slots = capture.recording(), [*slots, Slot(3, 0, POOL, 3, 0)]
    lives = {life.index: (life.first, life.last) for life in lifetimes(recording, slots, ())}
    assert lives == {0: (0, 2), 1: (0, 2), 2: (1, 1), 3: (3, 3)}
    offsets = plan(recording, slots).offsets
    assert len({offsets[index] for index in range(3)}) == 3


@pytest.mark.parametrize(("start", "nbytes"), [(0, 64), (32, 64), (16, 8)])
def test_constants_that_are_views_of_one_another_are_the_same_memory(start: int, nbytes: int) -> None:
    capture, at = Capture(), 0x5500_0000_0000
    capture.constant(at, 64)
    capture.constant(at + start, nbytes)
    there = Access((CONSTANT, 1), Bytes(0, nbytes), writes=False)
    capture.launch(at + 48, uses=[writes(0, 8)])
    capture.launch(at + start, operands=(there,))
    capture.launch(at + start, operands=(Access((CONSTANT, 0), Bytes(start, start + 8), writes=True),))
    (_, second, third) = order_of(capture.recording(), []).edges
    assert second == ((0,) if start + nbytes > 48 else ())
    assert 1 in third


def independent_chains(launches: int) -> tuple[Recording, list[Slot]]:
    """Eight chains of launches: each launch reads what the one eight before has written."""
    capture, slots = Capture(), list[Slot]()
    weight = capture.input(1 << 20)
    for index in range(launches):
        made = capture.pool(4096)
        capture.launch(weight, made, made - 8192, uses=[reads(0, 1 << 20), writes(1, 4096), reads(2, 4096)])
        slots += [Slot(index, 0, INPUT, 0, 0), Slot(index, 1, POOL, index, 0)]
        slots += [Slot(index, 2, POOL, index - 8, 0)] if index >= 8 else []
    return capture.recording(), slots


def test_the_work_of_ordering_is_linear_in_the_launches() -> None:
    small, large = (independent_chains(launches) for launches in (500, 2_000))
    one, other = order_of(*small), order_of(*large)
    assert [len(waited) for waited in other.edges] == [0] * 8 + [1] * 1_992
    assert in_lanes(other, 4).longest_path() == 500
    assert work(lambda: order_of(*large)) < 1.1 * 4 * work(lambda: order_of(*small))
    assert work(lambda: in_lanes(other, 4)) < 1.1 * 4 * work(lambda: in_lanes(one, 4))


def chains_of_eight(launches: int) -> tuple[Recording, list[Slot], Order]:
    """Chains of eight launches side by side, again and again, whose intermediates are of many sizes."""
    capture, slots, words = Capture(), list[Slot](), list[int]()
    for index in range(launches):
        size = 512 * (1 + index * 7919 % 1000)
        words.append(capture.pool(size))
        used = [each for each in (range(index - 4, index) if index % 32 < 4 else (index - 4,)) if each >= 0]
        exact = [writes(0, size), *(reads(word, 512) for word in range(1, len(used) + 1))]
        capture.launch(words[index], *(words[each] for each in used), uses=exact)
        slots += [Slot(index, word, POOL, each, 0) for word, each in enumerate([index, *used])]
    recording = capture.recording()
    return recording, slots, in_lanes(order_of(recording, slots), 4)


def test_the_work_of_placing_intermediates_is_linear_in_the_launches() -> None:
    small, large = (chains_of_eight(launches) for launches in (500, 2_000))
    assert plan(*large).nbytes < 100 * 512_000
    assert work(lambda: plan(*large)) < 1.1 * 4 * work(lambda: plan(*small))


def forks(launches: int, branches: range, length: int, sizes: Sequence[int]) -> Program:
    """Branches of up to ``length`` launches each, and a launch that reads the ends of all, again and again."""
    drawn, capture, slots = random.Random(0), Capture(), list[Slot]()
    words: list[tuple[int, int]] = []

    def launch(*used: int) -> int:
        size, index = drawn.choice(sizes), len(words)
        words.append((capture.pool(size), size))
        operands = [words[each] for each in (index, *used)]
        exact = [reads(word, nbytes) if word else writes(word, nbytes) for word, (_, nbytes) in enumerate(operands)]
        capture.launch(*(word for word, _ in operands), uses=exact)
        slots.extend(Slot(index, word, POOL, each, 0) for word, each in enumerate((index, *used)))
        return index

    end = launch()
    while len(words) < launches:
        ends = [end] * drawn.choice(branches)
        for branch in range(len(ends)):
            for _ in range(drawn.randint(1, length)):
                ends[branch] = launch(ends[branch])
        end = launch(*ends)
    recording = capture.recording()
    return with_steps(Program(recording, tuple(slots), plan(recording, slots)))


@pytest.mark.parametrize("branches", [range(2, 7), pytest.param(range(60, 61), marks=pytest.mark.sweep)])
def test_the_work_of_planning_another_order_is_linear_in_the_launches(branches: range) -> None:
    small, large = (forks(launches, branches, 8, range(512, 1 << 20, 512)) for launches in (500, 2_000))
    assert ordered(large, "dependences")[0].order is not None
    assert work(lambda: DefaultPasses()(large, "dependences")) < 1.1 * 4 * work(
        lambda: DefaultPasses()(small, "dependences")
    )


def test_as_many_lanes_are_used_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    program = forks(100, range(6, 7), 4, [1 << 20, 64 << 20])
    recording, slots, held = program.recording, program.slots, cut(program).held
    orders = [in_lanes(order_of(recording, slots), lanes) for lanes in (1, 2, 3, 6)]
    peaks = [cut(replace(program, order=order, layout=plan(recording, slots, order))).held for order in orders]
    assert len(set(peaks)) == len(orders)
    monkeypatch.setattr(steps, "WORTHWHILE", 0)
    uncaptured = max(held, uncaptured_peak(program))
    for order, peak in zip(orders, peaks, strict=True):
        found = ordered(program, "dependences", peak / uncaptured - 1)[0]
        assert found.order == (None if order is orders[0] else order)


def test_intermediates_of_distant_launches_lie_apart_where_they_meet() -> None:
    drawn = random.Random(0)
    spans = [sorted(drawn.sample(range(2_000), 2)) for _ in range(20)]
    spans += [[first, first + drawn.randrange(1, 40)] for first in range(0, 1_900, 5)]
    lives = [Lifetime(index, 64 * drawn.randrange(1, 9), *span) for index, span in enumerate(spans)]
    offsets = pack(lives, 64).offsets
    for a, b in combinations(lives, 2):
        low, high = sorted((a, b), key=lambda life: offsets[life.index])
        assert not meets(a, b) or offsets[low.index] + low.nbytes <= offsets[high.index]


# -- programs ----------------------------------------------------------------------------------------------------------


BRANCHED = ("mlp", "branches", "reused", "planned", "random", "draws", "cache")
"""Programs whose launches can run in many orders, or must not."""


@pytest.mark.parametrize(
    "program", [n if n in BRANCHED else pytest.param(n, marks=pytest.mark.sweep) for n in PROGRAMS]
)
@settings(max_examples=5, derandomize=True)
@given(data=st.data())
def test_any_order_of_launches_equals_uncaptured_runs(program: str, data: st.DataObject) -> None:
    drawn = random.Random(data.draw(st.integers(0, 1 << 16), label="order"))

    def shuffled(order: Order, begin: int, end: int) -> list[int]:
        left, found = set(range(begin, end)), list[int]()
        while left:
            ready = [i for i in sorted(left) if not left.intersection(order.edges[i])]
            found.append(drawn.choice(ready))
            left.remove(found[-1])
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Order, "sequence", shuffled)
        for versions in region_calls(program):
            machine = Machine(versions[0], memory_limit=3 * BYTES, order="dependences")
            for _ in range(data.draw(st.integers(3, 6), label="calls")):
                version = data.draw(st.sampled_from(versions))
                machine.call(version.args, draw_places(data, machine, version.args))
            refused = {"comparison-failed", "replay-raised", "capture-failed"}
            assert not refused.intersection(machine.region.record.refusals)


def counted(x: torch.Tensor, count: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    count.add_(1)
    return x @ w


def test_arguments_that_share_memory_are_not_replayed_out_of_order() -> None:
    compiled = compile_regions(counted)
    compiled.call(torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8))
    (call,) = compiled.regions
    machine = Machine(call, order="dependences")
    for _ in range(4):
        machine.region(call.fresh(1))
    record = machine.region.record
    assert (record.captures, record.replays) == (1, 2)
    for shared, replays in ((True, 2), (False, 3)):
        args = call.fresh(1)
        if shared:
            args = [args[0]] * len(args)
        machine.region(list(args))
        assert record.replays == replays
