"""Stand-ins for the arguments of a region while it is captured, in the arena that its allocations come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.compat import storage_from_address
from pygraph.errors import CaptureError
from pygraph.runtime.cuda.addresses import ALIGNMENT, Arena
from pygraph.runtime.recording import Allocation, AllocationKind
from pygraph.runtime.tensors import extent

__all__ = ["SCALARS", "TENSORS", "check_arguments", "stand_ins"]

SCALARS = (bool, int, float)
TENSORS = (torch.Tensor, torch.nn.Parameter)


def check_arguments(args: Sequence[Any]) -> int:
    """The index of the one device that all tensors among ``args`` are on, the current one where there is none.

    Raises CaptureError: ``host-memory`` for a tensor on the CPU, ``several-devices``, ``unsupported-argument`` for
    anything but tensors, Python numbers and None.
    """
    devices: set[int] = set()
    for position, value in enumerate(args):
        if type(value) in TENSORS:
            devices.add(_device(position, value))
        elif not (value is None or type(value) in SCALARS):
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
    """``args`` with a tensor in the place of each tensor, and where these lie in ``arena``: at addresses that are
    congruent to the arguments' own modulo ALIGNMENT."""
    made, allocations, place = list(args), list[Allocation](), torch.device("cuda", device)
    for index, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            continue
        nbytes, front = extent(value), int(value.storage_offset()) * value.element_size()
        start = value.untyped_storage().data_ptr() + front if nbytes else 0
        base = arena.take(front + nbytes, (start - front) % ALIGNMENT)
        storage = storage_from_address(base, place, front + nbytes)
        made[index] = torch.empty(0, dtype=value.dtype, device=place)
        made[index].set_(storage, value.storage_offset(), value.size(), value.stride())
        allocations.append(Allocation(AllocationKind.INPUT, index, base + front, nbytes))
    return tuple(made), allocations
