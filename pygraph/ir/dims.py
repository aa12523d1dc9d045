"""Symbolic expressions: which ones the IR knows, how each is written, and how one is built from its parts.

The parser builds through the functions of this file, and ``dim_text`` checks its text against them. Nothing is ever
evaluated as Python. Texts are made in ``dim_text``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy
from sympy.core.function import AppliedUndef

from pygraph.ir.types import Dim, as_dim, symbol

__all__ = [
    "CONSTANTS",
    "FUNCTIONS",
    "OPERATORS",
    "add",
    "apply",
    "canonical",
    "is_reserved",
    "multiply",
    "negate",
    "number",
    "power",
]

CONSTANTS: dict[str, sympy.Expr] = {"oo": sympy.oo, "zoo": sympy.zoo, "nan": sympy.nan}

FUNCTIONS: dict[str, type[sympy.Expr]] = {
    "Abs": sympy.Abs,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
    "ceiling": sympy.ceiling,
    "floor": sympy.floor,
}
"""Functions that the IR keeps as they are."""

OPERATORS: dict[str, type[sympy.Expr]] = {"Add": sympy.Add, "Mul": sympy.Mul, "Pow": sympy.Pow}
"""Written infix; as a function only in the exact form ``Add!(…)``."""

TRANSLATED: dict[str, Callable[..., sympy.Expr]] = {
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "CeilToInt": lambda a: sympy.ceiling(a),
    "CleanDiv": lambda a, b: a / b,
    "FloatPow": lambda a, b: power(a, b),
    "FloatTrueDiv": lambda a, b: a / b,
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "FloorToInt": lambda a: sympy.floor(a),
    "Identity": lambda a: a,
    "IntTrueDiv": lambda a, b: a / b,
    "ModularIndexing": lambda a, divisor, size: sympy.Mod(sympy.floor(a / divisor), size),
    "PowByNatural": lambda a, b: power(a, b),
    "PythonMod": lambda a, b: sympy.Mod(a, b),
    "ToFloat": lambda a: a,
}
"""Functions of torch's symbolic shapes that the IR expresses by the ones above, as exact arithmetic on numbers."""

_MAX_BITS = 65536
"""Numbers that take more bits are refused, so that a short text cannot ask for a long computation."""


def canonical(value: object) -> Dim:
    """``value`` in the IR's own terms: its symbols, doubles, its functions; any other function becomes an opaque one.

    Raises TypeError for what is no number and no sympy expression.
    """
    if isinstance(value, float):
        return sympy.Float(value)
    return as_dim(_canonical(value)) if isinstance(value, sympy.Basic) else as_dim(value)


def number(text: str) -> sympy.Expr:
    """The number written ``text``. Raises ValueError when it is too large."""
    if text.isdigit():
        return sympy.Integer(int(text))
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} exceeds the range of a double")
    return sympy.Float(value)


def add(terms: Sequence[tuple[int, sympy.Expr]]) -> sympy.Expr:
    """The sum of ``(sign, term)`` pairs."""
    return sympy.Add(*(term if sign > 0 else negate(term) for sign, term in terms))


def negate(operand: sympy.Expr) -> sympy.Expr:
    """The operand times -1."""
    return sympy.Mul(-1, operand)


def multiply(factors: Sequence[tuple[int, sympy.Expr]]) -> sympy.Expr:
    """The product of factors with sign 1, divided by those with sign -1."""
    return sympy.Mul(*(factor if sign > 0 else sympy.Pow(factor, -1) for sign, factor in factors))


def power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """``base ** exponent``. Raises ValueError when numbers in it would grow beyond 65536 bits."""
    _check_power(base, exponent)
    return sympy.Pow(base, exponent)


def apply(name: str, args: Sequence[sympy.Expr], *, exact: bool = False, opaque: bool = False) -> sympy.Expr:
    """The function ``name`` of ``args``: one of the IR's, one of torch's, or an opaque one.

    ``exact`` keeps the arguments as they are, where sympy would simplify. Raises TypeError for a wrong count.
    """
    if exact and (name in OPERATORS or name in FUNCTIONS):
        if name == "Pow" and len(args) == 2:
            _check_power(*args)
        return (OPERATORS.get(name) or FUNCTIONS[name])(*args, evaluate=False)
    if exact:
        raise ValueError(f"'{name}' has no exact form")
    if opaque or not is_reserved(name):
        return sympy.Function(name)(*args)
    function = FUNCTIONS.get(name) or TRANSLATED.get(name)
    if function is None:
        raise ValueError(f"'{name}' is written infix")
    return function(*args)


def is_reserved(name: str) -> bool:
    """Whether ``name`` of arguments means more than an opaque function."""
    return name in FUNCTIONS or name in TRANSLATED or name in OPERATORS


def _canonical(value: sympy.Basic) -> sympy.Expr:
    if isinstance(value, sympy.Symbol):
        return symbol(value.name)
    if isinstance(value, sympy.Float):
        return sympy.Float(float(value))
    if isinstance(value, sympy.Number) or value is sympy.zoo or value is sympy.I:
        return value
    args = [_canonical(arg) for arg in value.args]
    name = type(value).__name__
    if isinstance(value, AppliedUndef):
        return sympy.Function(name)(*args)
    known = {**OPERATORS, **FUNCTIONS}.get(name)
    if known is not None and isinstance(value, known):
        return value if tuple(args) == value.args else known(*args)
    translated = TRANSLATED.get(name)
    return translated(*args) if translated is not None else sympy.Function(name)(*args)


def _check_power(base: sympy.Expr, exponent: sympy.Expr) -> None:
    numbers = base.atoms(sympy.Number)
    if not numbers or not exponent.is_number or exponent.is_infinite:
        return
    try:
        times = abs(float(exponent))
    except (OverflowError, TypeError):
        times = math.inf
    bits = max(_bits(value) for value in numbers)
    if bits and times * bits > _MAX_BITS:
        raise ValueError("this power takes too many digits")


def _bits(value: sympy.Number) -> int:
    if isinstance(value, sympy.Float):
        _, mantissa, exponent, width = value._mpf_
        return abs(exponent + width) if mantissa else 0
    if not isinstance(value, sympy.Rational) or not value.is_finite:
        return 0
    return max(abs(int(value.p)), int(value.q)).bit_length() - 1 or int(value.p not in (0, 1, -1))
