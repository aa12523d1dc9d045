"""Slot discovery: every address found, and every doubt refused with its reason and place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.contract import Slot
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.recording import Allocation, AllocationKind, LaunchKind, Origin, Output, OutputKind
from pygraph.runtime.slots import SlotTable, discover, resolve
from tests.runtime.captures import Capture

INPUT, POOL, CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT
WEIGHTS = 0x5500_0000_0000
ELSEWHERE = 0x6600_0000_0000


def twice(build: Callable[[Capture], None], second: Callable[[Capture], None] | None = None) -> SlotTable | Refusal:
    """Discover the slots of what ``build`` records, captured twice at other places."""
    captures = Capture(), Capture(ELSEWHERE, gap=8192)
    build(captures[0])
    (second or build)(captures[1])
    return discover(captures[0].recording(), captures[1].recording())


def refused(result: SlotTable | Refusal | None) -> Refusal:
    assert isinstance(result, Refusal)
    return result


def test_addresses_numbers_and_constants_are_told_apart() -> None:
    def build(capture: Capture) -> None:
        x = capture.input(256)
        weight = capture.constant(WEIGHTS, 64)
        capture.launch(x + 16, weight + 8, 42, 0)
        y = capture.pool(512)
        capture.launch(x, y + 504)

    table = twice(build)
    assert isinstance(table, SlotTable)
    assert table.slots == (Slot(0, 0, INPUT, 0, 16), Slot(1, 0, INPUT, 0, 0), Slot(1, 1, POOL, 0, 504))
    assert table.padding == ()
    assert table.notes == ()


def test_one_past_the_end_is_an_offset_of_the_allocation() -> None:
    def build(capture: Capture) -> None:
        x = capture.input(256)
        capture.launch(x, x + 256)

    table = twice(build)
    assert isinstance(table, SlotTable)
    assert table.slots[1] == Slot(0, 1, INPUT, 0, 256)


def test_the_end_of_one_at_the_start_of_another_is_ambiguous() -> None:
    def build(capture: Capture) -> None:
        x = capture.input(256)
        capture.pool(64, x + 256)
        capture.launch(x + 256)

    assert refused(twice(build)).reason == "ambiguous-address"


def test_the_end_of_one_that_touches_another_in_one_capture_only_is_the_end() -> None:
    def touching(capture: Capture) -> None:
        x = capture.input(256)
        capture.pool(64, x + 256)
        capture.launch(x + 256)

    def apart(capture: Capture) -> None:
        x = capture.input(256)
        capture.pool(64)
        capture.launch(x + 256)

    table = twice(touching, apart)
    assert isinstance(table, SlotTable)
    assert table.slots == (Slot(0, 0, INPUT, 0, 256),)


def test_empty_tensors_with_and_without_an_address() -> None:
    def build(capture: Capture) -> None:
        nothing = capture.input(0)
        null = capture.input(0, address=0)
        x = capture.input(8)
        capture.launch(nothing, null, x, 0)

    table = twice(build)
    assert isinstance(table, SlotTable)
    assert table.slots == (Slot(0, 0, INPUT, 0, 0), Slot(0, 2, INPUT, 2, 0))


def test_a_word_belongs_to_what_was_live_at_its_launch() -> None:
    def build(capture: Capture) -> None:
        x = capture.input(64)
        late = x + 64 + (4096 if capture.allocations[0].address != ELSEWHERE else 8192)
        capture.launch(late)
        capture.pool(64, late)

    refusal = refused(twice(build))
    assert (refusal.reason, refusal.launch) == ("stray-address", "kernel")


def _half(capture: Capture) -> None:
    x = capture.input(64)
    inside = capture.allocations[0].address == ELSEWHERE
    capture.launch(x if inside else 77, name="gather", origin=Origin(locs=("model.py:7",)))


def _unpaired(capture: Capture) -> None:
    x, y = capture.input(64), capture.input(64)
    capture.launch(x if x == ELSEWHERE else y)


def _other_offset(capture: Capture) -> None:
    x = capture.input(64)
    capture.launch(x + 8 if x == ELSEWHERE else x)


def _stray(capture: Capture) -> None:
    capture.launch(capture.input(64) - 8)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_half, "half-address"),
        (_unpaired, "unpaired-address"),
        (_other_offset, "unpaired-address"),
        (_stray, "stray-address"),
    ],
)
def test_doubtful_addresses_are_refused(build: Callable[[Capture], None], reason: str) -> None:
    assert refused(twice(build)).reason == reason


def test_a_refusal_names_the_launch_and_the_line() -> None:
    refusal = refused(twice(_half))
    assert (refusal.launch, refusal.loc) == ("gather", "model.py:7")
    assert "[gather at model.py:7]" in str(refusal)


@pytest.mark.parametrize("base", [0x7F00_0000_0000, ELSEWHERE])
@pytest.mark.parametrize("kind", [INPUT, POOL])
def test_a_word_that_stays_inside_memory_that_moves_is_refused(kind: AllocationKind, base: int) -> None:
    def build(capture: Capture) -> None:
        capture.allocate(kind, 64)
        capture.launch(base + 8)

    assert refused(twice(build)).reason == "unmoved-address"


def test_a_word_that_points_into_the_callers_memory_is_refused() -> None:
    first, second = Capture(), Capture(ELSEWHERE)
    for capture in (first, second):
        capture.launch(0x1234_5678)
    real = [Allocation(INPUT, 0, 0x1234_5000, 4096)]
    assert isinstance(discover(first.recording(), second.recording()), SlotTable)
    assert refused(discover(first.recording(), second.recording(), real)).reason == "unmoved-address"


def test_a_word_that_differs_for_no_reason_is_padding_and_noted() -> None:
    def build(capture: Capture) -> None:
        x = capture.input(64)
        capture.launch(x, 11 if x == ELSEWHERE else 12)

    table = twice(build)
    assert isinstance(table, SlotTable)
    assert table.padding == ((0, 1),)
    assert table.notes == ("kernel: word 1 differs between captures and is no address",)


def _base(capture: Capture) -> None:
    x = capture.input(64)
    y = capture.pool(64)
    capture.launch(x, y)
    capture.fresh(0)


def _more_launches(capture: Capture) -> None:
    _base(capture)
    capture.launch(1)


def _other_name(capture: Capture) -> None:
    _base(capture)
    capture.launches[0] = replace(capture.launches[0], name="other")


def _other_kind(capture: Capture) -> None:
    _base(capture)
    capture.launches[0] = replace(capture.launches[0], kind=LaunchKind.MEMCPY)


def _other_words(capture: Capture) -> None:
    _base(capture)
    capture.launches[0] = replace(capture.launches[0], words=(*capture.launches[0].words, 3))


def _other_signature(capture: Capture) -> None:
    _base(capture)
    capture.launches[0] = replace(capture.launches[0], signature=("relu",))


def _other_accesses(capture: Capture) -> None:
    _base(capture)
    capture.launches[0] = replace(capture.launches[0], uses=())


def _more_memory(capture: Capture) -> None:
    _base(capture)
    capture.pool(8)


def _other_size(capture: Capture) -> None:
    _base(capture)
    capture.allocations[1] = replace(capture.allocations[1], nbytes=65)


def _other_output(capture: Capture) -> None:
    _base(capture)
    capture.outputs[0] = Output(OutputKind.FRESH, allocation=0, offset=1)


def _more_outputs(capture: Capture) -> None:
    _base(capture)
    capture.fresh(0)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (_more_launches, "unstable-launches"),
        (_other_name, "unstable-launches"),
        (_other_kind, "unstable-launches"),
        (_other_words, "unstable-launches"),
        (_other_signature, "unstable-launches"),
        (_other_accesses, "unstable-launches"),
        (_more_memory, "unstable-allocations"),
        (_other_size, "unstable-allocations"),
        (_other_output, "unstable-outputs"),
        (_more_outputs, "unstable-outputs"),
    ],
)
def test_captures_that_do_not_repeat_are_refused(second: Callable[[Capture], None], reason: str) -> None:
    assert isinstance(twice(_base), SlotTable)
    assert refused(twice(_base, second)).reason == reason


@pytest.mark.parametrize(
    ("first", "second", "same"), [(1.5, 1.5, True), (0.0, -0.0, False), (1, True, False), ([1], [1], False)]
)
def test_scalar_outputs_are_compared_by_type_and_bits(first: object, second: object, same: bool) -> None:
    captures = Capture(), Capture(ELSEWHERE)
    for capture, value in zip(captures, (first, second), strict=True):
        capture.outputs.append(Output(OutputKind.SCALAR, value=value))
    assert isinstance(discover(captures[0].recording(), captures[1].recording()), SlotTable) is same


def test_captures_that_share_memory_are_refused() -> None:
    first, second = Capture(), Capture()
    for capture in (first, second):
        capture.launch(capture.input(64))
    assert refused(discover(first.recording(), second.recording())).reason == "captures-overlap"


def test_allocations_that_overlap_in_one_capture_are_refused() -> None:
    def build(capture: Capture) -> None:
        x = capture.input(64)
        capture.pool(64, x + 32)
        capture.launch(x)

    assert refused(twice(build)).reason == "ambiguous-address"


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
    table = discover(captures[0].recording(), captures[1].recording())
    assert isinstance(table, SlotTable)
    assert list(table.slots) == truth[0] == truth[1]
    again = Capture(0x7A00_0000_0000, gap=64)
    expected = _write(again, *program)
    resolved = resolve(again.recording(), table)
    assert resolved is not None
    assert list(resolved.slots) == expected


def displaced(build: Callable[[Capture], None], second: Callable[[Capture], None] | None = None) -> SlotTable | Refusal:
    """As ``twice``, for captures in which addresses may lie outside of what they belong to."""
    captures = Capture(), Capture(ELSEWHERE, gap=8192)
    build(captures[0])
    (second or build)(captures[1])
    return discover(
        captures[0].recording(out_of_range_pointers=True), captures[1].recording(out_of_range_pointers=True)
    )


def test_an_address_beside_its_allocation_moves_with_it_alone() -> None:
    def build(capture: Capture) -> None:
        x, y = capture.input(64), capture.input(64)
        capture.launch(x, y - 1056, y + 5000)

    table = displaced(build)
    assert isinstance(table, SlotTable)
    assert table.slots == (Slot(0, 0, INPUT, 0, 0), Slot(0, 1, INPUT, 1, -1056), Slot(0, 2, INPUT, 1, 5000))


def test_an_address_that_lands_in_a_neighbour_belongs_to_what_it_moves_with() -> None:
    def build(capture: Capture) -> None:
        capture.input(8192)
        y = capture.input(64)
        capture.launch(y - 9000)

    table = displaced(build)
    assert isinstance(table, SlotTable)
    assert table.slots == (Slot(0, 0, INPUT, 1, -9000),)


def test_an_address_that_moves_with_several_or_with_the_unborn_is_refused() -> None:
    def several(capture: Capture) -> None:
        base = capture.input(64)
        capture.input(64, address=base + 256)
        capture.launch(base - 8)

    def unborn(capture: Capture) -> None:
        x = capture.input(64)
        capture.launch(x + 64 + (4096 if x != ELSEWHERE else 8192) - 8)
        capture.pool(64)

    for build in (several, unborn):
        assert refused(displaced(build)).reason == "stray-address"


def test_half_an_earlier_address_beside_a_number_is_no_address() -> None:
    def build(capture: Capture) -> None:
        x = capture.input(64)
        capture.launch(x, 5 << 32 | x & 0xFFFFFFFF)

    captures = Capture(0x7FBF_5AC0_0000), Capture(0x7FBF_73A0_0000)
    for capture in captures:
        build(capture)
    table = discover(
        captures[0].recording(out_of_range_pointers=True), captures[1].recording(out_of_range_pointers=True)
    )
    assert isinstance(table, SlotTable)
    assert table.slots == (Slot(0, 0, INPUT, 0, 0),)
    assert table.padding == ((0, 1),)


def test_the_same_launches_in_other_phasesare_another_region() -> None:
    captures = Capture(), Capture(ELSEWHERE, gap=8192)
    for capture in captures:
        x = capture.input(64)
        for _ in range(3):
            capture.launch(x)
    first, second = (capture.recording() for capture in captures)
    refusal = refused(discover(replace(first, phases=(0, 0, 1)), second))
    assert refusal.reason == "unstable-order"
    table = discover(replace(first, phases=(0, 0, 1)), replace(second, phases=(0, 0, 1)))
    assert isinstance(table, SlotTable)
    assert table.phases == (0, 0, 1)
