"""The memory of a region while it is captured: stand-ins for its arguments, and what it allocates.

All of it lies in one arena, every allocation at an address of its own: nothing is reused, and nothing takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.compat import storage_from_address
from pygraph.errors import CaptureError
from pygraph.runtime.cuda.addresses import ALIGNMENT, Arena
from pygraph.runtime.recording import Allocation, AllocationKind
from pygraph.runtime.tensors import extent

__all__ = ["SessionMemory", "check_arguments", "stand_ins"]

_SCALARS = (bool, int, float)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def check_arguments(args: Sequence[Any]) -> int:
    """The index of the one device that all tensors among ``args`` are on, the current one where there is none.

    Raises CaptureError: ``host-memory`` for a tensor on the CPU, ``several-devices``, ``unsupported-argument`` for
    anything but tensors, Python numbers and None.
    """
    devices: set[int] = set()
    for position, value in enumerate(args):
        if type(value) in _TENSORS:
            devices.add(_device(position, value))
        elif not (value is None or type(value) in _SCALARS):
            raise CaptureError("unsupported-argument", f"argument {position} is {type(value).__name__}")
    if len(devices) > 1:
        raise CaptureError("several-devices", f"arguments are on devices {sorted(devices)}")
    return devices.pop() if devices else torch.cuda.current_device()


def _device(position: int, value: torch.Tensor) -> int:
    if value.device.type == "cpu":
        raise CaptureError("host-memory", f"argument {position} is on the CPU")
    if value.device.type != "cuda" or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise CaptureError("unsupported-tensor", f"argument {position}: {value.layout} on {value.device}")
    end = value.storage_offset() * value.element_size() + extent(value)
    if end > value.untyped_storage().nbytes():
        raise CaptureError("unsupported-tensor", f"argument {position} has no memory for its elements")
    return int(value.device.index)


def stand_ins(arena: Arena, device: int, args: Sequence[Any]) -> tuple[tuple[Any, ...], list[Allocation]]:
    """``args`` with a tensor in the place of each tensor, and where these lie in ``arena``."""
    made, allocations = list(args), list[Allocation]()
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            made[index], allocation = _stand_in(arena, torch.device("cuda", device), index, value)
            allocations.append(allocation)
    return tuple(made), allocations


def _stand_in(arena: Arena, device: torch.device, index: int, value: torch.Tensor) -> tuple[torch.Tensor, Allocation]:
    """A tensor like argument ``index``, at an address that is congruent to its own modulo ALIGNMENT."""
    nbytes, front = extent(value), int(value.storage_offset()) * value.element_size()
    start = value.untyped_storage().data_ptr() + front if nbytes else 0
    base = arena.take(front + nbytes, (start - front) % ALIGNMENT)
    storage = storage_from_address(base, device, front + nbytes)
    tensor = torch.empty(0, dtype=value.dtype, device=device)
    tensor.set_(storage, value.storage_offset(), value.size(), value.stride())
    return tensor, Allocation(AllocationKind.INPUT, index, base + front, nbytes)


class SessionMemory:
    """Every allocation at an address of its own, with the number of nodes that the graph had before it."""

    def __init__(self, native: ModuleType, arena: Arena, device: int, stream: int) -> None:
        self._native, self._arena = native, arena
        self._session: Any = native.Session(device, stream, arena.next, arena.end, arena.gap, self._grow)
        self.nodes: Callable[[], int] = self._session.nodes
        """The number of nodes captured so far."""

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

    def allocations(self) -> list[Allocation]:
        """In the order of allocation."""
        pieces = enumerate(self._session.pieces())
        return [Allocation(AllocationKind.POOL, i, address, nbytes, born) for i, (address, nbytes, born, _) in pieces]

    def survivors(self) -> list[tuple[int, int]]:
        """The size and birth of each allocation that somebody still holds."""
        return [(nbytes, born) for _, nbytes, born, alive in self._session.pieces() if alive]

    def idle(self) -> bool:
        """Whether there is none."""
        return not self._session.alive()
