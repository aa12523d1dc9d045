"""Torch's values as the IR has them, and back: dtypes, devices, symbolic numbers, types, arguments of operators.

A dict among arguments becomes ``(#dict, (key, value), …)``, a slice ``(#slice, start, stop, step)``; an operator, a
layout or a memory format becomes a token of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from pygraph import compat
from pygraph.frontend.names import FrontendError, op_name, resolve_op
from pygraph.ir import (
    Arg,
    Device,
    Dim,
    DType,
    GraphRef,
    OpaqueType,
    ScalarType,
    TensorType,
    Token,
    Type,
    Value,
    canonical,
)
from pygraph.ir.types import as_dim, contiguous_stride

__all__ = ["DICT", "SymbolReader", "TypeReader", "literal", "to_fx_arg"]

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


# -- symbolic numbers ------------------------------------------------------------------------------------------------


class SymbolReader:
    """Translates symbolic numbers and collects the example values of every symbol that it met."""

    def __init__(self) -> None:
        self._known: dict[sympy.Basic, sympy.Expr] = {}
        self._hints: dict[str, int] = {}
        self._used: dict[str, None] = {}

    @property
    def hints(self) -> dict[str, int]:
        """Example values of the symbols met so far, in order of their names. Unbacked symbols have none."""
        return {name: self._hints[name] for name in sorted(self._used) if name in self._hints}

    def dim(self, value: int | torch.SymInt) -> Dim:
        """``value`` as a size of the IR."""
        return value if type(value) is int else self._dim(value)

    def _dim(self, value: int | torch.SymInt) -> Dim:
        return int(value) if isinstance(value, int) else as_dim(self.expr(value))

    def expr(self, value: torch.SymInt | torch.SymFloat) -> sympy.Expr:
        """The expression behind a symbolic number, over the IR's symbols."""
        # SymInt.node and its expr, with what the ShapeEnv learnt since put in: checked on 2.11, 2.13.
        found = value.node.expr
        known = self._known.get(found)
        if known is None:
            self._note(found, value.node.shape_env)
            known = self._known[found] = self.translate(found)
        return known

    def translate(self, expr: sympy.Basic) -> sympy.Expr:
        """``expr`` of torch in the IR's own terms."""
        self._used.update((str(found), None) for found in expr.free_symbols)
        return sympy.sympify(canonical(expr))

    def _note(self, expr: sympy.Basic, shape_env: Any) -> None:
        # ShapeEnv.backed_var_to_val: checked on 2.11, 2.13.
        hints: Mapping[sympy.Basic, Any] = {} if shape_env is None else shape_env.backed_var_to_val
        for found in expr.free_symbols:
            hint = hints.get(found)
            if hint is not None and hint.is_Integer:
                self._hints[str(found)] = int(hint)


# -- types -----------------------------------------------------------------------------------------------------------


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


# -- arguments -------------------------------------------------------------------------------------------------------

DICT = Token("dict")
_SLICE = Token("slice")
_OPAQUE = "object."
_CALLABLE = (compat.OpOverload, compat.OpOverloadPacket, compat.HigherOrderOperator)
_ENUMERATED = (torch.layout, torch.memory_format)


def literal(arg: Any, types: TypeReader, of_node: Callable[[fx.Node], Arg]) -> Arg:
    """``arg`` of an FX node in the IR; ``of_node`` says what a node inside it stands for."""
    if isinstance(arg, fx.Node):
        return of_node(arg)
    if arg is None or isinstance(arg, (bool, int, float, complex, str)):
        return arg
    if isinstance(arg, (list, tuple)):
        return tuple([literal(item, types, of_node) for item in arg])
    if isinstance(arg, dict):
        return (DICT, *((str(key), literal(item, types, of_node)) for key, item in arg.items()))
    if isinstance(arg, slice):
        return (_SLICE, *(literal(item, types, of_node) for item in (arg.start, arg.stop, arg.step)))
    return _constant(arg, types)


def _constant(arg: Any, types: TypeReader) -> Arg:
    if isinstance(arg, torch.dtype):
        return to_dtype(arg) or Token(str(arg).removeprefix("torch."))
    if isinstance(arg, torch.device):
        return types.device(arg)
    if isinstance(arg, _ENUMERATED):
        return Token(str(arg).removeprefix("torch."))
    if isinstance(arg, (torch.SymInt, torch.SymFloat)):
        expr = types.symbols.expr(arg)
        return expr if isinstance(expr, sympy.Expr) else Token(_OPAQUE + "SymBool")
    if isinstance(arg, sympy.Expr):
        return types.symbols.translate(arg)
    if isinstance(arg, _CALLABLE):
        return Token(op_name(arg))
    return Token(_OPAQUE + type(arg).__name__)


def to_fx_arg(arg: Arg, of_value: Callable[[Value], Any]) -> Any:
    """An IR operand as FX takes it; ``of_value`` gives the FX node of a value. Tuples come back as lists.

    Raises FrontendError for what only the original FX node can hold: symbolic expressions, subgraphs, opaque objects.
    """
    if isinstance(arg, Value):
        return of_value(arg)
    if isinstance(arg, tuple):
        return _container(arg, of_value)
    if isinstance(arg, DType):
        return to_torch_dtype(arg)
    if isinstance(arg, Device):
        return to_torch_device(arg)
    if isinstance(arg, Token):
        return _named(arg)
    if isinstance(arg, (sympy.Expr, GraphRef)):
        raise FrontendError(f"'{arg}' has no literal form in FX")
    return arg


def _container(arg: tuple[Arg, ...], of_value: Callable[[Value], Any]) -> Any:
    if arg[:1] == (DICT,):
        pairs = [pair for pair in arg[1:] if isinstance(pair, tuple)]
        return {key: to_fx_arg(item, of_value) for key, item in pairs}
    if arg[:1] == (_SLICE,):
        return slice(*(to_fx_arg(item, of_value) for item in arg[1:]))
    return [to_fx_arg(item, of_value) for item in arg]


def _named(token: Token) -> Any:
    if token.name.startswith(_OPAQUE):
        raise FrontendError(f"an object of type {token.name.removeprefix(_OPAQUE)} has no literal form in FX")
    found = getattr(torch, token.name, None) if "." not in token.name else None
    if isinstance(found, (*_ENUMERATED, torch.dtype)):
        return found
    return resolve_op(token.name)
