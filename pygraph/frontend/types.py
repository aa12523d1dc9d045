"""Torch's values in the IR, and back: dtypes, devices, symbolic numbers, types, arguments of operators.

A dict among arguments becomes ``(#dict, (key, value), …)``, a slice ``(#slice, start, stop, step)``; an operator, a
layout or a memory format becomes a token of its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

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
from pygraph.ir.types import as_dim

_SHORT = {"bfloat": "bf", "float": "f", "complex": "c", "int": "i", "uint": "u", "bool": "b8"}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_KNOWN = {dtype.value: dtype for dtype in DType}
_DTYPES: dict[torch.dtype, DType] = {
    dtype: _KNOWN[short]
    for dtype, name in _NAMES.items()
    if (short := re.sub("^[a-z]+", lambda kind: _SHORT.get(kind[0], kind[0]), name).replace("_", "")) in _KNOWN
}
"""Torch's dtypes by their names: ``float32`` is ``f32``, ``float8_e4m3fn`` is ``f8e4m3fn``."""
_TORCH_DTYPES = {dtype: known for known, dtype in _DTYPES.items()}


class TypeReader:
    """Reads types off traced values.

    ``hints`` are example values of the symbols met so far, by name; unbacked symbols have none.
    """

    def __init__(self) -> None:
        self.hints: dict[str, int] = {}
        self._tensors: dict[object, TensorType] = {}

    def expr(self, value: torch.SymInt | torch.SymFloat) -> sympy.Expr:
        """The expression behind a symbolic number, over the IR's symbols."""
        # SymInt.node and its expr, which includes later knowledge of the ShapeEnv, and ShapeEnv.backed_var_to_val:
        # checked on 2.11, 2.13.
        found, env = value.node.expr, value.node.shape_env
        hints: Mapping[sympy.Basic, Any] = {} if env is None else env.backed_var_to_val
        known = {str(symbol): hints.get(symbol) for symbol in found.free_symbols}
        self.hints.update({name: int(hint) for name, hint in known.items() if hint is not None and hint.is_Integer})
        return _canonical(found)

    def type_of(self, value: object) -> Type:
        """The type of a tensor, Python or symbolic number, or any other object (opaque, by its class)."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (bool, torch.SymBool)):
            return ScalarType("bool")
        if isinstance(value, (int, torch.SymInt)):
            return ScalarType("int", self._dim(value))
        if isinstance(value, (float, torch.SymFloat)):
            return ScalarType("float")
        return OpaqueType(type(value).__name__)

    def _dim(self, value: int | torch.SymInt) -> Dim:
        return int(value) if isinstance(value, int) else as_dim(self.expr(value))

    def _tensor(self, value: torch.Tensor) -> Type:
        dtype = _DTYPES.get(value.dtype)
        if dtype is None or value.layout is not torch.strided or value.is_nested:
            return OpaqueType(f"tensor.{_short(value.layout)}.{_short(value.dtype)}")
        shape = tuple(map(self._dim, value.shape))
        stride = tuple(map(self._dim, value.stride()))
        key = (dtype, shape, stride, value.device)
        found = self._tensors.get(key)
        if found is None:
            found = self._tensors[key] = TensorType(dtype, shape, _device(value.device), stride)
        return found


def _canonical(expr: sympy.Basic) -> sympy.Expr:
    """Torch's ``expr`` in the IR's own terms."""
    return sympy.sympify(canonical(expr))


def _device(device: torch.device) -> Device:
    return Device(device.type, device.index)


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


_DICT = Token("dict")
_SLICE = Token("slice")
_OPAQUE = "object."
_CALLABLE = (compat.OpOverload, compat.OpOverloadPacket, compat.HigherOrderOperator)
_ENUMERATED = (torch.layout, torch.memory_format)


def literal(arg: Any, types: TypeReader, env: Mapping[fx.Node, Any]) -> Arg:
    """``arg`` of an FX node in the IR. ``env`` maps FX nodes to a value, or a structure of values."""
    if isinstance(arg, fx.Node):
        return literal(env[arg], types, env)
    if arg is None or isinstance(arg, (bool, int, float, complex, str, Value, GraphRef)):
        return arg
    if isinstance(arg, (list, tuple)):
        return tuple([literal(item, types, env) for item in arg])
    if isinstance(arg, dict):
        return (_DICT, *((str(key), literal(item, types, env)) for key, item in arg.items()))
    if isinstance(arg, slice):
        return (_SLICE, *(literal(item, types, env) for item in (arg.start, arg.stop, arg.step)))
    if isinstance(arg, torch.dtype):
        return _DTYPES.get(arg) or Token(_short(arg))
    if isinstance(arg, torch.device):
        return _device(arg)
    if isinstance(arg, _ENUMERATED):
        return Token(_short(arg))
    if isinstance(arg, (torch.SymInt, torch.SymFloat)):
        expr = types.expr(arg)
        return expr if isinstance(expr, sympy.Expr) else Token(_OPAQUE + "SymBool")
    if isinstance(arg, sympy.Expr):
        return _canonical(arg)
    if isinstance(arg, _CALLABLE):
        return Token(op_name(arg))
    return Token(_OPAQUE + type(arg).__name__)


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's own ``dtype``."""
    return _TORCH_DTYPES[dtype]


def _without_literal(arg: sympy.Expr | GraphRef) -> Any:
    raise FrontendError(f"'{arg}' has no literal form in FX")


def to_fx_arg(arg: Arg, of_value: Callable[[Value], Any], of_other: Callable[[Any], Any] = _without_literal) -> Any:
    """An IR operand in torch's form. Tuples become lists.

    Raises FrontendError for operands that only the original FX node can hold: opaque objects and, by default, symbolic
    expressions and subgraphs.

    Args:
        arg: the operand
        of_value: returns the FX node, or the tensor, of a value
        of_other: returns the number of a symbolic expression, or a callable that runs a subgraph
    """
    if isinstance(arg, Value):
        return of_value(arg)
    if isinstance(arg, tuple):
        if arg[:1] == (_DICT,):
            return {key: to_fx_arg(item, of_value, of_other) for key, item in cast("Any", arg[1:])}
        if arg[:1] == (_SLICE,):
            return slice(*(to_fx_arg(item, of_value, of_other) for item in arg[1:]))
        return [to_fx_arg(item, of_value, of_other) for item in arg]
    if isinstance(arg, DType):
        return _TORCH_DTYPES[arg]
    if isinstance(arg, Device):
        return torch.device(str(arg))
    if isinstance(arg, Token):
        if arg.name.startswith(_OPAQUE):
            raise FrontendError(f"an object of type {arg.name.removeprefix(_OPAQUE)} has no literal form in FX")
        found = getattr(torch, arg.name, None)
        return found if isinstance(found, (*_ENUMERATED, torch.dtype)) else resolve_op(arg.name)
    return of_other(arg) if isinstance(arg, (sympy.Expr, GraphRef)) else arg
