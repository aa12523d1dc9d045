"""Address space for captures: reserved ranges of device addresses, all backed by one physical page; and the owners of
addresses in a capture.

Nothing executes during a capture, so an address only has to look real. Ranges stay mapped for the life of the process
and are leased to one capture at a time, which decides on the layout of its lease. Scratch memory is such a range that
is never leased.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from pygraph.program.recording import Allocation, AllocationKind, Launch, UnownedAddress, UnownedMemory
from pygraph.runtime.cuda.bindings import call, succeeded
from pygraph.runtime.slots import AddressMap

__all__ = ["ALIGNMENT", "GUARD", "Arena", "Arenas", "with_unowned"]

ALIGNMENT = 512
"""Alignment of allocations, in bytes: that of the ordinary CUDA allocator."""

GUARD = 4096
"""Minimum number of bytes between two allocations: an address just outside of one has no owner."""

CHUNK = 1 << 37
"""Bytes of address space reserved at a time (128 GiB); only the parts handed out are mapped."""

PAGE = 1 << 25
"""Bytes of the physical page (32 MiB) behind every address: a larger page takes fewer calls to map."""


SCRATCH = 1 << 28
"""Bytes of scratch memory (256 MiB), half of them on either side of the address in use."""

_FIRST, _STEP, _LAST = 0x3A51 << 32, (1 << 38) + (1 << 26), 0x54 << 40
"""Requested start of the first range, distance between ranges, and upper limit. By default, the driver reserves from
0x3_0200_0000 on; two adjacent 32-bit numbers (a count and the number 4, say) then read as an address. Here the upper
number would have to lie between 14929 and 21504 and, in a range of 128 GiB, be no multiple of 64. Both halves of an
address change from one range to the next: half an old address beside a number never moves as far as an allocation."""

_LOWEST, _HIGHEST = 1 << 32, 1 << 57
"""Bounds of addresses; words outside of them are certainly numbers."""

_numbers = itertools.count()


class _Range:
    """One reserved range: ``base`` to ``end``; the part below ``mapped`` is backed by memory."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.base, self.end = base, base + nbytes
        self.mapped = base


class _Page:
    """The physical memory behind all stand-in addresses of one device."""

    def __init__(self, driver: ModuleType, device: int) -> None:
        self._driver = driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(call(driver.cuMemGetAllocationGranularity, properties, minimum))
        self.nbytes = -(-PAGE // granularity) * granularity
        self.handle = call(driver.cuMemCreate, self.nbytes, properties, 0)
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def reserve(self, nbytes: int) -> int:
        """Start of ``nbytes`` new bytes of unmapped address space, a multiple of the page's size.

        If the driver cannot reserve them at the requested address, it chooses another one. Raises MemoryError when the
        device has no address space left.
        """
        address = self._driver.CUdeviceptr
        wanted = _FIRST + next(_numbers) * _STEP
        if wanted < _LAST:
            result = self._driver.cuMemAddressReserve(nbytes, self.nbytes, address(wanted), 0)
            if succeeded(result):
                return int(result[1])
        return int(call(self._driver.cuMemAddressReserve, nbytes, self.nbytes, address(0), 0))

    def map(self, start: int, end: int) -> None:
        """Back ``start`` to ``end``, multiples of the page's size. If it raises MemoryError, nothing is mapped."""
        address = self._driver.CUdeviceptr
        place = start
        try:
            while place < end:
                call(self._driver.cuMemMap, address(place), self.nbytes, 0, self.handle, 0)
                place += self.nbytes
            call(self._driver.cuMemSetAccess, address(start), end - start, [self._access], 1)
        except BaseException:
            if place > start:
                self._driver.cuMemUnmap(address(start), place - start)
            raise


class Arena:
    """Addresses for one capture at a time, handed out in ascending order, and each only once before ``reset``.

    The gap between allocations (``gap`` bytes, from ``number``) differs between arenas, so that no two allocations lie
    at the same distance in two arenas: the distance that an address moved identifies its allocation.
    """

    def __init__(self, page: _Page, number: int = 0) -> None:
        self._page = page
        self.gap = GUARD + ALIGNMENT * number
        self._ranges: list[_Range] = []
        self._current = -1
        self.next = self.end = 0

    def reset(self) -> None:
        """Start again: earlier addresses may be handed out again."""
        self._current = -1
        self.next = self.end = 0

    def take(self, nbytes: int, residue: int = 0) -> int:
        """Start of ``nbytes`` new bytes, congruent to ``residue`` modulo ALIGNMENT and followed by a guard.

        Raises MemoryError when the device has no address space left.
        """
        if self.next + nbytes + ALIGNMENT + self.gap > self.end:
            self.grow(self.next, nbytes + 2 * ALIGNMENT + self.gap)
        start = self.next + (residue - self.next) % ALIGNMENT
        self.next = start + nbytes + self.gap
        return start

    def covers(self, address: int) -> bool:
        """True if ``address`` lies in this arena's address space, handed out or not."""
        return any(found.base <= address < found.end for found in self._ranges)

    def grow(self, used: int, nbytes: int) -> tuple[int, int]:
        """Make room for ``nbytes`` more contiguous bytes; addresses below ``used`` are already handed out. Returns the
        free part, as (next, end)."""
        self.next, step = used, self._page.nbytes
        while self._current < 0 or self.next + nbytes > self._ranges[self._current].end:
            if self._current + 1 == len(self._ranges):
                size = -(-max(CHUNK, nbytes + GUARD) // step) * step
                self._ranges.append(_Range(self._page.reserve(size), size))
            self._current += 1
            self.next = self.end = self._ranges[self._current].base + GUARD
        found = self._ranges[self._current]
        if self.next + nbytes > found.mapped:  # mapped pages stay mapped
            least = self.next + nbytes - found.base
            upto = min(found.end, found.base + -(-least // step) * step)
            self._page.map(found.mapped, upto)
            found.mapped = upto
        self.end = found.mapped
        return self.next, self.end


class Arenas:
    """The arenas of one device. Arenas leased at the same time are disjoint."""

    def __init__(self, driver: ModuleType, device: int) -> None:
        self._driver, self._device = driver, device
        self._page: _Page | None = None
        self._returned: deque[tuple[Arena, Callable[[], bool]]] = deque()
        self._made: list[Arena] = []
        self._scratch = 0

    def lease(self) -> Arena:
        """An arena for exclusive use until it is given back. Only the holder of the turn to capture may call this."""
        page = self._shared_page()
        for _ in range(len(self._returned)):
            arena, idle = self._returned.popleft()
            if idle():
                arena.reset()
                return arena
            self._returned.append((arena, idle))
        self._made.append(Arena(page, len(self._made) + 1))
        return self._made[-1]

    def scratch(self, stream: int) -> int:
        """An address with 128 MiB of mapped memory on either side that holds no data. Its physical page, which is also
        behind all stand-ins, is filled with 0xFF once, in the order of ``stream``: reads yield NaN or -1. Only the
        holder of the turn to capture may call this."""
        if not self._scratch:
            page = self._shared_page()
            nbytes = -(-SCRATCH // page.nbytes) * page.nbytes
            base = page.reserve(nbytes)
            page.map(base, base + nbytes)
            first, queue = self._driver.CUdeviceptr(base), self._driver.CUstream(stream)
            call(self._driver.cuMemsetD8Async, first, 0xFF, page.nbytes, queue)
            self._scratch = base + nbytes // 2
        return self._scratch

    def covers(self, address: int) -> bool:
        """True if ``address`` lies in any arena made so far, leased or not, or in scratch memory."""
        if self._scratch and abs(address - self._scratch) < SCRATCH // 2:
            return True
        return any(arena.covers(address) for arena in tuple(self._made))

    def _shared_page(self) -> _Page:
        """The physical page, made at first use."""
        if self._page is None:
            self._page = _Page(self._driver, self._device)
        return self._page

    def give_back(self, arena: Arena, idle: Callable[[], bool] = lambda: True) -> None:
        """Release ``arena`` for later captures, as soon as ``idle`` returns true: nothing lies there any more.

        Garbage collection may call this at any time, even during ``lease``.
        """
        self._returned.append((arena, idle))


# -- addresses without owner ---------------------------------------------------------------------------------------
# A replay would go on using such memory after its real owner freed it.


def with_unowned(
    driver: ModuleType,
    launches: Sequence[Launch],
    allocations: Sequence[Allocation],
    own: Callable[[int], bool],
    stand_in: Callable[[int], bool],
) -> tuple[Launch, ...]:
    """``launches``, each with its unowned words: addresses that the CUDA driver knows, but no allocation covers.

    ``own`` is true for addresses of this capture's arena: they move, and a second capture decides what they are.
    ``stand_in`` is true for stand-in addresses of any capture. Words in memory that torch holds but that is not in use
    are stale values of earlier calls, and are left out.
    """
    moving = AddressMap(allocations)
    ends = {a.address + a.nbytes for a in allocations}
    constants = [a for a in allocations if a.kind is AllocationKind.CONSTANT]
    blocks = functools.cache(_blocks)

    def ask(attribute: str, word: int) -> int | None:
        """The driver's ``attribute`` of ``word``; None if it is not an address."""
        kind = getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
        result: Any = driver.cuPointerGetAttribute(kind, word)
        return int(result[1]) if succeeded(result) else None

    @functools.cache  # the meaning of a word does not depend on its position
    def look_up(word: int) -> tuple[UnownedMemory, str] | None:
        if word in ends or moving.inside(word) is not None or own(word):
            return None
        if any(constant.covers(word) for constant in constants):
            return None
        kind = ask("MEMORY_TYPE", word)
        if kind is None:
            return None
        if stand_in(word):
            return UnownedMemory.STAND_IN, f"{word:#x}, in address space of another capture"
        place = bisect_right(blocks(), word, key=lambda block: block[0]) - 1
        start, nbytes, used = blocks()[place] if place >= 0 else (0, 0, False)
        held = word < start + nbytes
        if held and not used:
            return None
        memory = "host memory" if kind == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST) else "device memory"
        begin, size = ask("RANGE_START_ADDR", word), ask("RANGE_SIZE", word)
        piece = "" if begin is None or size is None else f" ({size} bytes from {begin:#x})"
        detail = f"{word:#x}, in {memory} of nobody's{piece}"
        if not held:
            return UnownedMemory.OTHER, f"{detail}, which torch does not hold"
        where = f"torch uses {nbytes} bytes from {start:#x} there"
        return UnownedMemory.BLOCK if word == start else UnownedMemory.WITHIN, f"{detail}: {where}"

    def looked_up(launch: Launch) -> Launch:
        likely = [(at, word) for at, word in enumerate(launch.words) if _LOWEST <= word < _HIGHEST]
        found = ((at, look_up(word)) for at, word in likely)
        unowned = tuple(UnownedAddress(at, *known) for at, known in found if known is not None)
        return replace(launch, unowned=unowned) if unowned else launch

    return tuple(map(looked_up, launches))


def _blocks() -> list[tuple[int, int, bool]]:
    """All blocks that torch's allocator holds now, by address, as (address, bytes, in use)."""
    found: list[tuple[int, int, bool]] = []
    for segment in torch.cuda.memory_snapshot():
        start = int(segment["address"])
        for block in segment["blocks"]:
            found.append((start, int(block["size"]), block["state"] != "inactive"))
            start += int(block["size"])
    return sorted(found)
