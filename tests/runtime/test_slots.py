"""Slot discovery: every address found, every doubt refused with its reason and place, slots known from one size found
again in the single capture of another, and words told apart that are no operands: numbers, and bytes nobody set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.program.program import Layout, NonPointerWord, Program, Slot
from pygraph.program.recording import (
    Allocation,
    AllocationKind,
    LaunchKind,
    Origin,
    Output,
    OutputKind,
    UnownedAddress,
    UnownedMemory,
)
from pygraph.runtime.discover import capture as capture_region
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.slots import SlotTable, discover
from tests.runtime.captures import Capture, reads, writes
from tests.runtime.fake import FakeDriver, double

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
HERE, ELSEWHERE = 0x7F00_0000_0000, 0x6600_0000_0000
WEIGHTS, LIVE = 0x5500_0000_0000, 0x7A00_0000_0000

Build = Callable[[Capture, int], Any]
"""Records a capture: the first (0) or the second (1)."""

Reach = frozenset[tuple[AllocationKind, int]]
OPERAND: Reach = frozenset({(INPUT, 0)})


def twice(build: Build, real: Sequence[Allocation] = (), **facts: Any) -> SlotTable | Refusal:
    """Discover the slots of what ``build`` records, captured twice at other places. ``real``: the caller's memory."""
    captures = Capture(HERE), Capture(ELSEWHERE, gap=8192)
    for number, capture in enumerate(captures):
        build(capture, number)
    return discover(*(capture.recording(**facts) for capture in captures), real)


def found(result: SlotTable | Refusal | None) -> SlotTable:
    assert isinstance(result, SlotTable), result
    return result


def refused(result: SlotTable | Refusal | None) -> str:
    """The reason."""
    assert isinstance(result, Refusal)
    return result.reason


@pytest.mark.parametrize("may_access", [None, frozenset()])
@pytest.mark.parametrize("apart_later", [False, True])
def test_the_end_of_one_at_the_start_of_another_is_ambiguous_if_it_is_in_both_captures(
    apart_later: bool, may_access: Reach | None
) -> None:
    def build(capture: Capture, number: int) -> None:
        x = capture.input(256)
        capture.pool(64, None if apart_later and number else x + 256)
        capture.launch(x + 256, may_access=may_access)

    if apart_later:
        assert found(twice(build)).slots == (Slot(0, 0, INPUT, 0, 256),)
    else:
        assert refused(twice(build)) == "ambiguous-address"


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

    refusal = twice(build)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.launch, refusal.loc) == (reason, "gather", "model.py:7")
    assert "[gather at model.py:7]" in str(refusal)


@pytest.mark.parametrize("may_access", [None, OPERAND])
def test_a_word_that_points_into_the_callers_memory_is_refused(may_access: Reach | None) -> None:
    def build(capture: Capture, _: int) -> None:
        capture.launch(capture.input(8), LIVE + 8, may_access=may_access)

    found(twice(build))
    assert refused(twice(build, [Allocation(INPUT, 0, LIVE, 64)])) == "unmoved-address"


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
        assert refused(twice(build)) == reason


@pytest.mark.parametrize(
    ("first", "second", "same"), [(1.5, 1.5, True), (0.0, -0.0, False), (1, True, False), ([1], [1], False)]
)
def test_scalar_outputs_are_compared_by_type_and_bits(first: object, second: object, same: bool) -> None:
    values = (first, second)
    table = twice(lambda capture, number: capture.outputs.append(Output(OutputKind.OBJECT, value=values[number])))
    assert isinstance(table, SlotTable) is same


def _sized(base: int) -> Capture:
    """A launch with the addresses of an input and an intermediate, and a number."""
    capture = Capture(base)
    capture.launch(capture.input(64) + 32, capture.pool(64), 8)
    return capture


def test_memory_that_is_shared_within_a_capture_or_with_the_other_is_refused() -> None:
    def build(capture: Capture, _: int) -> None:
        x = capture.input(64)
        capture.pool(64, x + 32)
        capture.launch(x)

    assert refused(twice(build)) == "ambiguous-address"
    capture = _sized(HERE).recording()
    assert refused(discover(capture, capture)) == "captures-overlap"


def test_two_captures_have_the_same_phases() -> None:
    first, second = (_sized(base).recording() for base in (HERE, ELSEWHERE))
    assert refused(discover(replace(first, phases=(1,)), second)) == "unstable-order"
    assert isinstance(discover(replace(first, phases=(1,)), replace(second, phases=(1,))), SlotTable)


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
        assert refused(twice(build, out_of_range_pointers=True)) == "stray-address"


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("may_access", [frozenset({(INPUT, 0)}), None])
def test_a_word_that_nobody_sets_may_point_at_memory_before_it_is_made(side: int, may_access: Reach | None) -> None:
    def build(capture: Capture, number: int) -> None:
        x = capture.input(64)
        capture.launch(x, x + 64 + 4096 * (number + 1) if number == side else 77, may_access=may_access)
        assert capture.pool(64) == x + 64 + 4096 * (number + 1)

    result = twice(build)
    if may_access is None:
        assert refused(result) == "half-address"
    else:
        assert [(word.launch, word.word, word.scratch) for word in found(result).non_pointers] == [(0, 1, False)]


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


@settings(max_examples=200)
@given(programs(), st.integers(0, 4096))
def test_discovery_finds_exactly_the_truth(program: tuple[list[int], list[list[Word]]], gap: int) -> None:
    captures = Capture(gap=64), Capture(ELSEWHERE, gap=64 + gap)
    truth = [_write(capture, *program) for capture in captures]
    table = found(discover(captures[0].recording(), captures[1].recording()))
    assert list(table.slots) == truth[0] == truth[1]
    assert (table.padding, table.notes) == ((), ())


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


# -- words that are no operands ----------------------------------------------------------------------------------------


def word_beside_an_operand(
    words: tuple[int, int], may_access: Reach | None, foreign: UnownedMemory | None = None
) -> SlotTable | Refusal:
    """The slots, or the refusal, of a launch with an operand and a word beside it, ``words`` in either capture: inputs
    0 and 1 are the allocations."""

    def build(capture: Capture, number: int) -> None:
        operand, word = capture.input(64), words[number]
        capture.input(64)
        strange = () if foreign is None else (UnownedAddress(1, foreign, f"{word:#x} of nobody's"),)
        capture.launch(operand, word, name="sum", call="aten.sum.default", may_access=may_access, unowned=strange)

    return twice(build)


SECOND = (HERE + 64 + 4096, ELSEWHERE + 64 + 8192)
"""Where input 1 lies in either capture."""

DOUBTS = {
    "half-address": (SECOND[0], 77),
    "unpaired-address": (SECOND[0] + 8, SECOND[1]),
    "unmoved-address": (SECOND[0], SECOND[0]),
}


@pytest.mark.parametrize("reason", DOUBTS)
@pytest.mark.parametrize("may_access", [OPERAND, OPERAND | {(INPUT, 1)}, None])
def test_a_doubt_is_refused_where_the_call_may_use_what_it_is_about(reason: str, may_access: Reach | None) -> None:
    """Anything, or what it was given: two allocations that change places from one capture to the next look alike. A
    word that is equal in both captures points at no operand of one of them."""
    result = word_beside_an_operand(DOUBTS[reason], may_access)
    if may_access is None or (may_access != OPERAND and reason != "unmoved-address"):
        assert refused(result) == reason
        return
    table = found(result)
    assert table.slots == (Slot(0, 0, INPUT, 0, 0),)
    assert table.non_pointers == (NonPointerWord(0, 1, call="aten.sum.default"),)
    (note,) = table.notes
    assert note.endswith("(first: sum word 1 of aten.sum.default)")


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize(
    ("name", "other", "strange", "same", "inert"),
    [
        ("_ZN2at6native18elementwise_kernelILi128ELi4E", 77, None, True, True),
        ("_ZN2at6native18elementwise_kernelILi128ELi4E", 0, None, True, True),
        ("_ZN2at6native18elementwise_kernelILi128ELi4E", 0, None, False, False),
        ("_ZN2at6native18elementwise_kernelILi128ELi4E", LIVE, UnownedMemory.OTHER, True, False),
        ("cudnn_kernel", 77, None, True, False),
    ],
)
def test_an_address_in_one_capture_only_is_no_operand_of_a_kernel_of_atens(
    name: str, other: int, strange: UnownedMemory | None, same: bool, inert: bool, turn: int
) -> None:
    """A null pointer may be an operand that is left out, and other memory one that lies elsewhere."""

    def build(capture: Capture, number: int) -> None:
        operands = capture.input(64), capture.input(64)
        word = (operands[1], other)[::turn][number]
        unowned = (UnownedAddress(1, strange, "nobody's"),) if strange and word == other else ()
        reach = OPERAND | {(INPUT, 1)} if same or word == operands[1] else OPERAND
        facts: dict[str, Any] = {"may_access": reach, "unowned": unowned}
        capture.launch(operands[0], word, name=name, call="aten.convolution.default", **facts)

    result = twice(build)
    if not inert:
        assert refused(result) == "half-address"
        return
    assert found(result).slots == (Slot(0, 0, INPUT, 0, 0),)
    assert found(result).non_pointers == (NonPointerWord(0, 1, call="aten.convolution.default"),)


@pytest.mark.parametrize(
    ("again", "memory", "outcome"),
    [
        (0, UnownedMemory.OTHER, "number"),
        (512, UnownedMemory.OTHER, "foreign-address"),
        (0, UnownedMemory.BLOCK, "foreign-address"),
    ],
)
@pytest.mark.parametrize("call", ["_c10d_functional.all_reduce_.default", "mylib.reduce.default"])
def test_the_communicators_memory_is_constant_in_a_collective(
    again: int, memory: UnownedMemory, outcome: str, call: str
) -> None:
    """Not where it moved, nor in memory that torch uses, nor in other operators."""

    def build(capture: Capture, number: int) -> None:
        word = LIVE + number * again
        strange = (UnownedAddress(1, memory, f"{word:#x} of nobody's"),)
        capture.launch(capture.input(64), word, name="ncclDevKernel", call=call, unowned=strange)

    result = twice(build)
    if outcome != "number" or call.startswith("mylib"):
        assert refused(result) == "foreign-address"
        return
    assert found(result).slots == (Slot(0, 0, INPUT, 0, 0),)
    assert found(result).non_pointers == ()


ATEN = "_ZN2at6native18elementwise_kernelILi128ELi2E"
BIG = 1 << 20


@pytest.mark.parametrize(
    ("name", "places", "may_access", "left"),
    [
        (ATEN, (1 << 16, 3 << 16), OPERAND | {(INPUT, 1)}, True),
        (ATEN, (1 << 16, 3 << 16), None, False),
        (ATEN, (1 << 16, (3 << 16) + 64), OPERAND | {(INPUT, 1)}, False),
        (ATEN, (1 << 16, -BIG), OPERAND | {(INPUT, 1)}, False),
        ("cudnn_kernel", (1 << 16, 3 << 16), OPERAND | {(INPUT, 1)}, False),
    ],
)
def test_part_of_an_address_in_the_same_memory_is_no_operand_of_a_kernel_of_atens(
    name: str, places: tuple[int, int], may_access: Reach | None, left: bool
) -> None:
    """A view at an offset that changes, a library that rounds addresses up, and two allocations that change places stay
    doubts."""

    def build(capture: Capture, number: int) -> None:
        operand, other = capture.input(BIG), capture.input(BIG)
        word = (other & ~0xFFFF) + places[number]
        capture.launch(operand, word, name=name, call="aten.sum.default", may_access=may_access)

    result = twice(build)
    if not left:
        assert refused(result) == "unpaired-address"
        return
    assert found(result).slots == (Slot(0, 0, INPUT, 0, 0),)
    assert found(result).non_pointers == (NonPointerWord(0, 1, call="aten.sum.default"),)


@pytest.mark.parametrize(
    ("memory", "word", "outcome"),
    [
        (UnownedMemory.STAND_IN, 0x3_0400_0000, "left"),
        (UnownedMemory.WITHIN, LIVE + 8, "left"),
        (UnownedMemory.BLOCK, LIVE, "scratch"),
        (UnownedMemory.BLOCK, 0x3_0400_0000, "refused"),
        (UnownedMemory.OTHER, LIVE, "refused"),
    ],
)
@pytest.mark.parametrize("again", [0, 512])
def test_memory_of_nobodys(memory: UnownedMemory, word: int, outcome: str, again: int) -> None:
    """It is refused where a call may use anything, and where it may be memory after all."""
    for may_access in (None, OPERAND):
        result = word_beside_an_operand((word, word + again), may_access, memory)
        if outcome == "refused" or may_access is None:
            assert isinstance(result, Refusal)
            assert (result.reason, result.launch) == ("foreign-address", "sum")
            assert result.detail == f"word 1 is {word:#x} of nobody's (in a call of aten.sum.default)"
        else:
            assert found(result).non_pointers == (NonPointerWord(0, 1, outcome == "scratch", "aten.sum.default"),)


def _fork(made: Capture) -> None:
    made.recording = partial(made.recording, phases=(0,))  # type: ignore[method-assign]


def _resize(made: Capture) -> None:
    made.allocations[-1] = replace(made.allocations[-1], nbytes=4096)


@pytest.mark.parametrize("edit", [_resize, _fork])
def test_of_three_captures_two_have_to_agree(edit: Callable[[Capture], None]) -> None:
    """The first and the third do. The second allocated something else, or ordered its launches in another way: streams
    come from a pool of 32, so that one that a call makes is now and then the same as another that it uses."""
    driver = FakeDriver()
    driver.edits = [lambda made: None, edit, lambda made: None]
    made = capture_region(double, driver, [torch.ones(4)])
    assert not isinstance(made, Refusal)
    assert driver.captures == 3
    assert made.program.recording.phases == ()


# -- whatever lies in unset words -----------------------------------------------------------------------------------

SIZES = (256, 1024, 64)
RUBBISH: dict[str, tuple[int, int, UnownedMemory | None]] = {
    "stand-in": (0x3A51_0000_0000, 4096, UnownedMemory.STAND_IN),
    "block": (LIVE, 512, UnownedMemory.BLOCK),
    "within": (LIVE + 8, 512, UnownedMemory.WITHIN),
    "unused": (0, 16, None),
    "number": (HERE + 16 * 7, 0, None),
    "differs": (1000, 1, None),
}
"""What may lie in an unset word: the first, how far the others are apart, and what the driver says of them. Where
memory lies that no call uses depends on the capture."""

Rubbish = tuple[str, int, int]


@st.composite
def launches(draw: st.DrawFn) -> list[list[Rubbish]]:
    """Launches of words: operands (allocation, offset), and rubbish of every kind (value in either capture)."""
    operand = st.tuples(st.just("operand"), st.integers(0, 2), st.integers(0, 63))
    rubbish = st.tuples(st.sampled_from([*RUBBISH]), st.integers(0, 7), st.integers(0, 7))
    return draw(st.lists(st.lists(st.one_of(operand, rubbish), min_size=1, max_size=6), min_size=1, max_size=5))


def rubbish(recorded: Capture, side: int, program: list[list[Rubbish]]) -> set[Slot]:
    """Record ``program``; returns the slots that it has in truth. Calls are given input 0 and what they name."""
    starts = [recorded.input(SIZES[0]), recorded.pool(SIZES[1]), recorded.pool(SIZES[2]), recorded.input(4096)]
    truth: set[Slot] = set()
    for index, words in enumerate(program):
        values: list[int] = []
        strange: list[UnownedAddress] = []
        named: set[tuple[AllocationKind, int]] = set()
        for position, (kind, *numbers) in enumerate(words):
            if kind == "operand":
                owner = recorded.allocations[numbers[0]]
                named.add(owner.key)
                truth.add(Slot(index, position, *owner.key, numbers[1]))
                values.append(starts[numbers[0]] + numbers[1])
                continue
            start, step, memory = RUBBISH[kind]
            value = (start or starts[3]) + step * numbers[side]
            values.append(value)
            if memory is not None:
                strange.append(UnownedAddress(position, memory, f"{value:#x}"))
        recorded.launch(*values, call="aten.op.default", may_access=frozenset(named), unowned=tuple(strange))
    return truth


@settings(max_examples=150)
@given(launches())
def test_rubbish_never_stops_a_region_and_never_hides_an_operand(program: list[list[Rubbish]]) -> None:
    truths: list[set[Slot]] = []
    table = found(twice(lambda *facts: truths.append(rubbish(*facts, program)), out_of_range_pointers=True))
    truth = truths[0]
    assert truths[1] == truth <= set(table.slots)
    operands = {(slot.launch, slot.word) for slot in truth}
    inert = {(word.launch, word.word): word for word in table.non_pointers}
    assert not operands & inert.keys()
    blocks = {(i, w) for i, words in enumerate(program) for w, word in enumerate(words) if word[0] == "block"}
    assert {place for place, word in inert.items() if word.scratch} == blocks
