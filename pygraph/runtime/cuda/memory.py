"""Where a region's own memory comes from while it is captured, and which allocations it made."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pygraph.runtime.cuda.addresses import Arena
from pygraph.runtime.recording import Allocation, AllocationKind

__all__ = ["SessionMemory"]


class SessionMemory:
    """Every allocation at an address of its own: nothing is reused, and nothing takes memory."""

    def __init__(self, native: ModuleType, arena: Arena, device: int, stream: int) -> None:
        self._native, self._arena, self._device = native, arena, device
        self._session: Any = native.Session(device, stream, arena.next, arena.end, arena.gap, self._grow)

    def _grow(self, used: int, nbytes: int) -> tuple[int, int]:
        self._arena.next = used
        return self._arena.grow(nbytes)

    def begin(self) -> None:
        """Stand before the ordinary allocator, for this thread."""
        self._native.enter(self._session)

    def end(self) -> None:
        """Step back."""
        self._native.leave()
        self._session.close()

    def nodes(self) -> int:
        """The number of nodes captured so far."""
        return int(self._session.nodes())

    def random_memory(self) -> tuple[int, ...]:
        """Addresses of seed and offset."""
        seed, offset = self._native.random_memory(self._device)
        return (int(seed), int(offset))

    def _pieces(self) -> list[tuple[int, int, int, bool]]:
        """The address, size and birth of each allocation, and whether somebody holds it."""
        return list(self._session.pieces())

    def allocations(self) -> list[Allocation]:
        """In the order of allocation."""
        pieces = enumerate(self._pieces())
        return [Allocation(AllocationKind.POOL, i, address, nbytes, born) for i, (address, nbytes, born, _) in pieces]

    def alive(self) -> int:
        """Allocations that somebody still holds."""
        return int(self._session.alive())

    def survivors(self) -> list[int]:
        """The sizes of those."""
        return [nbytes for _, nbytes, _, alive in self._pieces() if alive]

    def births(self) -> list[int]:
        """As the session noted."""
        return [int(born) for _, _, born, alive in self._pieces() if alive]
