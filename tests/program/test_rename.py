"""Allocations that begin anew: where, and that replays mean the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.program.default import DEFAULT_PASSES, as_captured, longest_path
from pygraph.program.dependences import order_of
from pygraph.program.program import Program, Slot
from pygraph.program.recording import Access, AllocationKind, Bytes, Recording
from pygraph.program.rename import rename
from pygraph.program.verify import verify
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.host import HostDriver
from tests.runtime.captures import Capture, reads
from tests.runtime.regions import compile_regions, same_bits

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
Uses = Sequence[tuple[int, int, int, str]]
"""An allocation (-1: the argument), the first byte and one past the last, and ``r``, ``w`` or ``rw``."""


def recorded(*launches: Uses, outputs: Sequence[int] = (), pool: int = 3, **facts: Any) -> tuple[Recording, list[Slot]]:
    """Launches with exact uses of an argument and of ``pool`` allocations of 8 bytes."""
    made, slots = Capture(), list[Slot]()
    starts = {-1: made.input(8), **{index: made.pool(8) for index in range(pool)}}
    for number, uses in enumerate(launches):
        exact = []
        for word, (index, begin, end, how) in enumerate(uses):
            access = replace(reads(word, end - begin), reads="r" in how, writes="w" in how)
            exact.append(access)
            slots.append(Slot(number, word, *((INPUT, 0) if index < 0 else (POOL, index)), begin))
        made.launch(*(starts[index] + begin for index, begin, _, _ in uses), uses=exact, **facts)
    for index in outputs:
        made.fresh(index)
    return made.recording(), slots


def names(recording: Recording, slots: Sequence[Slot]) -> list[list[int]]:
    """By launch, the allocations of its intermediates."""
    found: list[list[int]] = [[] for _ in recording.launches]
    for slot in sorted(slots, key=lambda slot: (slot.launch, slot.word)):
        if slot.kind is POOL:
            found[slot.launch].append(slot.index)
    return found


WRITE, READ = [(0, 0, 8, "w"), (-1, 0, 8, "r")], [(0, 0, 8, "r"), (1, 0, 8, "w")]


@pytest.mark.parametrize(
    ("launches", "expected"),
    [
        ([WRITE, READ, WRITE, READ], [[3], [3, 4], [0], [0, 1]]),
        ([WRITE, READ, [(0, 0, 8, "rw")], READ], [[0], [0, 3], [0], [0, 1]]),
        ([WRITE, READ, [(0, 0, 4, "w")], READ], [[0], [0, 3], [0], [0, 1]]),
        ([WRITE, READ, [(0, 0, 8, "w"), (0, 4, 8, "r")], READ], [[0], [0, 3], [0, 0], [0, 1]]),
        ([[(0, 0, 4, "w")], [(0, 0, 4, "r")], [(0, 0, 4, "w")]], [[3], [3], [0]]),
        ([[(0, 4, 8, "w")], [(0, 0, 4, "w")], [(0, 0, 8, "r")]], [[0], [0], [0]]),
        ([WRITE, WRITE], [[3], [0]]),
    ],
    ids=["whole", "updated", "part", "read", "all that is used", "in two parts", "never read"],
)
def test_an_allocation_begins_anew_where_it_is_overwritten_whole(launches: list[Uses], expected: list[Any]) -> None:
    recording, slots, count = rename(*recorded(*launches))
    assert names(recording, slots) == expected
    assert len(recording.allocations) == 4 + count


def test_an_output_is_what_was_written_last() -> None:
    recording, slots, _ = rename(*recorded(WRITE, READ, WRITE, outputs=[0]))
    assert names(recording, slots) == [[3], [3, 1], [0]]
    verify(as_captured(recording, slots))


def test_chains_that_share_a_buffer_run_side_by_side() -> None:
    recording, slots = recorded(*[WRITE, [(0, 0, 8, "r"), (-1, 0, 8, "r")]] * 4)
    program = as_captured(recording, tuple(slots))
    assert order_of(program.recording, program.slots).longest_path() == 8
    assert longest_path(program) == 2
    made = DEFAULT_PASSES(program, "dependences")
    verify(made)
    assert made.order is not None
    assert made.order.longest_path() == 2
    assert DEFAULT_PASSES(program, "program").recording == program.recording


def call(*launches: tuple[int, ...], given: Sequence[Access], group: int, made: Capture, slots: list[Slot]) -> None:
    """A call of several kernels of which no uses are known, each with words to some allocations."""
    for pointed in launches:
        number = len(made.launches)
        slots.extend(Slot(number, word, POOL, index, 0) for word, index in enumerate(pointed))
        addresses = {a.index: a.address for a in made.allocations if a.kind is POOL}
        made.launch(*(addresses[i] for i in pointed), operands=tuple(given), group=group)


def test_a_call_is_renamed_as_one() -> None:
    """By its operands, whichever of its kernels writes; not one that reads, and none between kernels of another."""
    whole, made, slots = Bytes(0, 8), Capture(), list[Slot]()
    for _ in range(3):
        made.pool(8)
    result, operand = (Access((POOL, 0), whole, writes=True, reads=reads) for reads in (False, True))
    other = Access((POOL, 1), whole, writes=False)
    call((0, 2), (2, 0), given=[result, other], group=0, made=made, slots=slots)
    call((0,), given=[replace(operand, writes=False)], group=1, made=made, slots=slots)
    call((2, 0), (0, 2), given=[result], group=2, made=made, slots=slots)
    call((0,), given=[operand], group=3, made=made, slots=slots)
    recording, slots_of, count = rename(made.recording(), slots)
    assert count == 1
    assert names(recording, slots_of) == [[3, 2], [2, 3], [3], [2, 0], [0, 2], [0]]
    assert [[access.key[1] for access in launch.operands or ()] for launch in recording.launches] == [
        [3, 1],
        [3, 1],
        [3],
        [0],
        [0],
        [0],
    ]
    inside = [replace(each, group=9) if each.index in (0, 5) else each for each in made.launches]
    assert rename(replace(made.recording(), launches=tuple(inside)), slots)[2] == 0
    apart = [replace(each, group=each.index, operands=(result,)) for each in made.launches]
    assert rename(replace(made.recording(), launches=tuple(apart)), slots)[2] == 0, "perhaps all of one call"


USE = st.tuples(st.integers(0, 2), st.sampled_from([(0, 8), (0, 8), (0, 4), (4, 8)]), st.sampled_from(["r", "w", "rw"]))


def run(program: Program, sequence: Sequence[int]) -> list[Any]:
    """The bytes of the outputs and the argument after launches in the order ``sequence``, with intermediates where
    ``program`` has them. A byte that a launch writes is a hash of the launch, the byte's place and all bytes that the
    launch read."""
    places = {(POOL, i): ("workspace", at) for i, at in program.layout.offsets.items()}
    slots = {(slot.launch, slot.word): slot for slot in program.slots}
    memory: dict[Any, Any] = {}

    def cells(launch: int, use: Any) -> list[Any]:
        slot = slots[launch, use.word]
        block, at = places.get(slot.key, (slot.key, 0))
        return [(block, at + slot.offset + use.start + byte) for byte in range(use.nbytes)]

    for number in sequence:
        uses = program.recording.launches[number].uses or ()
        seen = tuple(memory.get(cell) for use in uses if use.reads for cell in cells(number, use))
        for use in uses:
            if use.writes:
                memory.update(
                    {cell: hash((number, use.word, place, seen)) for place, cell in enumerate(cells(number, use))}
                )
    shown = [(POOL, output.index) for output in program.recording.outputs] + [(INPUT, 0)]
    return [memory.get((key, byte)) for key in shown for byte in range(8)]


@settings(max_examples=150)
@given(st.lists(st.lists(USE, min_size=1, max_size=3), min_size=2, max_size=10), st.booleans(), st.randoms())
def test_replays_in_any_order_mean_the_same(launches: list[Any], returns: bool, drawn: random.Random) -> None:
    """The first launch writes all of them: what nobody wrote, no replay knows."""
    first = [(index, 0, 8, "w") for index in range(3)]
    uses = [first, *([(index, *bounds, how) for index, bounds, how in each] for each in launches), [(-1, 0, 8, "w")]]
    uses[-1] += [(index, 0, 8, "r") for index in range(2)]
    recording, slots = recorded(*uses, outputs=[2] * returns)
    plain = as_captured(recording, tuple(slots))
    made = DEFAULT_PASSES(plain, "dependences")
    verify(made)
    waits = made.order.edges if made.order is not None else [range(at) for at in range(len(uses))]
    sequence: list[int] = []
    while len(sequence) < len(uses):
        ready = [at for at in range(len(uses)) if at not in sequence and set(waits[at]) <= set(sequence)]
        sequence.append(drawn.choice(ready))
    assert run(made, sequence) == run(plain, range(len(uses)))


def test_buffers_that_inductor_reuses_begin_anew() -> None:
    """Products side by side, into buffers that take each other's place."""

    def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        total = x.sum(0)
        for shift in range(4):
            total = total + torch.mm(torch.mm(x + shift, w), w).sum(0)
        return total

    compiled = compile_regions(branches)
    with torch.no_grad():
        compiled.call(torch.randn(8, 8), torch.randn(8, 8))
    (region,) = compiled.regions
    made = capture(region.fn, HostDriver(), region.fresh(), order="dependences")
    assert isinstance(made, Captured)
    assert int(made.program.notes[0].rpartition(" ")[2]) > 0
    args, expected = region.fresh(3), region.fresh(3)
    assert same_bits(made.executable.replay(args), region.fn(expected))
