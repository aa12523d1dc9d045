"""Torch's types to those of the IR and back: dtypes, devices, layouts, and the type of any traced value.

Symbolic sizes live in ``symbols``; arguments of operators in ``args``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pygraph.frontend.symbols import SymbolReader
from pygraph.ir import Device, Dim, DType, OpaqueType, ScalarType, TensorType, Type
from pygraph.ir.types import contiguous_stride

__all__ = ["TypeReader", "to_dtype", "to_torch_device", "to_torch_dtype"]

_DTYPES: dict[torch.dtype, DType] = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float8_e4m3fn: DType.F8E4M3FN,
    torch.float8_e5m2: DType.F8E5M2,
    torch.float8_e4m3fnuz: DType.F8E4M3FNUZ,
    torch.float8_e5m2fnuz: DType.F8E5M2FNUZ,
    torch.float8_e8m0fnu: DType.F8E8M0FNU,
    torch.complex32: DType.C32,
    torch.complex64: DType.C64,
    torch.complex128: DType.C128,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint64: DType.U64,
    torch.uint32: DType.U32,
    torch.uint16: DType.U16,
    torch.uint8: DType.U8,
    torch.bool: DType.B8,
}
_TORCH_DTYPES = {dtype: known for known, dtype in _DTYPES.items()}


def to_dtype(dtype: torch.dtype) -> DType | None:
    """The IR's element type for ``dtype``, or None for one that it does not have (quantized, sub-byte)."""
    return _DTYPES.get(dtype)


def to_torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's dtype for an element type."""
    return _TORCH_DTYPES[dtype]


def to_torch_device(device: Device) -> torch.device:
    """Torch's device for a device of the IR."""
    return torch.device(str(device))


class TypeReader:
    """Reads types off traced values. ``devices`` renames devices, by full name (``meta``, ``cuda:1``)."""

    def __init__(self, symbols: SymbolReader, devices: Mapping[str, str] | None = None) -> None:
        self.symbols = symbols
        self._renamed = {old: Device.parse(new) for old, new in (devices or {}).items()}
        self._devices: dict[torch.device, Device] = {}
        self._tensors: dict[object, TensorType] = {}

    def device(self, device: torch.device) -> Device:
        """The IR's device for ``device``, renamed when asked to."""
        found = self._devices.get(device)
        if found is None:
            found = self._renamed.get(str(device)) or Device(device.type, device.index)
            self._devices[device] = found
        return found

    def type_of(self, value: object) -> Type:
        """The type of a tensor, Python or symbolic number, or any other object (opaque, by its class)."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (bool, torch.SymBool)):
            return ScalarType("bool")
        if isinstance(value, (int, torch.SymInt)):
            return ScalarType("int", self.symbols.dim(value))
        if isinstance(value, (float, torch.SymFloat)):
            return ScalarType("float")
        return OpaqueType(type(value).__name__)

    def _tensor(self, value: torch.Tensor) -> Type:
        dtype = to_dtype(value.dtype)
        if dtype is None or value.layout is not torch.strided or value.is_nested:
            return OpaqueType(f"tensor.{_short(value.layout)}.{_short(value.dtype)}")
        shape = tuple(self.symbols.dim(size) for size in value.shape)
        stride = tuple(self.symbols.dim(step) for step in value.stride())
        key = (dtype, shape, stride, value.device)
        found = self._tensors.get(key)
        if found is None:
            found = TensorType(dtype, shape, self.device(value.device), _unless_contiguous(shape, stride))
            self._tensors[key] = found
        return found


def _unless_contiguous(shape: tuple[Dim, ...], stride: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    return None if stride == contiguous_stride(shape) else stride


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")
