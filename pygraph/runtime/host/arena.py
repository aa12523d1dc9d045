"""Addresses for one capture: reserved address space, handed out once and never again, with nothing behind it.

Nothing executes while capturing, so that no byte is ever needed; an access by mistake faults. Who asks for which
memory, and why, is the recorder's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.recording import Allocation, AllocationKind

__all__ = ["ALIGNMENT", "Arena", "extent"]

ALIGNMENT = 64
"""Bytes that every address is a multiple of, as the ordinary CPU allocator's are."""

GUARD = 4096
"""Bytes that lie between two allocations and belong to neither: an address just outside of one is nobody's."""

CHUNK = 1 << 30
"""Bytes of address space reserved at a time; more for a larger allocation."""


def extent(size: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element to the end of the last; sizes and strides in elements."""
    if any(n == 0 for n in size):
        return 0
    return (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * itemsize


class Arena:
    """The address space of one capture, disjoint from that of every other arena that is open.

    ``allocations`` are in the order of allocation. Closing, or dropping the last reference, unmaps everything.
    """

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self._chunks: list[tuple[int, int]] = []
        self._next = self._end = 0
        self._by_base: dict[int, Allocation] = {}
        self.allocations: list[Allocation] = []

    def __del__(self) -> None:
        if hasattr(self, "_chunks"):  # an exception may have come before
            self.close()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The reserved ranges as (address, bytes)."""
        return tuple(self._chunks)

    def close(self) -> None:
        """Give the address space back. Tensors over it may live on, but not be touched."""
        while self._chunks:
            self._native.unreserve(*self._chunks.pop())

    def tensor(
        self,
        key: tuple[AllocationKind, int],
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        *,
        offset: int = 0,
        born: int = 0,
    ) -> torch.Tensor:
        """A tensor over a new allocation ``key``, whose storage begins ``offset`` elements before the allocation."""
        nbytes = extent(size, stride, dtype.itemsize)
        front = offset * dtype.itemsize
        base = self._take(front + nbytes, front)
        allocation = Allocation(*key, base + front, nbytes, born)
        self.allocations.append(allocation)
        self._by_base[base] = allocation
        tensor: torch.Tensor = self._native.tensor_at(
            allocation.address, front + nbytes, list(size), list(stride), dtype, offset
        )
        return tensor

    def owner(self, storage_base: int) -> Allocation | None:
        """The allocation whose storage begins at ``storage_base``."""
        return self._by_base.get(storage_base)

    def _take(self, nbytes: int, front: int) -> int:
        """The start of ``nbytes`` new bytes; ``front`` bytes behind it lies a multiple of ALIGNMENT."""
        pad = -front % ALIGNMENT
        total = -(-(pad + nbytes + GUARD) // ALIGNMENT) * ALIGNMENT
        if self._next + total > self._end:
            self._grow(total)
        start = self._next + pad
        self._next += total
        return start

    def _grow(self, least: int) -> None:
        nbytes = -(-(least + GUARD) // CHUNK) * CHUNK
        try:
            address = self._native.reserve(nbytes)
        except RuntimeError as error:
            raise CaptureError("no-address-space", str(error)) from error
        self._chunks.append((address, nbytes))
        self._next, self._end = address + GUARD, address + nbytes
