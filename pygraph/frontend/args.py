"""Arguments of operators: FX's literals to those of the IR and back.

A dict becomes ``(#dict, (key, value), …)``, a slice ``(#slice, start, stop, step)``; an operator, layout or memory
format becomes a token of its name. Values are translated by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from pygraph import compat
from pygraph.frontend.names import FrontendError, op_name, resolve_op
from pygraph.frontend.types import TypeReader, to_dtype, to_torch_device, to_torch_dtype
from pygraph.ir import Arg, Device, DType, GraphRef, Token, Value

__all__ = ["DICT", "literal", "to_fx_arg"]

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
