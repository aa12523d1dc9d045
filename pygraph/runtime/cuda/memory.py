"""Where a region's own memory comes from while it is captured, and which allocations it made.

``SessionMemory`` hands out addresses of an arena, each once, through the native allocator. ``SegmentMemory`` needs no
compiler: it takes torch's private pool, whose segments then move as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import torch

from pygraph.runtime.cuda.addresses import Arena
from pygraph.runtime.cuda.bindings import call
from pygraph.runtime.recording import Allocation, AllocationKind, Launch

__all__ = ["CaptureMemory", "SegmentMemory", "SessionMemory"]


class CaptureMemory(Protocol):
    """The memory of one capture. ``begin`` and ``end`` are called while capturing, on the capturing thread."""

    pool: Any
    """The pool that torch is to capture with; None: one of the graph's own."""
    exact: bool
    """Whether each allocation is one tensor's storage; else it may hold several."""

    def begin(self) -> None:
        """Allocations of this thread belong to the capture from now on."""

    def end(self) -> None:
        """They do no longer. May be called without ``begin``."""

    def nodes(self) -> int:
        """The number of nodes captured so far."""

    def random_memory(self) -> tuple[int, ...]:
        """Addresses of the 8-byte seed and offset that captured kernels read; asked between begin and end."""

    def renumber(self, starts: Sequence[int]) -> None:
        """Count launches where nodes were counted: what was node i begins with launch ``starts[i]``."""

    def allocations(self, launches: Sequence[Launch]) -> list[Allocation]:
        """What was allocated, paired across captures of the same region by its index."""

    def alive(self) -> int:
        """Allocations that somebody still holds."""

    def survivors(self) -> list[int]:
        """The sizes of those, in bytes."""

    def births(self) -> list[int]:
        """How many nodes (launches, once renumbered) there were when each of those was allocated; nothing where that is
        not known."""


class SessionMemory:
    """Every allocation at an address of its own: nothing is reused, and nothing takes memory."""

    pool: Any = None
    exact = True

    def __init__(self, native: ModuleType, arena: Arena, device: int, stream: int) -> None:
        self._native, self._arena, self._device = native, arena, device
        self._session: Any = native.Session(device, stream, arena.next, arena.end, arena.gap, self._grow)
        self._starts: Sequence[int] = ()

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

    def renumber(self, starts: Sequence[int]) -> None:
        """What the session noted stays as it is."""
        self._starts = starts

    def _pieces(self) -> list[tuple[int, int, int, bool]]:
        """The address, size and birth of each allocation, and whether somebody holds it."""
        noted = self._session.pieces()
        return [(a, n, self._starts[born] if self._starts else born, alive) for a, n, born, alive in noted]

    def allocations(self, launches: Sequence[Launch]) -> list[Allocation]:  # noqa: ARG002
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


class SegmentMemory:
    """The segments of the graph's private pool. The pool is held for as long as the graph."""

    exact = False

    def __init__(self, driver: ModuleType, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._graph: Any = None
        self.pool: Any = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        """Torch allocates from the pool by itself."""
        self._graph = call(self._driver.cuStreamGetCaptureInfo, self._driver.CUstream(self._stream))[2]

    def end(self) -> None:
        """Nothing to undo."""

    def nodes(self) -> int:
        """The number of nodes captured so far."""
        return int(call(self._driver.cuGraphGetNodes, self._graph)[1])

    def random_memory(self) -> tuple[int, ...]:
        """Unknown here: what reads it is found among the nodes of a capture made for that."""
        return ()

    def renumber(self, starts: Sequence[int]) -> None:
        """Nothing is numbered."""

    def allocations(self, launches: Sequence[Launch]) -> list[Allocation]:
        """The segments, in the order in which launches first point into them; others are of no use to the graph."""
        segments = _joined(sorted((int(s["address"]), int(s["total_size"])) for s in self._segments()))
        found: list[tuple[int, int]] = []
        for launch in launches:
            for word in launch.words:
                segment = next((s for s in segments if s[0] <= word < s[0] + s[1]), None)
                if segment is not None and segment not in found:
                    found.append(segment)
        rest = [segment for segment in segments if segment not in found]
        return [Allocation(AllocationKind.POOL, i, *segment) for i, segment in enumerate(found + rest)]

    def alive(self) -> int:
        """Blocks of the pool that somebody still holds."""
        return len(self.survivors())

    def survivors(self) -> list[int]:
        """The sizes of those."""
        blocks = (block for segment in self._segments() for block in segment["blocks"])
        return [int(block["size"]) for block in blocks if block["state"] == "active_allocated"]

    def births(self) -> list[int]:
        """Torch's pool does not say."""
        return []

    def _segments(self) -> list[dict[str, Any]]:
        return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(self.pool)]


def _joined(segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Segments (address, bytes) in ascending order; those that touch count as one, as the border is nobody's alone."""
    joined: list[tuple[int, int]] = []
    for address, nbytes in segments:
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((address, nbytes))
    return joined
