"""Operator arguments as plain data: what of them, besides addresses, decides what an operator does."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from pygraph.errors import CaptureError

if TYPE_CHECKING:
    from pygraph.runtime.host.recorder import Recorder

__all__ = ["describe", "leaves"]

_PLAIN = (str, torch.dtype, torch.layout, torch.memory_format, torch.device)


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested lists and tuples that is not None, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif value is not None:
        yield value


def describe(recorder: Recorder, value: Any, seen: dict[int, int] | None = None) -> Hashable:
    """A hashable that is equal for arguments that make an operator do the same, wherever their memory lies.

    ``seen`` numbers the tensors and storages met so far: what shares them is part of what an operator sees. Raises
    CaptureError (``unsupported-argument``) for an object that cannot be compared.
    """
    numbers = {} if seen is None else seen
    if isinstance(value, (list, tuple)):
        return tuple(describe(recorder, item, numbers) for item in value)
    if isinstance(value, torch.Tensor):
        return _describe_tensor(recorder, value, numbers)
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, complex):
        return ("complex", struct.pack("<dd", value.real, value.imag))
    if value is None or type(value) in (bool, int) or isinstance(value, _PLAIN):
        return (type(value).__name__, str(value))
    raise CaptureError("unsupported-argument", f"an operator is given {type(value).__name__}")


def _describe_tensor(recorder: Recorder, tensor: torch.Tensor, seen: dict[int, int]) -> Hashable:
    name = recorder.opaque_name(tensor)
    if name is not None:
        return ("opaque", name)
    same_tensor = seen.setdefault(id(tensor), len(seen))
    same_storage = seen.setdefault(-recorder.native.storage_base(tensor), len(seen))
    return ("tensor", tuple(tensor.size()), tuple(tensor.stride()), str(tensor.dtype), same_tensor, same_storage)
