"""What a captured region returned, as data: arguments, views of them, memory of the region, constants and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.recording import Allocation, AllocationKind, Output, OutputKind
from pygraph.runtime.tensors import extent

__all__ = ["Described", "describe_outputs"]

_SCALARS = (bool, int, float)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Described:
    """``outputs`` in order; ``empty`` are allocations made up for outputs without memory; ``sensitive`` are arguments
    of which a view is returned that depends on their storage offset."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.empty: list[Allocation] = []
        self.sensitive: set[int] = set()


def describe_outputs(
    returned: Sequence[Any],
    arguments: Sequence[Any],
    constants: Mapping[str, torch.Tensor],
    allocations: Sequence[Allocation],
) -> Described:
    """Describe what a region returned for its stand-in ``arguments``. Raises CaptureError (``unsupported-output``)."""
    result = Described()
    addresses = AddressMap(allocations)
    pool = sum(a.kind is AllocationKind.POOL for a in allocations)
    for value in returned:
        output = _plain(value, arguments, constants)
        if output is None:
            output = _memory(result, value, arguments, addresses, pool)
        result.outputs.append(output)
    return result


def _plain(value: Any, arguments: Sequence[Any], constants: Mapping[str, torch.Tensor]) -> Output | None:
    """An output that is not made anew; None for a tensor that is."""
    if value is None or type(value) in _SCALARS:
        return Output(OutputKind.SCALAR, value=value)
    if type(value) not in _TENSORS or value.device.type != "cuda" or value.layout is not torch.strided:
        raise CaptureError("unsupported-output", f"the region returned {type(value).__name__}")
    if value.is_conj() or value.is_neg():
        raise CaptureError("unsupported-output", "a lazily conjugated or negated tensor")
    for index, argument in enumerate(arguments):
        if value is argument:
            return Output(OutputKind.ARGUMENT, argument=index)
    if any(value is constant for constant in constants.values()):
        return Output(OutputKind.CONSTANT_TENSOR, value=value)
    return None


def _memory(
    result: Described, value: torch.Tensor, arguments: Sequence[Any], addresses: AddressMap, pool: int
) -> Output:
    """An output that shows memory: of the region, or of an argument."""
    place: dict[str, Any] = {"size": tuple(value.size()), "stride": tuple(value.stride()), "dtype": value.dtype}
    base = value.untyped_storage().data_ptr()
    if not base:
        made = Allocation(AllocationKind.POOL, pool + len(result.empty), 0, 0)
        result.empty.append(made)
        return Output(OutputKind.FRESH, allocation=made.index, offset=int(value.storage_offset()), **place)
    address = base + int(value.storage_offset()) * value.element_size()
    owner = addresses.inside(address) or addresses.inside(base) or _empty_argument(base, arguments, addresses)
    if owner is None:
        raise CaptureError("unsupported-output", "a view of a constant, or memory of nobody's")
    distance = address - owner.address
    inside = distance >= 0 and distance + extent(value) <= owner.nbytes
    if distance % value.element_size() or (value.numel() and not inside):
        raise CaptureError("unsupported-output", "a tensor that reaches beyond its allocation")
    offset = distance // value.element_size()
    if owner.kind is AllocationKind.POOL:
        return Output(OutputKind.FRESH, allocation=owner.index, offset=offset, **place)
    if arguments[owner.index].element_size() != value.element_size():
        result.sensitive.add(owner.index)
    return Output(OutputKind.VIEW, argument=owner.index, offset=offset, **place)


def _empty_argument(base: int, arguments: Sequence[Any], addresses: AddressMap) -> Allocation | None:
    """The argument without elements whose storage begins at ``base``."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.untyped_storage().data_ptr() == base:
            start = base + int(argument.storage_offset()) * argument.element_size()
            return addresses.empty(start) or addresses.inside(start)
    return None
