"""Words that read as addresses and are no operands: numbers, and bytes that nobody set. They never stop a region whose
calls use nothing but their operands, and what is an operand is never taken for one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.contract import NonPointerWord, Slot
from pygraph.runtime.discover import capture
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.recording import Allocation, AllocationKind, Recording, UnownedAddress, UnownedMemory
from pygraph.runtime.slots import SlotTable, discover, resolve
from tests.runtime.captures import Capture
from tests.runtime.fake import FakeDriver, double

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
HERE, THERE = 0x7F00_0000_0000, 0x6600_0000_0000
LIVE = 0x7A00_0000_0000

Reach = frozenset[tuple[AllocationKind, int]]


def both(
    *, may_access: Reach | None, words: tuple[int, int], foreign: UnownedMemory | None = None
) -> SlotTable | Refusal:
    """Discover what one word is, ``words`` in either capture, beside an operand: inputs 0 and 1 are the allocations."""
    made: list[Recording] = []
    for base, gap, word in ((HERE, 4096, words[0]), (THERE, 8192, words[1])):
        recorded = Capture(base, gap)
        operand = recorded.input(64)
        recorded.input(64)
        strange = () if foreign is None else (UnownedAddress(1, foreign, f"{word:#x} of nobody's"),)
        recorded.launch(operand, word, name="sum", call="aten.sum.default", may_access=may_access, unowned=strange)
        made.append(recorded.recording())
    return discover(*made)


OPERAND: Reach = frozenset({(INPUT, 0)})
SECOND = (HERE + 64 + 4096, THERE + 64 + 8192)
"""Where input 1 lies in either capture."""

DOUBTS = {
    "half-address": (SECOND[0], 77),
    "unpaired-address": (SECOND[0] + 8, SECOND[1]),
    "unmoved-address": (SECOND[0], SECOND[0]),
}


@pytest.mark.parametrize("reason", DOUBTS)
def test_an_address_of_what_a_call_cannot_use_stays_as_captured(reason: str) -> None:
    table = both(may_access=OPERAND, words=DOUBTS[reason])
    assert isinstance(table, SlotTable)
    assert table.slots == (Slot(0, 0, INPUT, 0, 0),)
    assert table.non_pointers == (NonPointerWord(0, 1, call="aten.sum.default"),)
    (note,) = table.notes
    assert note.startswith("1 word read as addresses of what their calls do not use")
    assert note.endswith("(first: sum word 1 of aten.sum.default)")


@pytest.mark.parametrize(
    ("reason", "may_access"),
    [
        *((reason, None) for reason in DOUBTS),
        *((reason, OPERAND | {(INPUT, 1)}) for reason in ("half-address", "unpaired-address")),
    ],
)
def test_a_doubt_about_what_a_call_may_use_is_refused(reason: str, may_access: Reach | None) -> None:
    """Anything, or what it was given: two allocations that change places from one capture to the next look alike."""
    refusal = both(may_access=may_access, words=DOUBTS[reason])
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason


def test_the_end_of_one_and_start_of_another_stays_ambiguous() -> None:
    made = []
    for base in (HERE, THERE):
        recorded = Capture(base)
        x = recorded.input(256)
        recorded.pool(64, x + 256)
        recorded.launch(x + 256, may_access=frozenset())
        made.append(recorded.recording())
    refusal = discover(*made)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "ambiguous-address"


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
        found = both(may_access=may_access, words=(word, word + again), foreign=memory)
        if outcome == "refused" or may_access is None:
            assert isinstance(found, Refusal)
            assert (found.reason, found.launch) == ("foreign-address", "sum")
            assert found.detail == f"word 1 is {word:#x} of nobody's (in a call of aten.sum.default)"
        else:
            assert isinstance(found, SlotTable)
            assert found.non_pointers == (NonPointerWord(0, 1, outcome == "scratch", "aten.sum.default"),)


def test_another_size_with_an_address_where_there_was_none_is_captured_twice() -> None:
    """A reduction that is split at one size only has a workspace at that size only."""

    def sized(base: int, gap: int, *, split: bool) -> Recording:
        recorded = Capture(base, gap)
        x, workspace = recorded.input(64), recorded.pool(64)
        recorded.launch(x, workspace if split else 0, may_access=frozenset({(INPUT, 0), (POOL, 0)}))
        return recorded.recording()

    table = discover(sized(HERE, 64, split=False), sized(THERE, 128, split=False))
    assert isinstance(table, SlotTable)
    assert resolve(sized(0x7000_0000_0000, 64, split=False), table) is not None
    assert resolve(sized(0x7000_0000_0000, 64, split=True), table) is None


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
    made = capture(double, driver, [torch.ones(4)])
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


def written(base: int, gap: int, side: int, program: list[list[Rubbish]]) -> tuple[Recording, set[Slot]]:
    """One capture of ``program``, and the slots that it has in truth. Calls are given input 0 and what they name."""
    recorded = Capture(base, gap)
    starts = [recorded.input(SIZES[0]), recorded.pool(SIZES[1]), recorded.pool(SIZES[2]), recorded.input(4096)]
    truth: set[Slot] = set()
    for index, words in enumerate(program):
        values: list[int] = []
        strange: list[UnownedAddress] = []
        given_: set[tuple[AllocationKind, int]] = set()
        for position, (kind, *numbers) in enumerate(words):
            if kind == "operand":
                owner = recorded.allocations[numbers[0]]
                given_.add(owner.key)
                truth.add(Slot(index, position, *owner.key, numbers[1]))
                values.append(starts[numbers[0]] + numbers[1])
                continue
            start, step, memory = RUBBISH[kind]
            value = (start or starts[3]) + step * numbers[side]
            values.append(value)
            if memory is not None:
                strange.append(UnownedAddress(position, memory, f"{value:#x}"))
        facts = {"call": "aten.op.default", "may_access": frozenset(given_), "unowned": tuple(strange)}
        recorded.launch(*values, **facts)  # type: ignore[arg-type]
    return recorded.recording(out_of_range_pointers=True), truth


@settings(deadline=None, max_examples=150)
@given(launches())
def test_rubbish_never_stops_a_region_and_never_hides_an_operand(program: list[list[Rubbish]]) -> None:
    first, truth = written(HERE, 4096, 0, program)
    second, same = written(THERE, 8192, 1, program)
    assert truth == same
    table = discover(first, second)
    assert isinstance(table, SlotTable), table
    assert truth <= set(table.slots)
    operands = {(slot.launch, slot.word) for slot in truth}
    inert = {(word.launch, word.word): word for word in table.non_pointers}
    assert not operands & inert.keys()
    blocks = {(i, w) for i, words in enumerate(program) for w, word in enumerate(words) if word[0] == "block"}
    assert {place for place, word in inert.items() if word.scratch} == blocks


def test_what_the_driver_does_not_know_of_real_memory_is_refused() -> None:
    made = []
    for base in (HERE, THERE):
        recorded = Capture(base)
        recorded.launch(recorded.input(8), LIVE, may_access=OPERAND)
        made.append(recorded.recording())
    refusal = discover(made[0], made[1], [Allocation(INPUT, 0, LIVE, 64)])
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "unmoved-address"
