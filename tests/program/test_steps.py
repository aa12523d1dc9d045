"""How a large region is cut: what is held at the peak, what crosses a border, what is let go of where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.program.default import DEFAULT_PASSES, LEAST, in_order, ordered, renamed
from pygraph.program.dependences import in_lanes
from pygraph.program.order import Order
from pygraph.program.program import GraphSegment, Layout, Program, Slot
from pygraph.program.recording import Access, AllocationKind, Bytes, Output, OutputKind
from pygraph.program.steps import (
    EXCESS,
    FEWEST_LAUNCHES,
    PIECE,
    WORTHWHILE,
    Plan,
    _Facts,
    cut,
    pieces,
    timeline,
    uncaptured_peak,
)
from pygraph.runtime.cuda.phases import phases
from pygraph.runtime.slots import SlotTable, discover
from tests.program.layouts import plan
from tests.runtime.branches import Branched, branched
from tests.runtime.captures import Capture, reads, writes

MB = 1 << 20


def program(build: Callable[..., None], *facts: Any, **keepers: Any) -> Program:
    """The program that ``build(capture, *facts)`` records, with slots from a second capture."""
    captures = Capture(), Capture(0x6600_0000_0000, gap=8192)
    for capture in captures:
        build(capture, *facts)
    first, second = (capture.recording(alignment=512) for capture in captures)
    table = discover(first, second)
    assert isinstance(table, SlotTable)
    return Program(first, table.slots, plan(first, table.slots), **keepers)


def whole(program: Program) -> Plan:
    """The region as one segment, with the program's own layout."""
    facts = _Facts(program)
    return facts.plan(((0, facts.launches),))


def backward(capture: Capture, layers: int, size: int) -> None:
    """Each launch reads one saved activation and the running gradient, and writes a new one and an output."""
    saved = [capture.input(size) for _ in range(layers)]
    gradient = capture.input(size)
    for activation in reversed(saved):
        following, output = capture.pool(size), capture.pool(size)
        capture.fresh(2 * len(capture.outputs) + 1)
        capture.launch(activation, gradient, following, output)
        gradient = following


def assert_alive(region: Program, segments: Plan) -> None:
    """Each intermediate has its memory from the first segment that uses it to the last one."""
    where = [number for number, bound in enumerate(segments.bounds) for _ in range(*bound)]
    blocks = {index: block for block in segments.blocks for index in block.offsets}
    used = [slot for slot in region.slots if slot.kind is AllocationKind.POOL and slot.index in blocks]
    assert all(blocks[slot.index].born <= where[slot.launch] <= blocks[slot.index].died for slot in used)
    assert any(block.born < block.died for block in segments.blocks)


def test_a_region_that_holds_little_stays_whole() -> None:
    region = program(backward, 32, MB)
    segments = cut(region)
    assert segments.bounds == ((0, 32),)
    assert segments == whole(region)


def test_a_region_that_launches_nothing_is_one_segment_whatever_it_is_given() -> None:
    assert cut(program(lambda capture: capture.input(1 << 30))).bounds == ((0, 0),)


def test_a_large_backward_is_cut_until_it_holds_what_the_uncaptured_program_does() -> None:
    region = program(backward, 256, 32 * MB)
    segments, single = cut(region), whole(region)
    assert len(segments.bounds) > 1
    assert_alive(region, segments)
    assert segments.held <= 1.05 * segments.ideal
    assert single.held > 1.9 * single.ideal
    assert segments.ideal == single.ideal


def training(capture: Capture, layers: int, activation: int, weight: int) -> None:
    """The backward of a deep model, whose caller holds the weights: what it has saved outweighs its gradients."""
    saved = [[capture.input(size) for size in (activation, 4 * activation)] for _ in range(layers)]
    weights = [capture.input(weight) for _ in range(layers)]
    gradient = capture.input(activation)
    for number in reversed(range(layers)):
        narrow, wide = saved[number]
        inner, of_weight, following = capture.pool(4 * activation), capture.pool(weight), capture.pool(activation)
        capture.launch(wide, gradient, inner)
        capture.launch(narrow, inner, of_weight)
        capture.launch(inner, weights[number], following)
        capture.fresh(3 * len(capture.outputs) + 1)
        gradient = following


@pytest.mark.parametrize(("activation", "weight", "most"), [(16, 6, 4), (4, 8, 6), (64, 34, 6)])
def test_cuts_are_made_where_they_matter(activation: int, weight: int, most: int) -> None:
    """Memory falls in the course of a backward: what comes late needs no cuts, however many launches it is."""
    deep = program(training, 48, activation * MB, weight * MB, held=frozenset(range(96, 144)))
    segments = cut(deep)
    limit = segments.ideal + max(WORTHWHILE, EXCESS * segments.ideal)
    assert whole(deep).held > limit >= segments.held
    assert 2 <= len(segments.bounds) <= most
    lengths = [end - begin for begin, end in segments.bounds]
    assert lengths[0] == min(lengths[:-1])


def test_dead_arguments_are_let_go_of_and_returned_ones_are_not() -> None:
    region = program(backward, 256, 32 * MB)
    view = Output(OutputKind.VIEW, 255, size=(1,), stride=(1,))
    returning = replace(region.recording, outputs=(*region.recording.outputs, view))
    segments = cut(replace(region, recording=returning))
    assert 255 not in segments.dead
    assert segments.dead[254] == 0
    assert segments.dead[0] == len(segments.bounds) - 1
    firsts = [first for first, _ in segments.owned.values()]
    assert sorted(firsts) == firsts
    assert {last for _, last in segments.owned.values()} == {len(segments.bounds) - 1}


def reused(capture: Capture, output: int) -> None:
    """A buffer that is overwritten when it is no longer needed, beside two workspaces that no launch uses. The caller
    lets go of the argument."""
    x, a, b, c, end = capture.input(8 * MB), *(capture.pool(size * MB) for size in (4, 4, 16, output))
    for size in (32, 1):
        capture.pool(size * MB)
    for source, target in ((x, a), (a, b), (b, c), (b, a)):
        capture.launch(source, target, uses=[reads(0, 4 * MB), writes(1, (16 if target == c else 4) * MB)])
    capture.launch(a, b, end, uses=[reads(0, 4 * MB), reads(1, 4 * MB), writes(2, output * MB)])
    capture.fresh(3)


@pytest.mark.parametrize(("output", "most"), [(2, 4 + 4 + 16), (64, 4 + 4 + 64)])
def test_the_uncaptured_program_holds_buffers_as_captured_and_a_workspace_throughout(output: int, most: int) -> None:
    region = program(reused, output)
    split, _ = renamed(region)
    assert len(split.recording.allocations) == len(region.recording.allocations) + 1
    assert uncaptured_peak(region) == uncaptured_peak(split) == (most + 32) * MB
    assert uncaptured_peak(program(reused, output, held=frozenset({0}))) == (8 + most + 32) * MB
    assert cut(in_order(split, None)).ideal == max(most - 4, 4 + 4 + output) * MB


def forked(capture: Capture, size: int, workspace: int, given: int = 64) -> None:
    """Two branches, of which each has an intermediate of ``size`` bytes. ``given``: bytes of the argument."""
    x, ends = capture.input(given), []
    capture.pool(workspace)
    for _ in range(2):
        wide, narrow = capture.pool(size), capture.pool(64)
        capture.launch(x, wide, uses=[reads(0, 64), writes(1, size)])
        capture.launch(wide, narrow, uses=[reads(0, size), writes(1, 64)])
        ends.append(narrow)
    capture.launch(*ends, capture.pool(64), uses=[reads(0, 64), reads(1, 64), writes(2, 64)])
    capture.fresh(5)


@pytest.mark.parametrize(
    ("size", "workspace", "memory", "lanes"),
    [
        (20 * MB, 0, 0.03, 0),
        (20 * MB, 32 * MB, 0.03, 2),
        (20 * MB, 0, 1.0, 2),
        (LEAST - 4096, 0, 0.0, 2),
        (LEAST + 4096, 0, 0.0, 0),
    ],
    ids=["too-much", "as-much-as-a-workspace", "asked-for", "little", "not-so-little"],
)
def test_launches_run_in_parallel_if_the_uncaptured_program_holds_as_much(
    size: int, workspace: int, memory: float, lanes: int
) -> None:
    found = ordered(in_order(program(forked, size, workspace), None), "dependences", memory)[0].order
    assert len(set(() if found is None else found.lanes)) == lanes


@pytest.mark.parametrize(("size", "lanes"), [(2 * MB, 2), (4 * MB, 0)])
def test_by_default_launches_in_parallel_take_three_per_cent(size: int, lanes: int) -> None:
    region = in_order(program(forked, size, 0, 96 * MB), None)
    for found in (ordered(region, "dependences")[0], DEFAULT_PASSES(region, "dependences")):
        assert len(set(() if found.order is None else found.order.lanes)) == lanes


def tables(capture: Capture) -> None:
    """Calls of three launches: the first one leaves addresses of its operands in a table, by which the last one finds
    them; and the other way round for what the second call returns."""
    for number in range(2):
        x, table, output = capture.input(64), capture.pool(512), capture.pool(64)
        given = (Access((AllocationKind.INPUT, number), Bytes(0, 64), writes=False),)
        words = [(x, output, table), (table,), (table,)]
        for launch in reversed(words) if number else words:
            capture.launch(*launch, operands=given, group=number)
    capture.fresh(1)
    capture.fresh(3)


def test_a_cut_within_a_call_leaves_it_all_that_it_was_given() -> None:
    region = program(tables)
    assert region.recording.calls() == (range(3),) * 3 + (range(3, 6),) * 3
    segments = _Facts(region).plan(((0, 1), (1, 2), (2, 4), (4, 5), (5, 6)))
    assert segments.dead == {0: 2, 1: 4}
    assert segments.owned == {1: (0, 4), 3: (2, 4)}
    tables_ = {index: (block.born, block.died) for block in segments.blocks for index in block.offsets}
    assert tables_ == {0: (0, 2), 2: (2, 4)}


def test_a_timeline_goes_on_from_segment_to_segment() -> None:
    region = program(inference, 4, 64)
    assert timeline(region) == ()
    order = in_lanes(Order.of([set(), set(), {0}, set()]), 2)
    steps = tuple(GraphSegment(begin, end, (), (), (), ()) for begin, end in ((0, 3), (3, 4)))
    told = timeline(replace(region, order=order, steps=steps))
    assert told == (("kernel", 0, 0), ("kernel", 1, 0), ("kernel", 0, 1), ("kernel", 1, 2))


def inference(capture: Capture, layers: int, size: int) -> None:
    """Each launch reads a weight and the running activation, and writes a new one: larger ones in the second half."""
    weights = [capture.input(size) for _ in range(layers)]
    activation = capture.input(size)
    for number, weight in enumerate(weights, start=1):
        following = capture.pool(8 * size if number > layers // 2 else size)
        capture.launch(weight, activation, following)
        activation = following


def test_nothing_is_gained_by_letting_go_of_what_others_hold() -> None:
    """A model's weights stay where they are: cuts that would only free those cost time for nothing."""
    assert len(cut(program(inference, 64, 8 * MB)).bounds) > 1
    segments = cut(program(inference, 64, 8 * MB, held=frozenset(range(65))))
    assert (segments.bounds, segments.dead) == (((0, 64),), {})
    assert segments.held == segments.ideal


def tangent(capture: Capture) -> None:
    """Only the first launch reads the large argument."""
    first = capture.pool(32)
    capture.launch(capture.input(256 * MB), first)
    capture.launch(first)
    for _ in range(8):
        big, small = capture.pool(128 * MB), capture.pool(32)
        capture.launch(big, small)
        capture.launch(big, small)
    capture.launch(capture.input(32))


def test_what_others_may_hold_is_let_go_of_but_not_counted_on() -> None:
    """Autograd decides if the intermediates that come next can have the tangent's memory."""
    counted = cut(program(tangent))
    assert counted.ideal <= counted.held < 257 * MB
    assert counted.dead[0] == 0
    doubtful = cut(program(tangent, lent=frozenset([0])))
    assert doubtful.held >= doubtful.ideal > 384 * MB
    assert doubtful.dead[0] == 0
    assert len(doubtful.bounds) == 1, "a cut would save nothing that is certain"
    surely = cut(program(tangent, held=frozenset([0])))
    assert (surely.held, surely.bounds) == (doubtful.held, doubtful.bounds)
    assert 0 not in surely.dead


# -- branches ------------------------------------------------------------------------------------------------------


def with_uses(graph: Branched, uses: list[set[int]], nbytes: int) -> Program:
    """Intermediate i is used by the launches ``uses[i]``."""
    capture = Capture()
    for _ in uses:
        capture.pool(nbytes)
    for _ in range(graph.count):
        capture.launch()
    used = sorted((at, i) for i, launches in enumerate(uses) for at in launches)
    slots = tuple(Slot(at, i, AllocationKind.POOL, i, 0) for at, i in used)
    recording = replace(capture.recording(), alignment=512, phases=phases(graph.count, graph.edges))
    return Program(recording, slots, plan(recording, slots))


chains = st.integers(16, 32).map(lambda count: Branched(count, frozenset((i, i + 1) for i in range(count - 1))))


@settings(max_examples=100)
@given(st.one_of(branched(), chains), st.data())
def test_memory_is_shared_by_what_is_ordered_only(graph: Branched, data: st.DataObject) -> None:
    """In one segment by the graph's edges; from one segment to the next by the order of their launches."""
    if graph.count < 2 * FEWEST_LAUNCHES:
        return
    chosen = st.sets(st.integers(0, graph.count - 1), min_size=1, max_size=4)
    uses = data.draw(st.lists(chosen, min_size=1, max_size=8))
    region = with_uses(graph, uses, WORTHWHILE)
    for made in (cut(region), whole(region)):
        assert [0, *(end for _, end in made.bounds)] == [*(begin for begin, _ in made.bounds), graph.count]
        assert made.held >= made.ideal
        where = {launch: number for number, bound in enumerate(made.bounds) for launch in range(*bound)}
        before = graph.before() | {(a, b) for a in where for b in where if where[a] < where[b]}
        for index, used in enumerate(uses):
            (block,) = (block for block in made.blocks if index in block.offsets)  # it has one place
            assert all(block.born <= where[launch] <= block.died for launch in used)
        for block in made.blocks:
            assert all(offset + WORTHWHILE <= block.nbytes for offset in block.offsets.values())
            for a, b in combinations(block.offsets, 2):
                if abs(block.offsets[a] - block.offsets[b]) < WORTHWHILE:
                    one = all((x, y) in before for x in uses[a] for y in uses[b])
                    assert one or all((y, x) in before for x in uses[a] for y in uses[b])


# -- pieces -------------------------------------------------------------------------------------------------------


def test_a_workspace_is_cut_between_intermediates() -> None:
    sizes = {0: 32 * MB, 1: 24 * MB, 2: 24 * MB, 3: MB, 4: 16 * MB, 5: 2 * MB}
    offsets = {0: 0, 1: 32 * MB, 2: 56 * MB, 3: 80 * MB, 4: 8 * MB, 5: 81 * MB}
    first, second, third, small = pieces(Layout(83 * MB, offsets, (9,)), sizes)
    assert first == (32 * MB, {0: 0, 4: 8 * MB})
    assert (second, third) == ((24 * MB, {1: 0}), (24 * MB, {2: 0}))
    assert small == (3 * MB, {3: 0, 5: MB}), "what is small goes together"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), max_size=24), st.integers(0, 4))
def test_pieces_put_together_are_the_workspace(places: list[tuple[int, int]], more: int) -> None:
    sizes = {index: nbytes * MB for index, (_, nbytes) in enumerate(places)}
    offsets = {index: offset * MB for index, (offset, _) in enumerate(places)}
    end = max((offsets[index] + sizes[index] for index in sizes), default=0) + more * MB
    layout = Layout(end, offsets, ())
    found, begin, small = {}, 0, list[bool]()
    for nbytes, inside in pieces(layout, sizes):
        for index, offset in inside.items():
            assert offset + sizes[index] <= nbytes
            found[index] = begin + offset
        begin += nbytes
        small.append(nbytes < PIECE)
    assert (found, begin) == (offsets, layout.nbytes)
    assert not any(before and after for before, after in pairwise(small))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), max_size=24))
def test_large_intermediates_side_by_side_are_pieces_without_a_byte_more(quarters: list[int]) -> None:
    """One of torch's cached blocks that held such a tensor once can hold it again."""
    sizes = {index: count * MB // 4 for index, count in enumerate(quarters)}
    begins = [0, *accumulate(sizes.values())]
    cut = pieces(Layout(begins.pop(), dict(enumerate(begins)), ()), sizes)
    alone = [nbytes for nbytes, inside in cut if len(inside) == 1 and nbytes >= PIECE]
    assert alone == [nbytes for nbytes in sizes.values() if nbytes >= PIECE]
    assert sum(nbytes for nbytes, _ in cut) == sum(sizes.values())
