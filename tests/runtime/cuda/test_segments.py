"""How a large region is cut: what is held at the peak, what crosses a border, what is let go of where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.cuda.segments import EXCESS, WORTHWHILE, Segments, cut, whole
from pygraph.runtime.driver import Program, Slot
from pygraph.runtime.layout import plan
from pygraph.runtime.recording import AllocationKind, Output, OutputKind, Recording
from pygraph.runtime.slots import SlotTable, discover
from tests.runtime.captures import Capture

MB = 1 << 20


def recorded(capture: Capture) -> Recording:
    return replace(capture.recording(), alignment=512)


def explained(build: Callable[[Capture], Recording]) -> tuple[Recording, tuple[Slot, ...]]:
    """What ``build`` records, and its slots from a second capture."""
    first, second = build(Capture()), build(Capture(0x6600_0000_0000, gap=8192))
    table = discover(first, second)
    assert isinstance(table, SlotTable)
    return first, table.slots


def backward(layers: int, size: int) -> tuple[Recording, tuple[Slot, ...]]:
    """Each launch reads one saved activation and the running gradient, and writes a new one and an output."""

    def build(capture: Capture) -> Recording:
        saved = [capture.input(size) for _ in range(layers)]
        gradient = capture.input(size)
        for activation in reversed(saved):
            following, output = capture.pool(size), capture.pool(size)
            capture.fresh(2 * len(capture.outputs) + 1)
            capture.launch(activation, gradient, following, output)
            gradient = following
        return recorded(capture)

    return explained(build)


def program(recording: Recording, slots: tuple[Slot, ...], held: frozenset[int] = frozenset()) -> Program:
    order = tuple(range(len(recording.launches)))
    return Program(recording, slots, plan(recording, slots, alignment=512), order, {}, held=held)


def made(recording: Recording, slots: tuple[Slot, ...]) -> Segments:
    return cut(program(recording, slots))


def test_a_region_that_holds_little_stays_whole() -> None:
    recording, slots = backward(layers=32, size=MB)
    segments = made(recording, slots)
    assert segments.bounds == ((0, 32),)
    assert segments.blocks == ()
    assert segments.workspaces[0] == plan(recording, slots, alignment=512)
    assert segments == whole(program(recording, slots))


def test_a_large_backward_is_cut_until_it_holds_what_the_uncaptured_program_does() -> None:
    recording, slots = backward(layers=256, size=32 * MB)
    segments = made(recording, slots)
    assert len(segments.bounds) > 1
    assert segments.held <= 1.05 * segments.ideal
    single = whole(program(recording, slots))
    assert single.held > 1.9 * single.ideal
    assert segments.ideal == single.ideal


def test_dead_arguments_are_let_go_of_and_returned_ones_are_not() -> None:
    recording, slots = backward(layers=256, size=32 * MB)
    view = Output(OutputKind.VIEW, argument=255, size=(1,), stride=(1,))
    segments = made(replace(recording, outputs=(*recording.outputs, view)), slots)
    assert 255 not in segments.dead
    assert segments.dead[254] == 0
    assert segments.dead[0] == len(segments.bounds) - 1
    assert sorted(segments.fresh.values()) == list(segments.fresh.values())


def inference(layers: int, size: int) -> tuple[Recording, tuple[Slot, ...]]:
    """Each launch reads a weight and the running activation, and writes a new one: larger ones in the second half."""

    def build(capture: Capture) -> Recording:
        weights = [capture.input(size) for _ in range(layers)]
        activation = capture.input(size)
        for number, weight in enumerate(weights, start=1):
            following = capture.pool(8 * size if number > layers // 2 else size)
            capture.launch(weight, activation, following)
            activation = following
        return recorded(capture)

    return explained(build)


def test_nothing_is_gained_by_letting_go_of_what_others_hold() -> None:
    """A model's weights stay where they are: cuts that would only free those cost time for nothing."""
    recording, slots = inference(layers=64, size=8 * MB)
    arguments = frozenset(range(65))
    assert len(cut(program(recording, slots)).bounds) > 1
    segments = cut(program(recording, slots, arguments))
    assert segments.bounds == ((0, 64),)
    assert segments.dead == {}
    assert segments.held == segments.ideal


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_every_intermediate_has_one_place_for_as_long_as_it_lives(data: st.DataObject) -> None:
    launches = data.draw(st.integers(16, 80))
    uses = data.draw(st.lists(st.tuples(st.integers(0, launches - 1), st.integers(0, 20)), min_size=1, max_size=30))

    def build(capture: Capture) -> Recording:
        addresses: dict[int, int] = {}
        for launch in range(launches):
            words = []
            for number, (born, length) in enumerate(uses):
                if launch == born:
                    addresses[number] = capture.pool(WORTHWHILE + 512 * number)
                if born <= launch <= born + length:
                    words.append(addresses[number])
            capture.launch(*words)
        return recorded(capture)

    first, slots = explained(build)
    segments = made(first, slots)
    assert [begin for begin, _ in segments.bounds[1:]] == [end for _, end in segments.bounds[:-1]]
    assert (segments.bounds[0][0], segments.bounds[-1][1]) == (0, launches)
    where = {launch: s for s, (begin, end) in enumerate(segments.bounds) for launch in range(begin, end)}
    blocks = {block.index: block for block in segments.blocks}
    for slot in slots:
        segment = where[slot.launch]
        block = blocks.get(slot.index)
        assert (block is None) == (slot.index in segments.workspaces[segment].offsets)
        assert block is None or block.born <= segment <= block.died
    for segment, layout in enumerate(segments.workspaces):
        assert_disjoint(first, slots, layout.offsets, layout.nbytes, segments.bounds[segment])
    assert segments.held >= segments.ideal
    if len(segments.bounds) == 1:
        assert EXCESS > 0


def assert_disjoint(
    recording: Recording, slots: tuple[Slot, ...], offsets: dict[int, int], nbytes: int, bounds: tuple[int, int]
) -> None:
    """No two intermediates share bytes at any launch of a segment."""
    sizes = {a.index: a.nbytes for a in recording.allocations if a.kind is AllocationKind.POOL}
    spans: dict[int, tuple[int, int]] = {}
    for slot in slots:
        if bounds[0] <= slot.launch < bounds[1] and slot.index in offsets:
            low, high = spans.get(slot.index, (slot.launch, slot.launch))
            spans[slot.index] = (min(low, slot.launch), max(high, slot.launch))
    for a, (first, last) in spans.items():
        assert offsets[a] + sizes[a] <= nbytes
        for b, (begin, end) in spans.items():
            if a < b and first <= end and begin <= last:
                assert offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
