"""Tensors that take the place of a region's arguments while it is captured: their layout, over an arena's addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.compat import storage_from_address
from pygraph.errors import CaptureError
from pygraph.runtime.cuda.addresses import ALIGNMENT, Arena
from pygraph.runtime.recording import Allocation, AllocationKind
from pygraph.runtime.tensors import extent

__all__ = ["StandIns", "check_arguments"]

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


class StandIns:
    """Makes stand-ins in ``arena``; ``allocations`` and ``arguments`` are by position of the argument."""

    def __init__(self, arena: Arena, device: int, args: Sequence[Any]) -> None:
        self._arena, self._device = arena, torch.device("cuda", device)
        self.allocations: list[Allocation] = []
        self.arguments = tuple(self._make(i, v) if isinstance(v, torch.Tensor) else v for i, v in enumerate(args))

    def _make(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """A tensor like ``value``, at an address that is congruent to its own modulo ALIGNMENT."""
        nbytes, front = extent(value), int(value.storage_offset()) * value.element_size()
        start = value.untyped_storage().data_ptr() + front if nbytes else 0
        base = self._arena.take(front + nbytes, (start - front) % ALIGNMENT)
        self.allocations.append(Allocation(AllocationKind.INPUT, index, base + front, nbytes))
        storage = storage_from_address(base, self._device, front + nbytes)
        tensor = torch.empty(0, dtype=value.dtype, device=self._device)
        return tensor.set_(storage, value.storage_offset(), value.size(), value.stride())
