"""Addresses in a capture that are nobody's: memory that neither the region, nor its module, nor its arguments own.

A replay would go on using such memory after its owner gave it up. What follows from that is decided in ``slots``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.cuda.bindings import succeeded
from pygraph.runtime.recording import Allocation, AllocationKind, Foreign, ForeignMemory, Launch

__all__ = ["with_foreign"]

_LOWEST, _HIGHEST = 1 << 32, 1 << 57
"""Where addresses can lie; other words are numbers for sure."""


def with_foreign(
    driver: ModuleType,
    launches: Sequence[Launch],
    allocations: Sequence[Allocation],
    own: Callable[[int], bool],
    stand_in: Callable[[int], bool],
) -> tuple[Launch, ...]:
    """``launches``, each with its words that are addresses which the CUDA driver knows and none of ``allocations``
    covers.

    ``own`` tells the addresses that lie between those: they move, so that a second capture explains them or does not.
    ``stand_in`` tells those of any capture. What lies in memory that torch holds and nobody uses was left behind by
    earlier calls, and is no address of anything.
    """
    search = _Search(driver, AddressMap(allocations), allocations, own, stand_in)
    return tuple(replace(launch, foreign=tuple(search.words(launch))) for launch in launches)


class _Search:
    """Looks words up; what a word is, is the same wherever it stands."""

    def __init__(
        self,
        driver: ModuleType,
        moving: AddressMap,
        allocations: Sequence[Allocation],
        own: Callable[[int], bool],
        stand_in: Callable[[int], bool],
    ) -> None:
        self._driver, self._moving, self._own, self._stand_in = driver, moving, own, stand_in
        self._ends = {a.address + a.nbytes for a in allocations}
        self._constants = [a for a in allocations if a.kind is AllocationKind.CONSTANT]
        self._known: dict[int, tuple[ForeignMemory, str] | None] = {}

    def words(self, launch: Launch) -> Iterator[Foreign]:
        for position, word in enumerate(launch.words):
            if not _LOWEST <= word < _HIGHEST:
                continue
            if word not in self._known:
                self._known[word] = self._look_up(word)
            found = self._known[word]
            if found is not None:
                yield Foreign(position, *found)

    def _look_up(self, word: int) -> tuple[ForeignMemory, str] | None:
        if word in self._ends or self._moving.inside(word) is not None or self._own(word):
            return None
        if any(constant.covers(word) for constant in self._constants):
            return None
        kind = self._memory_kind(word)
        if kind is None:
            return None
        if self._stand_in(word):
            return ForeignMemory.STAND_IN, f"{word:#x}, in address space of another capture"
        block = self._blocks.at(word)
        if block is not None and not block.used:
            return None
        detail = f"{word:#x}, in {kind} of nobody's{self._range(word)}"
        if block is None:
            return ForeignMemory.OTHER, f"{detail}, which torch does not hold"
        where = f"torch uses {block.nbytes} bytes from {block.start:#x} there"
        return ForeignMemory.BLOCK if word == block.start else ForeignMemory.WITHIN, f"{detail}: {where}"

    @cached_property
    def _blocks(self) -> _Blocks:
        return _Blocks()

    def _memory_kind(self, word: int) -> str | None:
        """What memory an address lies in, None when it is no address."""
        found = self._ask("MEMORY_TYPE", word)
        if found is None:
            return None
        return "host memory" if found == int(self._driver.CUmemorytype.CU_MEMORYTYPE_HOST) else "device memory"

    def _range(self, word: int) -> str:
        """The piece of memory that an address lies in, as far as the CUDA driver tells it."""
        start, nbytes = self._ask("RANGE_START_ADDR", word), self._ask("RANGE_SIZE", word)
        return "" if start is None or nbytes is None else f" ({nbytes} bytes from {start:#x})"

    def _ask(self, attribute: str, word: int) -> int | None:
        kind = getattr(self._driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
        result: Any = self._driver.cuPointerGetAttribute(kind, word)
        return int(result[1]) if succeeded(result) else None


@dataclass(frozen=True)
class _Block:
    start: int
    nbytes: int
    used: bool


class _Blocks:
    """The pieces of all memory that torch holds, as it is now."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        for segment in torch.cuda.memory_snapshot():
            start = int(segment["address"])
            for block in segment["blocks"]:
                self._blocks.append(_Block(start, int(block["size"]), block["state"] != "inactive"))
                start += int(block["size"])
        self._blocks.sort(key=lambda block: block.start)
        self._starts = [block.start for block in self._blocks]

    def at(self, word: int) -> _Block | None:
        """The piece that an address lies in."""
        position = bisect_right(self._starts, word) - 1
        if position < 0:
            return None
        found = self._blocks[position]
        return found if word < found.start + found.nbytes else None
