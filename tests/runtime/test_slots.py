"""Slot discovery: every address found, every doubt refused with its reason and place, and slots known from one size
found again in the single capture of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.contract import Layout, Program, Slot
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.recording import Allocation, AllocationKind, LaunchKind, Origin, Output, OutputKind
from pygraph.runtime.slots import SlotTable, discover, resolve
from tests.runtime.captures import Capture, reads, writes

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
HERE, ELSEWHERE = 0x7F00_0000_0000, 0x6600_0000_0000
WEIGHTS = 0x5500_0000_0000

Build = Callable[[Capture, int], Any]
"""Records a capture: the first (0) or the second (1)."""


def twice(build: Build, **facts: Any) -> SlotTable | Refusal:
    """Discover the slots of what ``build`` records, captured twice at other places."""
    captures = Capture(HERE), Capture(ELSEWHERE, gap=8192)
    for number, capture in enumerate(captures):
        build(capture, number)
    return discover(*(capture.recording(**facts) for capture in captures))


def found(result: SlotTable | Refusal | None) -> SlotTable:
    assert isinstance(result, SlotTable), result
    return result


def refused(result: SlotTable | Refusal | None) -> Refusal:
    assert isinstance(result, Refusal)
    return result


def test_addresses_numbers_and_constants_are_told_apart() -> None:
    def build(capture: Capture, _: int) -> None:
        x = capture.input(256)
        weight = capture.constant(WEIGHTS, 64)
        capture.launch(x + 16, weight + 8, 42, 0)
        y = capture.pool(512)
        capture.launch(x + 256, y + 504)

    table = found(twice(build))
    assert table.slots == (Slot(0, 0, INPUT, 0, 16), Slot(1, 0, INPUT, 0, 256), Slot(1, 1, POOL, 0, 504))
    assert (table.padding, table.notes) == ((), ())


@pytest.mark.parametrize("apart_later", [False, True])
def test_the_end_of_one_at_the_start_of_another_is_ambiguous_if_it_is_in_both_captures(apart_later: bool) -> None:
    def build(capture: Capture, number: int) -> None:
        x = capture.input(256)
        capture.pool(64, None if apart_later and number else x + 256)
        capture.launch(x + 256)

    if apart_later:
        assert found(twice(build)).slots == (Slot(0, 0, INPUT, 0, 256),)
    else:
        assert refused(twice(build)).reason == "ambiguous-address"


def test_empty_tensors_with_and_without_an_address() -> None:
    def build(capture: Capture, _: int) -> None:
        capture.launch(capture.input(0), capture.input(0, address=0), capture.input(8), 0)

    assert found(twice(build)).slots == (Slot(0, 0, INPUT, 0, 0), Slot(0, 2, INPUT, 2, 0))


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("half-address", lambda x, y, number: x if number else 77),
        ("unpaired-address", lambda x, y, number: x if number else y),
        ("unpaired-address", lambda x, y, number: x + 8 * number),
        ("stray-address", lambda x, y, number: x - 8),
        ("stray-address", lambda x, y, number: y + 64 + (8192 if number else 4096)),
        ("unmoved-address", lambda x, y, number: HERE + 8),
        ("unmoved-address", lambda x, y, number: ELSEWHERE + 8),
    ],
)
def test_doubtful_addresses_are_refused_and_the_launch_and_line_named(reason: str, word: Any) -> None:
    """The second of those that stray lies in memory that is allocated after the launch."""

    def build(capture: Capture, number: int) -> None:
        x, y = capture.input(64), capture.input(64)
        capture.launch(word(x, y, number), name="gather", origin=Origin(locs=("model.py:7",)))
        capture.pool(64)

    refusal = refused(twice(build))
    assert (refusal.reason, refusal.launch, refusal.loc) == (reason, "gather", "model.py:7")
    assert "[gather at model.py:7]" in str(refusal)


def test_a_word_that_points_into_the_callers_memory_is_refused() -> None:
    first, second = Capture(), Capture(ELSEWHERE)
    for capture in (first, second):
        capture.launch(0x1234_5678)
    real = [Allocation(INPUT, 0, 0x1234_5000, 4096)]
    found(discover(first.recording(), second.recording()))
    assert refused(discover(first.recording(), second.recording(), real)).reason == "unmoved-address"


def test_a_word_that_differs_for_no_reason_is_padding_and_noted() -> None:
    table = found(twice(lambda capture, number: capture.launch(capture.input(64), 11 + number)))
    assert table.padding == ((0, 1),)
    assert table.notes == ("kernel: word 1 differs between captures and is no address",)


def launched(**facts: Any) -> Callable[[Capture], None]:
    """A change of the first launch."""
    return lambda capture: capture.launches.__setitem__(0, replace(capture.launches[0], **facts))


def allocated(index: int, **facts: Any) -> Callable[[Capture], None]:
    """A change of an allocation: an input, an intermediate, a constant."""
    return lambda capture: capture.allocations.__setitem__(index, replace(capture.allocations[index], **facts))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda capture: capture.launch(1), "unstable-launches"),
        (launched(name="other"), "unstable-launches"),
        (launched(kind=LaunchKind.MEMCPY), "unstable-launches"),
        (launched(words=(1, 2)), "unstable-launches"),
        (launched(signature=("relu",)), "unstable-launches"),
        (launched(uses=()), "unstable-launches"),
        (launched(random=True), "unstable-launches"),
        (lambda capture: capture.pool(8), "unstable-allocations"),
        (allocated(1, nbytes=65), "unstable-allocations"),
        (allocated(1, born=1), "unstable-allocations"),
        (allocated(1, address=0), "unstable-allocations"),
        (allocated(2, address=WEIGHTS + 64), "unstable-allocations"),
        (lambda capture: capture.outputs.append(replace(capture.outputs.pop(), offset=1)), "unstable-outputs"),
        (lambda capture: capture.fresh(0), "unstable-outputs"),
        (lambda capture: None, None),
    ],
)
def test_captures_that_do_not_repeat_are_refused(change: Callable[[Capture], Any], reason: str | None) -> None:
    def build(capture: Capture, number: int) -> None:
        capture.launch(capture.input(64), capture.pool(64), capture.constant(WEIGHTS, 8))
        capture.fresh(0)
        if number:
            change(capture)

    if reason is None:
        found(twice(build))
    else:
        assert refused(twice(build)).reason == reason


@pytest.mark.parametrize(
    ("first", "second", "same"), [(1.5, 1.5, True), (0.0, -0.0, False), (1, True, False), ([1], [1], False)]
)
def test_scalar_outputs_are_compared_by_type_and_bits(first: object, second: object, same: bool) -> None:
    values = (first, second)
    table = twice(lambda capture, number: capture.outputs.append(Output(OutputKind.OBJECT, value=values[number])))
    assert isinstance(table, SlotTable) is same


def test_captures_that_share_memory_are_refused() -> None:
    capture = Capture()
    capture.launch(capture.input(64))
    assert refused(discover(capture.recording(), capture.recording())).reason == "captures-overlap"


def test_allocations_that_overlap_in_one_capture_are_refused() -> None:
    def build(capture: Capture, _: int) -> None:
        x = capture.input(64)
        capture.pool(64, x + 32)
        capture.launch(x)

    assert refused(twice(build)).reason == "ambiguous-address"


def test_the_same_launches_in_other_phases_are_another_region() -> None:
    captures = Capture(), Capture(ELSEWHERE, gap=8192)
    for capture in captures:
        x = capture.input(64)
        for _ in range(3):
            capture.launch(x)
    first, second = (capture.recording() for capture in captures)
    assert refused(discover(replace(first, phases=(0, 0, 1)), second)).reason == "unstable-order"
    table = found(discover(replace(first, phases=(0, 0, 1)), replace(second, phases=(0, 0, 1))))
    assert table.phases == (0, 0, 1)
    assert resolve(replace(first, phases=(0, 0, 1)), table) is not None
    assert resolve(first, table) is None


# -- addresses outside of what they belong to --------------------------------------------------------------------------


def test_an_address_beside_its_allocation_moves_with_it_alone() -> None:
    def build(capture: Capture, _: int) -> None:
        x, y = capture.input(8192), capture.input(64)
        capture.launch(x, y - 1056, y + 5000, y - 9000)

    table = found(twice(build, out_of_range_pointers=True))
    expected = (Slot(0, 1, INPUT, 1, -1056), Slot(0, 2, INPUT, 1, 5000), Slot(0, 3, INPUT, 1, -9000))
    assert table.slots == (Slot(0, 0, INPUT, 0, 0), *expected), "the last lies in a neighbour"


def test_an_address_that_moves_with_several_or_with_the_unborn_is_refused() -> None:
    def several(capture: Capture, _: int) -> None:
        base = capture.input(64)
        capture.input(64, address=base + 256)
        capture.launch(base - 8)

    def unborn(capture: Capture, number: int) -> None:
        x = capture.input(64)
        capture.launch(x + 64 + (8192 if number else 4096) - 8)
        capture.pool(64)

    for build in (several, unborn):
        assert refused(twice(build, out_of_range_pointers=True)).reason == "stray-address"


def test_half_an_earlier_address_beside_a_number_is_no_address() -> None:
    captures = Capture(0x7FBF_5AC0_0000), Capture(0x7FBF_73A0_0000)
    for capture in captures:
        x = capture.input(64)
        capture.launch(x, 5 << 32 | x & 0xFFFFFFFF)
    table = found(discover(*(capture.recording(out_of_range_pointers=True) for capture in captures)))
    assert table.slots == (Slot(0, 0, INPUT, 0, 0),)
    assert table.padding == ((0, 1),)


# -- any program -------------------------------------------------------------------------------------------------------

Word = tuple[str, int, int]


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], list[list[Word]]]:
    """Sizes of allocations, and launches of words: an offset into an allocation, a number, or a constant."""
    sizes = draw(st.lists(st.integers(0, 300), min_size=1, max_size=6))
    word = st.one_of(
        st.tuples(st.just("address"), st.integers(0, len(sizes) - 1), st.integers(0, 300)),
        st.tuples(st.just("number"), st.integers(-5000, 5000), st.just(0)),
        st.tuples(st.just("constant"), st.just(0), st.integers(0, 63)),
    )
    return sizes, draw(st.lists(st.lists(word, max_size=5), max_size=6))


def _write(capture: Capture, sizes: list[int], launches: list[list[Word]]) -> list[Slot]:
    """Record a program; returns the slots that it has in truth."""
    kinds = [INPUT if i % 2 else POOL for i in range(len(sizes))]
    starts = [capture.allocate(kind, size) for kind, size in zip(kinds, sizes, strict=True)]
    capture.constant(WEIGHTS, 64)
    truth: list[Slot] = []
    for index, words in enumerate(launches):
        values: list[int] = []
        for position, (what, which, offset) in enumerate(words):
            if what != "address":
                values.append(which if what == "number" else WEIGHTS + offset)
                continue
            reach = min(offset, sizes[which])
            values.append(starts[which] + reach)
            truth.append(Slot(index, position, *capture.allocations[which].key, reach))
        capture.launch(*values)
    return truth


@settings(deadline=None, max_examples=200)
@given(programs(), st.integers(0, 4096))
def test_discovery_finds_exactly_the_truth(program: tuple[list[int], list[list[Word]]], gap: int) -> None:
    captures = Capture(gap=64), Capture(ELSEWHERE, gap=64 + gap)
    truth = [_write(capture, *program) for capture in captures]
    table = found(discover(captures[0].recording(), captures[1].recording()))
    assert list(table.slots) == truth[0] == truth[1]
    again = Capture(0x7A00_0000_0000, gap=64)
    expected = _write(again, *program)
    assert list(found(resolve(again.recording(), table)).slots) == expected


# -- another size ------------------------------------------------------------------------------------------------------


def _sized(base: int, n: int, *extra: int, **facts: Any) -> Capture:
    """A launch with the addresses of an input and an intermediate, the number ``n``, and ``extra``."""
    capture = Capture(base)
    x, y = capture.input(8 * n), capture.pool(8 * n)
    capture.launch(*facts.pop("words", (x + 4 * n, y, n, *extra)), **facts)
    return capture


@pytest.mark.parametrize(
    ("again", "resolved"),
    [
        (_sized(HERE, 32, 1), True),
        (_sized(HERE, 32, 0x3004), True),
        (_sized(HERE, 32, HERE + 4), False),
        (_sized(HERE, 32), False),
        (_sized(HERE, 32, 1, name="other"), False),
        (_sized(HERE, 32, words=(HERE + 128, 5, 32, 1)), False),
        (_sized(HERE, 32, words=(HERE + 128, HERE, 32, 1)), False),
    ],
)
def test_slots_are_found_again_at_another_size(again: Capture, resolved: bool) -> None:
    """Not where a number became an address, an address a number or anybody else's, and in no other sequence."""
    table = found(discover(_sized(ELSEWHERE, 8, 1).recording(), _sized(WEIGHTS, 8, 1).recording()))
    new = resolve(again.recording(), table)
    if not resolved:
        assert new is None
        return
    assert found(new).slots == (Slot(0, 0, INPUT, 0, 128), Slot(0, 1, POOL, 0, 0))
    real = [Allocation(INPUT, 0, 0x3000, 64)]
    assert (resolve(again.recording(), table, real) is None) == (again.launches[0].words[3] == 0x3004)
    again.launch(1)
    assert resolve(again.recording(), table) is None


def written(capture: Capture, *slots: Slot) -> frozenset[int]:
    return Program(capture.recording(), slots, Layout(0, {}, ())).written


def test_written_arguments_are_exact_where_accesses_are_known() -> None:
    capture = Capture()
    capture.launch(1, 2, 3, uses=[reads(0, 8), writes(1, 8)])
    capture.launch(1, uses=[reads(0, 8)])
    slots = [Slot(0, 0, INPUT, 0, 0), Slot(0, 1, INPUT, 1, 0), Slot(0, 2, INPUT, 2, 0), Slot(1, 0, INPUT, 3, 0)]
    assert written(capture, *slots) == {1}
    capture.launch(1)
    assert written(capture, *slots, Slot(2, 0, INPUT, 4, 0)) == {1, 4}
    assert written(capture, Slot(2, 0, POOL, 0, 0)) == frozenset()
