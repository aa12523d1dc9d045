"""Memory for a program that is run launch by launch: where each allocation lies, and what was written beside one.

Between any two allocations outside of the workspace lie guard bytes. What is run on it is ``divergence``'s subject.
"""

from __future__ import annotations

import torch

from pygraph.runtime.driver import Program, Slot
from pygraph.runtime.recording import AllocationKind
from pygraph.runtime.tensors import Snapshot, span

__all__ = ["POISON", "Key", "Ranges", "SteppedMemory", "needed"]

Key = tuple[AllocationKind, int]

POISON = 0xA5
"""What memory holds that no launch wrote."""

_GUARD = 4096
"""Bytes around each allocation: an address that is a little wrong harms nobody else."""


def needed(program: Program) -> int:
    """Bytes that the memory of ``program`` takes, arguments left out."""
    return sum(nbytes + 2 * _GUARD for _, nbytes in _pieces(program))


def _pieces(program: Program) -> list[tuple[int, int]]:
    """The workspace (as -1), then each allocation that outlives a replay, with their bytes."""
    sizes = {a.index: a.nbytes for a in program.recording.allocations if a.kind is AllocationKind.POOL}
    return [(-1, program.layout.nbytes), *((index, sizes[index]) for index in program.layout.fresh)]


class SteppedMemory:
    """The workspace and fresh memory of ``program`` on ``device``, and ``arguments`` that were copied already."""

    def __init__(self, program: Program, arguments: Snapshot, device: torch.device) -> None:
        self._offsets = program.layout.offsets
        self._sizes = {a.key: a.nbytes for a in program.recording.allocations}
        self._arguments = arguments
        alignment = max(program.recording.alignment, 1)
        cursor = _GUARD
        places: dict[int, tuple[int, int]] = {}
        for index, nbytes in _pieces(program):
            cursor += -cursor % alignment
            places[index] = (cursor, cursor + nbytes)
            cursor += nbytes + _GUARD
        buffer = torch.full((cursor + alignment,), POISON, dtype=torch.uint8, device=device)
        shift = -buffer.data_ptr() % alignment
        self._buffer = buffer[shift : shift + cursor]
        self._base = self._buffer.data_ptr()
        self._places = places
        edges = [0, *(edge for place in places.values() for edge in place), cursor]
        self._beside = [*map(self._slice, edges[::2], edges[1::2]), *arguments.guards]
        self._untouched = [guard.clone() for guard in self._beside]

    def _slice(self, begin: int, end: int) -> torch.Tensor:
        return self._buffer[begin:end]

    @property
    def intact(self) -> bool:
        """Whether nobody wrote beside an allocation."""
        return torch.equal(torch.cat(self._beside), torch.cat(self._untouched))

    def address(self, slot: Slot) -> int:
        """The address that ``slot`` stands for."""
        if slot.kind is AllocationKind.INPUT:
            return int(self._arguments.args[slot.index].data_ptr()) + slot.offset
        begin, _ = self._place(slot.index)
        return self._base + begin + slot.offset

    def bytes(self, key: Key, offset: int, nbytes: int) -> torch.Tensor | None:
        """Those bytes of an allocation as a flat uint8 tensor; None where it has no such bytes."""
        kind, index = key
        if offset < 0 or offset + nbytes > self._sizes[key]:
            return None
        if kind is AllocationKind.INPUT:
            return span(self._arguments.args[index])[offset : offset + nbytes]
        if index not in self._places and index not in self._offsets:
            return None
        begin, _ = self._place(index)
        return self._slice(begin + offset, begin + offset + nbytes)

    def forget(self, key: Key) -> None:
        """Fill an intermediate or output, in which nothing is kept yet, with POISON."""
        found = self.bytes(key, 0, self._sizes[key])
        if found is not None:
            found.fill_(POISON)

    def _place(self, index: int) -> tuple[int, int]:
        if index in self._places:
            return self._places[index]
        begin = self._places[-1][0] + self._offsets[index]
        return begin, begin + self._sizes[AllocationKind.POOL, index]


class Ranges:
    """Byte ranges of allocations; those that touch are one."""

    def __init__(self) -> None:
        self._ranges: dict[Key, list[tuple[int, int]]] = {}

    def add(self, key: Key, begin: int, end: int) -> None:
        """``begin`` to ``end`` belong to it from now on."""
        apart = [(low, high) for low, high in self._ranges.get(key, []) if high < begin or end < low]
        touching = [r for r in self._ranges.get(key, []) if r not in apart]
        low, high = min([begin, *(r[0] for r in touching)]), max([end, *(r[1] for r in touching)])
        self._ranges[key] = [*apart, (low, high)]

    def covers(self, key: Key, begin: int, end: int) -> bool:
        """Whether all of ``begin`` to ``end`` belongs to it."""
        return any(low <= begin and end <= high for low, high in self._ranges.get(key, []))
