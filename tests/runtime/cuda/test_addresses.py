"""Address space for captures: disjoint, congruent, never handed out twice, mapped only as far as it is used."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings import driver
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.addresses import ALIGNMENT, CHUNK, GUARD, PAGE, SCRATCH, Arenas


class Memory:
    """The memory functions of the driver: what is reserved, and what is mapped."""

    CUdeviceptr = CUstream = staticmethod(int)

    def __init__(self) -> None:
        self.created = 0
        self.reserved: list[tuple[int, int]] = []
        self.mapped: dict[int, int] = {}
        self.accessible: list[tuple[int, int]] = []
        self.exhausted = False
        self.pages_left = -1
        self.hints: list[int] = []
        self.filled: list[tuple[int, int, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def cuMemGetAllocationGranularity(self, properties: Any, flags: int) -> tuple[int, int]:
        return (0, 1 << 21)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[int, str]:
        self.created += nbytes
        return (0, "page")

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[int, int]:
        if self.exhausted:
            return (2, 0)
        self.hints.append(address)
        base = 1 << 45 if not self.reserved else sum(self.reserved[-1])
        self.reserved.append((base, nbytes))
        return (0, base)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: Any, flags: int) -> tuple[int]:
        assert address not in self.mapped
        assert any(base <= address and address + nbytes <= base + size for base, size in self.reserved)
        if self.pages_left == len(self.mapped):
            return (2,)
        self.mapped[address] = nbytes
        return (0,)

    def cuMemUnmap(self, start: int, nbytes: int) -> tuple[int]:
        self.mapped = {a: n for a, n in self.mapped.items() if not start <= a < start + nbytes}
        return (0,)

    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> tuple[int]:
        self.accessible.append((address, nbytes))
        return (0,)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> tuple[int]:
        assert self.covers(address)
        assert self.covers(address + nbytes - 1)
        self.filled.append((address, value, nbytes, stream))
        return (0,)

    def covers(self, address: int) -> bool:
        return any(base <= address < base + nbytes for base, nbytes in self.accessible)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3 * PAGE), st.integers(0, ALIGNMENT - 1)), min_size=1, max_size=20))
def test_allocations_are_apart_congruent_and_mapped(requests: list[tuple[int, int]]) -> None:
    memory = Memory()
    arena = Arenas(memory, 0).lease()  # type: ignore[arg-type]
    end = 0
    for nbytes, residue in requests:
        address = arena.take(nbytes, residue)
        assert address % ALIGNMENT == residue
        assert address >= end + GUARD
        assert memory.covers(address)
        assert memory.covers(address + max(nbytes - 1, 0))
        assert arena.covers(address)
        end = address + nbytes
    assert memory.created == PAGE
    assert sum(memory.mapped.values()) <= end - memory.reserved[0][0] + PAGE + 2 * GUARD


def test_arenas_that_are_leased_together_are_disjoint_and_differ_in_their_gaps() -> None:
    arenas = Arenas(Memory(), 0)  # type: ignore[arg-type]
    first, second = arenas.lease(), arenas.lease()
    pairs = [(first.take(1000), second.take(1000)) for _ in range(50)]
    moves = [b - a for a, b in pairs]
    assert len(set(moves)) == len(moves)
    assert not any(first.covers(b) or second.covers(a) for a, b in pairs)


def test_an_arena_is_used_again_once_nothing_lies_there() -> None:
    memory = Memory()
    arenas = Arenas(memory, 0)  # type: ignore[arg-type]
    first = arenas.lease()
    start = first.take(100)
    busy = [True]
    arenas.give_back(first, lambda: not busy[0])
    other = arenas.lease()
    assert other is not first
    busy[0] = False
    again = arenas.lease()
    assert again is first
    mapped = len(memory.mapped)
    assert again.take(100) == start
    assert len(memory.mapped) == mapped


def test_more_than_was_reserved_goes_to_another_range() -> None:
    memory = Memory()
    arena = Arenas(memory, 0).lease()  # type: ignore[arg-type]
    arena.take(100)
    large = arena.take(CHUNK)
    assert len(memory.reserved) == 2
    assert memory.covers(large + CHUNK - 1)
    assert arena.take(100) > large + CHUNK


def test_memory_that_is_short_is_told_from_other_errors() -> None:
    memory = Memory()
    memory.exhausted = True
    with pytest.raises(MemoryError, match="cuMemAddressReserve"):
        Arenas(memory, 0).lease().take(1)  # type: ignore[arg-type]
    memory.cuMemCreate = lambda *_: (1, 0)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(CaptureError, match="lambda"):
        Arenas(memory, 0).lease()  # type: ignore[arg-type]


def test_an_arena_that_could_not_grow_can_later() -> None:
    memory = Memory()
    arena = Arenas(memory, 0).lease()  # type: ignore[arg-type]
    memory.pages_left = 2
    with pytest.raises(MemoryError, match="cuMemMap"):
        arena.take(5 * PAGE)
    assert not memory.mapped
    memory.pages_left = 100
    address = arena.take(5 * PAGE)
    assert memory.covers(address)
    assert memory.covers(address + 5 * PAGE - 1)


def test_ranges_are_asked_for_where_small_numbers_are_no_addresses() -> None:
    memory = Memory()
    arenas = Arenas(memory, 0)  # type: ignore[arg-type]
    for _ in range(3):
        arenas.lease().take(100)
    uppers = [{(hint + at) >> 32 for at in (0, CHUNK - 1)} for hint in memory.hints]
    assert all(4096 < min(pair) <= max(pair) < 1 << 15 for pair in uppers)
    assert all(max(pair) // 64 == min(pair) // 64 and min(pair) % 64 for pair in uppers)
    assert len({min(pair) for pair in uppers}) == 3
    assert all(hint % PAGE == 0 for hint in memory.hints)


def test_scratch_is_mapped_far_around_and_filled_once() -> None:
    memory = Memory()
    arenas = Arenas(memory, 0)  # type: ignore[arg-type]
    address = arenas.scratch(77)
    reach = SCRATCH // 2
    assert address % ALIGNMENT == 0
    assert all(memory.covers(place) for place in (address - reach, address, address + reach - 1))
    assert arenas.scratch(77) == address
    assert memory.created == PAGE
    assert [(value, nbytes, stream) for _, value, nbytes, stream in memory.filled] == [(0xFF, PAGE, 77)]


def test_every_captures_addresses_and_scratch_are_told_from_others() -> None:
    arenas = Arenas(Memory(), 0)  # type: ignore[arg-type]
    first, second = arenas.lease(), arenas.lease()
    places = [first.take(100), second.take(100), arenas.scratch(0)]
    arenas.give_back(first)
    assert all(map(arenas.covers, places))
    assert not arenas.covers(1 << 44)
