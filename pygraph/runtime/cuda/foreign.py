"""Addresses in a capture that are nobody's: memory that neither the region, nor its module, nor its arguments own.

A replay would go on using such memory after its owner gave it up, so that the region is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.cuda.bindings import succeeded
from pygraph.runtime.recording import Allocation, AllocationKind, Launch

__all__ = ["refuse_foreign"]

_LOWEST, _HIGHEST = 1 << 32, 1 << 57
"""Where addresses can lie; other words are numbers for sure."""


def refuse_foreign(
    driver: ModuleType, launches: Sequence[Launch], allocations: Sequence[Allocation], own: Callable[[int], bool]
) -> None:
    """Raise CaptureError (``foreign-address``) if a word is an address that the CUDA driver knows and none of
    ``allocations`` covers. ``own`` tells the addresses that lie between those: they move, so that a second capture
    explains them or does not."""
    moving = AddressMap(allocations)
    ends = {a.address + a.nbytes for a in allocations}
    constants = [a for a in allocations if a.kind is AllocationKind.CONSTANT]
    numbers: set[int] = set()
    for launch in launches:
        for position, word in enumerate(launch.words):
            if not _LOWEST <= word < _HIGHEST or word in numbers or word in ends or moving.inside(word) is not None:
                continue
            if own(word) or any(constant.covers(word) for constant in constants):
                continue
            kind = _memory_kind(driver, word)
            if kind is not None and not _is_free(word):
                raise CaptureError("foreign-address", f"{launch.name}: word {position} points into {kind} of nobody's")
            numbers.add(word)


def _is_free(word: int) -> bool:
    """Whether an address lies in memory that torch holds and nobody uses: what points there was left behind."""
    for segment in torch.cuda.memory_snapshot():
        address = int(segment["address"])
        if not address <= word < address + int(segment["total_size"]):
            continue
        for block in segment["blocks"]:
            if word < address + int(block["size"]):
                return bool(block["state"] == "inactive")
            address += int(block["size"])
    return False


def _memory_kind(driver: ModuleType, word: int) -> str | None:
    """What memory an address lies in, None when it is no address."""
    result: Any = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, word)
    if not succeeded(result):
        return None
    on_host = int(result[1]) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
    return "host memory" if on_host else "device memory"
