"""Dependences between launches: every order that keeps them computes the same, and none is made up."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.driver import Layout, Slot
from pygraph.runtime.layout import plan
from pygraph.runtime.ordering import dependences
from pygraph.runtime.recording import Access, AllocationKind, Recording
from tests.runtime.captures import Capture, reads, writes
from tests.runtime.orders import keeps

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
NOWHERE = Layout(0, {}, ())


def edges(
    capture: Capture, slots: list[Slot], layout: Layout = NOWHERE, *, overlap: bool = True
) -> list[tuple[int, int]]:
    return dependences(capture.recording(), slots, layout, inputs_may_overlap=overlap)


def test_reads_do_not_depend_on_reads() -> None:
    capture = Capture()
    capture.pool(64)
    for _ in range(3):
        capture.launch(0, accesses=[reads(0, 64)])
    assert edges(capture, [Slot(i, 0, POOL, 0, 0) for i in range(3)]) == []


def test_true_anti_and_output_dependences() -> None:
    capture = Capture()
    capture.pool(64)
    for access in (writes(0, 64), reads(0, 64), reads(0, 64), writes(0, 64)):
        capture.launch(0, accesses=[access])
    slots = [Slot(i, 0, POOL, 0, 0) for i in range(4)]
    assert edges(capture, slots) == [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]


def test_bytes_that_do_not_meet_do_not_depend() -> None:
    capture = Capture()
    capture.pool(64)
    capture.launch(0, accesses=[writes(0, 32)])
    capture.launch(0, accesses=[writes(0, 32)])
    capture.launch(0, accesses=[reads(0, 8, start=28)])
    slots = [Slot(0, 0, POOL, 0, 0), Slot(1, 0, POOL, 0, 32), Slot(2, 0, POOL, 0, 0)]
    assert edges(capture, slots) == [(0, 2), (1, 2)]
    capture.launch(0, accesses=[writes(0, 0)])
    assert edges(capture, [*slots, Slot(3, 0, POOL, 0, 0)]) == [(0, 2), (1, 2)]


def test_reused_workspace_is_an_anti_dependence() -> None:
    capture = Capture()
    capture.pool(64)
    capture.pool(64)
    capture.launch(0, accesses=[writes(0, 64)])
    capture.launch(0, accesses=[writes(0, 64)])
    slots = [Slot(0, 0, POOL, 0, 0), Slot(1, 0, POOL, 1, 0)]
    assert edges(capture, slots, Layout(128, {0: 0, 1: 64}, ())) == []
    assert edges(capture, slots, Layout(64, {0: 0, 1: 0}, ())) == [(0, 1)]
    assert edges(capture, slots, Layout(64, {0: 0, 1: 32}, ())) == [(0, 1)]


def test_arguments_may_overlap_unless_stated() -> None:
    capture = Capture()
    capture.launch(0, accesses=[reads(0, 64)])
    capture.launch(0, accesses=[writes(0, 64)])
    slots = [Slot(0, 0, INPUT, 0, 0), Slot(1, 0, INPUT, 1, 0)]
    assert edges(capture, slots) == [(0, 1)]
    assert edges(capture, slots, overlap=False) == []
    assert edges(capture, [slots[0], Slot(1, 0, INPUT, 0, 32)], overlap=False) == [(0, 1)]


def test_constants_are_known_by_their_address() -> None:
    capture = Capture()
    capture.launch(0x1000, accesses=[writes(0, 64)])
    capture.launch(0x1020, accesses=[reads(0, 8)])
    capture.launch(0x2000, accesses=[reads(0, 8)])
    assert edges(capture, []) == [(0, 1)]


def test_unknown_accesses_are_ordered_with_everything() -> None:
    capture = Capture()
    for accesses in ([reads(0, 8)], [reads(0, 8)], None, [reads(0, 8)], None):
        capture.launch(0, accesses=accesses)
    found = edges(capture, [Slot(i, 0, INPUT, 0, 0) for i in range(5)])
    assert set(nx.transitive_closure(nx.DiGraph(found)).edges) == {
        (0, 2),
        (1, 2),
        (2, 3),
        (2, 4),
        (3, 4),
        (0, 3),
        (0, 4),
        (1, 3),
        (1, 4),
    }


def test_random_draws_keep_their_order() -> None:
    capture = Capture()
    for random in (True, False, True):
        capture.launch(accesses=[], random=random)
    assert edges(capture, []) == [(0, 2)]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Recording, list[Slot], Layout]:
    """Launches that read and write pieces of a few intermediates and one output, packed with or without reuse."""
    capture = Capture()
    sizes = draw(st.lists(st.sampled_from([1, 64, 100, 192]), min_size=1, max_size=4))
    for nbytes in sizes:
        capture.pool(nbytes)
    capture.fresh(0)
    slots: list[Slot] = []
    for index in range(draw(st.integers(1, 7))):
        chosen = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3))
        accesses: list[Access] = []
        for word, allocation in enumerate(chosen):
            offset = draw(st.integers(0, sizes[allocation] - 1))
            reach = draw(st.integers(0, sizes[allocation] - offset))
            writing = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
            slots.append(Slot(index, word, POOL, allocation, offset))
            accesses.append(Access(word, 0, reach, *writing))
        capture.launch(*range(len(chosen)), accesses=accesses, random=draw(st.booleans()))
    recording = capture.recording()
    return recording, slots, plan(recording, slots, reuse=draw(st.booleans()))


def _run(order: list[int], recording: Recording, slots: list[Slot], layout: Layout) -> list[object]:
    """Interpret launches over bytes: each writes a hash of itself and of all that it reads (and drew)."""
    memory: dict[object, int] = {}
    places = {(slot.launch, slot.word): slot for slot in slots}
    draws = 0
    for index in order:
        launch = recording.launches[index]
        touched = [(a, places[(index, a.word)]) for a in launch.accesses or ()]
        inside = [(a, [_cell(slot, slot.offset + k, layout) for k in range(a.nbytes)]) for a, slot in touched]
        seen = [memory.get(cell, 0) for a, cells in inside if a.reads for cell in cells]
        draws += launch.random
        value = hash((index, tuple(seen), draws if launch.random else 0))
        for cell in (cell for a, cells in inside if a.writes for cell in cells):
            memory[cell] = value
    return [sorted(memory.items(), key=repr)]


def _cell(slot: Slot, byte: int, layout: Layout) -> object:
    if slot.index in layout.offsets:
        return ("workspace", layout.offsets[slot.index] + byte)
    return (slot.index, byte)


@settings(deadline=None, max_examples=300)
@given(programs(), st.data())
def test_every_order_that_keeps_the_dependences_computes_the_same(
    program: tuple[Recording, list[Slot], Layout], data: st.DataObject
) -> None:
    recording, slots, layout = program
    found = dependences(recording, slots, layout)
    recorded = list(range(len(recording.launches)))
    order: list[int] = []
    while len(order) < len(recorded):
        ready = [i for i in recorded if i not in order and all(a in order for a, b in found if b == i)]
        order.append(data.draw(st.sampled_from(ready)))
    assert keeps(order, found)
    assert _run(order, recording, slots, layout) == _run(recorded, recording, slots, layout)


@settings(deadline=None, max_examples=200)
@given(programs())
def test_no_dependence_is_made_up(program: tuple[Recording, list[Slot], Layout]) -> None:
    recording, slots, layout = program
    places = {(slot.launch, slot.word): slot for slot in slots}

    def cells(index: int, *, written: bool) -> set[object]:
        launch = recording.launches[index]
        chosen = [a for a in launch.accesses or () if a.writes or not written]
        own = {
            _cell(places[(index, a.word)], places[(index, a.word)].offset + k, layout)
            for a in chosen
            for k in range(a.nbytes)
        }
        return own | ({"random"} if launch.random else set())

    for a, b in dependences(recording, slots, layout):
        assert a < b
        assert cells(a, written=True) & cells(b, written=False) or cells(a, written=False) & cells(b, written=True)
