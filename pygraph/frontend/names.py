"""Names of operators: call targets of FX as text, and from text back to the callable and its signature.

``aten.add.Tensor`` and the like are torch's own; ``sym.`` computes on sizes, ``hop.`` is a higher-order operator. Once
this is imported, the verifier knows the operators of this process, also custom ones whose library is imported.
"""

from __future__ import annotations

import math
import operator
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from pygraph import compat
from pygraph.errors import PygraphError
from pygraph.ir.operators import ANY, Signature, register_lookup

HOP = "hop."
SYM = "sym."
PYTHON = "py."
_SIZES = ("aten.sym_numel.", "aten.sym_size.", "aten.sym_storage_offset.", "aten.sym_stride.")


class FrontendError(PygraphError):
    """An FX graph that is not in AOTAutograd's form, or an IR name without a counterpart in torch."""


def words(text: str) -> frozenset[str]:
    """The words of ``text``: a table of operators."""
    return frozenset(text.split())


@cache
def _sym_by_name() -> dict[str, Callable[..., Any]]:
    """Functions by short name; of equal names, the last wins: builtins, math, torch.sym_*, operators."""
    of_math = vars(math)
    of_torch = ((name, vars(torch)[name]) for name in sorted(vars(torch), reverse=True))
    named = {
        "round": round,
        "max_of": max,
        "min_of": min,
        "int_of": int,
        "float_of": float,
        **{f"math_{name}": function for name, function in of_math.items()},
        **of_math,
        **{name.removeprefix("_")[4:]: function for name, function in of_torch if name.startswith(("sym_", "_sym_"))},
        **{name: getattr(operator, name) for name in operator.__all__},
    }
    return {name: function for name, function in named.items() if callable(function) and name[:2] != "__"}


@cache
def _sym_names() -> dict[Callable[..., Any], str]:
    return {function: name for name, function in _sym_by_name().items()}


def is_symbolic(op: str) -> bool:
    """True if ``op`` computes only on sizes and never uses a device."""
    return op.startswith((SYM, *_SIZES))


def overload_of(target: Any) -> Any:
    """The default overload of an operator called without an overload, as some of Inductor's passes do; any other target
    itself."""
    return getattr(target, "default", target) if isinstance(target, compat.OpOverloadPacket) else target


def op_name(target: Any) -> str:
    """The IR's name of a call target. A Python function is named by its module; it may not resolve (a lambda)."""
    if isinstance(target, compat.HigherOrderOperator):
        return HOP + str(target.__name__)
    if isinstance(target, (compat.OpOverload, compat.OpOverloadPacket)):
        return str(target)
    short = _sym_names().get(target)
    if short is not None:
        return SYM + short
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"{PYTHON}{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"


@cache
def resolve_op(name: str) -> Any:
    """The call target of FX for ``name``. Raises FrontendError if this torch has no such operator."""
    found = None
    try:
        if name.startswith(HOP):
            inner = name.removeprefix(HOP)
            # Some register when their module is first imported, which torch.ops.higher_order does.
            found = compat.higher_order_operators.get(inner) or getattr(torch.ops.higher_order, inner)
        elif name.startswith(SYM):
            found = _sym_by_name().get(name.removeprefix(SYM))
        elif name.startswith(PYTHON):
            found = pkgutil.resolve_name(name.removeprefix(PYTHON))
        elif name.count(".") in (1, 2):
            found = operator.attrgetter(name)(torch.ops)
    except (AttributeError, ImportError, ValueError):
        pass
    if found is None:
        raise FrontendError(f"this torch has no operator '{name}'")
    return found


def signature_in_torch(op: str) -> Signature | None:
    """The signature of ``op``, or None if this torch has no such operator."""
    try:
        target = resolve_op(op)
    except FrontendError:
        return None
    return signature(target._schema) if isinstance(target, compat.OpOverload) else ANY


def signature(schema: Any) -> Signature:
    """A torch schema as a signature of the IR."""
    positional = tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)
    keywords = tuple(argument.name for argument in schema.arguments if argument.kwarg_only)
    optional = frozenset(argument.name for argument in schema.arguments if argument.has_default_value())
    returned = [each.type for each in schema.returns]
    counted = all(type(each) is not torch.ListType for each in returned)
    fewer = len(returned) > 1 and any("mask" in argument.name for argument in schema.arguments)
    return Signature(positional, keywords, optional, len(returned) if counted else None, fewer)


register_lookup(signature_in_torch)
