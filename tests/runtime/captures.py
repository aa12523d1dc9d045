"""Recordings made by hand: what a driver would have written down, for tests of what is concluded from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pygraph.program.recording import (
    Allocation,
    AllocationKind,
    Launch,
    LaunchKind,
    Output,
    OutputKind,
    Recording,
    Use,
)

__all__ = ["Capture", "reads", "writes"]


def reads(word: int, nbytes: int, start: int = 0) -> Use:
    """``nbytes`` read at ``start`` bytes behind word ``word``."""
    return Use(word, start, nbytes, reads=True, writes=False)


def writes(word: int, nbytes: int, start: int = 0) -> Use:
    """``nbytes`` written at ``start`` bytes behind word ``word``."""
    return Use(word, start, nbytes, reads=False, writes=True)


class Capture:
    """Builds one Recording. Allocations lie ``gap`` bytes apart from ``base`` on, so that two captures with another
    gap move each of them by another distance."""

    def __init__(self, base: int = 0x7F00_0000_0000, gap: int = 4096) -> None:
        self._next = base
        self._gap = gap
        self.allocations: list[Allocation] = []
        self.launches: list[Launch] = []
        self.outputs: list[Output] = []

    def allocate(self, kind: AllocationKind, nbytes: int, address: int | None = None, index: int | None = None) -> int:
        """Enter an allocation, born now, and return its address."""
        if address is None:
            address = self._next
            self._next += nbytes + self._gap
        count = sum(a.kind is kind for a in self.allocations)
        position = count if index is None else index
        self.allocations.append(Allocation(kind, position, address, nbytes, len(self.launches)))
        return address

    def input(self, nbytes: int, address: int | None = None, index: int | None = None) -> int:
        """The stand-in of the next argument."""
        return self.allocate(AllocationKind.INPUT, nbytes, address, index)

    def pool(self, nbytes: int, address: int | None = None) -> int:
        """The next intermediate or output."""
        return self.allocate(AllocationKind.POOL, nbytes, address)

    def constant(self, address: int, nbytes: int) -> int:
        """The next constant."""
        return self.allocate(AllocationKind.CONSTANT, nbytes, address)

    def launch(self, *words: int, name: str = "kernel", uses: Sequence[Use] | None = None, **facts: Any) -> None:
        """The next launch."""
        known = None if uses is None else tuple(uses)
        fields = {"kind": LaunchKind.KERNEL, "signature": (), "uses": known, **facts}
        self.launches.append(Launch(len(self.launches), name=name, words=words, **fields))

    def fresh(self, allocation: int) -> None:
        """Return the POOL allocation ``allocation``."""
        self.outputs.append(Output(OutputKind.FRESH, allocation))

    def recording(self, **facts: Any) -> Recording:
        """All of it."""
        made = Recording(tuple(self.launches), tuple(self.allocations), tuple(self.outputs))
        return replace(made, **facts)
