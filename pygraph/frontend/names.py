"""Names of operators: a call target of FX as text, and the text back to what can be called.

``aten.add.Tensor`` and the like are torch's own; ``sym.`` computes on sizes, ``hop.`` is a higher-order operator.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from pygraph import compat
from pygraph.errors import PygraphError

__all__ = ["FrontendError", "is_symbolic", "op_name", "resolve_op"]

HOP = "hop."
SYM = "sym."
PYTHON = "py."
_SIZES = ("aten.sym_numel.", "aten.sym_size.", "aten.sym_storage_offset.", "aten.sym_stride.")


class FrontendError(PygraphError):
    """An FX graph that is not in the form that AOTAutograd leaves, or an IR name that torch has nothing for."""


def _functions_on_sizes() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Short names, the first of which wins: operators, then torch.sym_*, then math, then builtins."""
    for name in operator.__all__:
        yield name, getattr(operator, name)
    for name in sorted(vars(torch)):
        if name.startswith("sym_"):
            yield name.removeprefix("sym_"), getattr(torch, name)
        elif name.startswith("_sym_"):
            yield name.removeprefix("_sym_"), getattr(torch, name)
    for name in sorted(vars(math)):
        yield name, getattr(math, name)
        yield f"math_{name}", getattr(math, name)
    yield from (("round", round), ("max_of", max), ("min_of", min), ("int_of", int), ("float_of", float))


@cache
def _sym_by_name() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name, function in _functions_on_sizes():
        if callable(function) and not name.startswith("__"):
            found.setdefault(name, function)
    return found


@cache
def _sym_names() -> dict[Callable[..., Any], str]:
    found: dict[Callable[..., Any], str] = {}
    for name, function in _sym_by_name().items():
        found.setdefault(function, name)
    return found


def is_symbolic(op: str) -> bool:
    """Whether ``op`` computes on sizes alone and never touches a device."""
    return op.startswith((SYM, *_SIZES))


def op_name(target: Any) -> str:
    """The IR's name of a call target. A Python function is named by its module; it may not resolve (a lambda)."""
    if isinstance(target, (compat.OpOverload, compat.OpOverloadPacket, compat.HigherOrderOperator)):
        return _registered_name(target)
    short = _sym_names().get(target)
    if short is not None:
        return SYM + short
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"{PYTHON}{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"


@cache
def _registered_name(target: Any) -> str:
    return HOP + str(target.__name__) if isinstance(target, compat.HigherOrderOperator) else str(target)


@cache
def resolve_op(name: str) -> Any:
    """What FX calls for ``name``. Raises FrontendError when this torch has no such operator."""
    if name.startswith(HOP):
        found = _higher_order(name.removeprefix(HOP))
    elif name.startswith(SYM):
        found = _sym_by_name().get(name.removeprefix(SYM))
    elif name.startswith(PYTHON):
        found = _importable(name.removeprefix(PYTHON))
    else:
        found = _overload(name)
    if found is None:
        raise FrontendError(f"this torch has no operator '{name}'")
    return found


def _higher_order(name: str) -> Any:
    if name not in compat.higher_order_operators:
        # Some register when their module is first imported, which torch.ops.higher_order does.
        return getattr(torch.ops.higher_order, name, None)
    return compat.higher_order_operators[name]


def _overload(name: str) -> Any:
    found: Any = torch.ops
    parts = name.split(".")
    if len(parts) not in (2, 3):
        return None
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def _importable(path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found
    return None
