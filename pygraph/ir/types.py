"""Types of IR values: tensors, host scalars and opaque objects; dtypes, devices and symbolic sizes.

Nothing here depends on torch; the frontend translates. Known sizes are ints, others are sympy expressions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TypeAlias

import sympy

__all__ = [
    "DType",
    "Device",
    "Dim",
    "OpaqueType",
    "ScalarType",
    "TensorType",
    "Type",
    "as_dim",
    "contiguous_stride",
    "symbol",
]

Dim: TypeAlias = int | sympy.Expr
"""A size, stride or count: an int if it is known, else a sympy expression over integer symbols."""


@cache
def symbol(name: str) -> sympy.Symbol:
    """The integer symbol ``name``. All symbols of the IR are made here, so that equal names are equal symbols."""
    return sympy.Symbol(name, integer=True)


def as_dim(value: object) -> Dim:
    """``value`` as a dimension: sympy integers become ints. Raises TypeError unless it is an int or an expression."""
    if isinstance(value, bool):
        raise TypeError(f"a dimension cannot be the bool {value}")
    if isinstance(value, int):
        return value
    if isinstance(value, sympy.Integer):
        return int(value)
    if isinstance(value, sympy.Expr):
        return value
    raise TypeError(f"a dimension must be an int or a sympy expression, not {type(value).__name__}")


class DType(Enum):
    """Element types. The value is the name in ``.pgir`` text."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3FN = "f8e4m3fn"
    F8E5M2 = "f8e5m2"
    F8E4M3FNUZ = "f8e4m3fnuz"
    F8E5M2FNUZ = "f8e5m2fnuz"
    F8E8M0FNU = "f8e8m0fnu"
    C32 = "c32"
    C64 = "c64"
    C128 = "c128"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    B8 = "b8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        digits = "".join(c for c in self.value.split("e")[0].split("m")[0] if c.isdigit())
        return max(1, int(digits) // 8)

    @property
    def is_floating(self) -> bool:
        """True if elements are real floating-point numbers."""
        return self.value[0] == "f" or self is DType.BF16


@dataclass(frozen=True, slots=True)
class Device:
    """Device of a value: ``cpu``, ``cuda:0``, … An index of None means the current device of that kind."""

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"

    @staticmethod
    def parse(text: str) -> Device:
        """The device written ``text``. Raises ValueError for a malformed index."""
        kind, _, index = text.partition(":")
        return Device(kind, int(index) if index else None)

    @property
    def is_host(self) -> bool:
        """True if the CPU reads values on it without a copy."""
        return self.kind == "cpu"


def contiguous_stride(shape: Iterable[Dim]) -> tuple[Dim, ...]:
    """Row-major strides, in elements, of a tensor of that ``shape``."""
    strides: list[Dim] = []
    step: Dim = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step = as_dim(step * (size if isinstance(size, sympy.Expr) else max(size, 1)))
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class TensorType:
    """A strided tensor. ``stride`` (elements) is None for row-major strides, also if these were given explicitly."""

    dtype: DType
    shape: tuple[Dim, ...]
    device: Device
    stride: tuple[Dim, ...] | None = None

    def __post_init__(self) -> None:
        if self.stride is not None and self.stride == contiguous_stride(self.shape):
            object.__setattr__(self, "stride", None)

    @property
    def numel(self) -> Dim:
        """Number of elements."""
        return as_dim(math.prod(self.shape))

    @property
    def nbytes(self) -> Dim:
        """Bytes of the elements themselves (gaps between strides not counted)."""
        return as_dim(self.numel * self.dtype.itemsize)

    @property
    def strides(self) -> tuple[Dim, ...]:
        """Strides in elements, never None."""
        return contiguous_stride(self.shape) if self.stride is None else self.stride


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A Python number on the host: ``kind`` is int, float or bool; ``expr`` its symbolic value, if it has one."""

    kind: str
    expr: Dim | None = None


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """A value without further structure in the IR: a generator, a script object, a token. ``name`` states the kind."""

    name: str


Type: TypeAlias = TensorType | ScalarType | OpaqueType
