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

_MAX_DIGITS = 4300
_MAX_BITS = 14_000
"""Numbers that take more bits are refused: Python writes none of more than 4,300 digits."""

_MAX_OPERANDS = 4096
"""Terms of a sum, or factors of a product."""

_MAX_LEAVES = 1024
"""Symbols, numbers and functions in the operands of a function."""

_MAX_FUNCTIONS = 128
"""Functions of the IR within a sum or product; a fifth of that within another function, which asks sympy about each."""

_MAX_CHOICES = 16
"""Operands of the Max and Min in one expression: sympy compares each with every other one, at each of them again."""

_MAX_TERMS, _MAX_FACTORS = 16, 32
"""Terms of an operand of Mod, Max or Min once it is multiplied out, as sympy does; symbols and numbers in it."""


def canonical(value: object) -> Dim:
    """``value`` in the IR's own terms: its symbols, doubles, its functions; any other function becomes an opaque one.

    Raises TypeError for what is no number and no sympy expression.
    """
    if isinstance(value, float):
        return sympy.Float(value)
    return as_dim(_canonical(value)) if isinstance(value, sympy.Basic) else as_dim(value)


def number(text: str) -> sympy.Expr:
    """The number written ``text``. Raises ValueError when it is too large."""
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number takes too many digits")
    if text.isdigit():
        return _checked(sympy.Integer(int(text)))
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} exceeds the range of a double")
    return sympy.Float(value)


def add(terms: Sequence[tuple[int, sympy.Expr]]) -> sympy.Expr:
    """The sum of ``(sign, term)`` pairs. Raises ValueError for too many, and as ``power`` does."""
    _check_operands([term for _, term in terms])
    return _checked(sympy.Add(*(term if sign > 0 else negate(term) for sign, term in terms)))


def negate(operand: sympy.Expr) -> sympy.Expr:
    """The operand times -1."""
    return sympy.Mul(-1, operand)


def multiply(factors: Sequence[tuple[int, sympy.Expr]]) -> sympy.Expr:
    """The product of factors with sign 1, divided by those with sign -1. Raises ValueError as ``add`` does."""
    _check_operands([factor for _, factor in factors])
    return _checked(sympy.Mul(*(factor if sign > 0 else sympy.Pow(factor, -1) for sign, factor in factors)))


def power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """``base ** exponent``. Raises ValueError when numbers in it would grow beyond 14,000 bits."""
    _check_power(base, exponent)
    return sympy.Pow(base, exponent)


def apply(name: str, args: Sequence[sympy.Expr], *, exact: bool = False, opaque: bool = False) -> sympy.Expr:
    """The function ``name`` of ``args``: one of the IR's, one of torch's, or an opaque one.

    ``exact`` keeps the arguments as they are, where sympy would simplify. Raises TypeError for a wrong count, and
    ValueError for what would take sympy too long.
    """
    _check_operands(args)
    if is_reserved(name) and name not in OPERATORS:
        _check_function(name, args)
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


def _check_operands(args: Sequence[sympy.Expr]) -> None:
    if len(args) > _MAX_OPERANDS:
        raise ValueError(f"there are more than {_MAX_OPERANDS} operands")
    _check_functions(args, _MAX_FUNCTIONS)


def _check_functions(args: Sequence[sympy.Expr], limit: int) -> None:
    known = tuple(FUNCTIONS.values())
    if sum(isinstance(part, known) for arg in args for part in sympy.preorder_traversal(arg)) > limit:
        raise ValueError(f"there are more than {limit} functions within one expression")


def _check_function(name: str, args: Sequence[sympy.Expr]) -> None:
    """Refuse what sympy would work on for long: it looks for common factors and compares operands with each other."""
    _check_functions(args, _MAX_FUNCTIONS // 5)
    multiplied = name in ("Max", "Min", "Mod", "PythonMod", "ModularIndexing")
    limit = _MAX_FACTORS if multiplied else _MAX_LEAVES
    if max(map(_leaves, args), default=0) > limit:
        raise ValueError(f"an operand of '{name}' has more than {limit} parts")
    if multiplied and max(map(_terms, args), default=0) > _MAX_TERMS:
        raise ValueError(f"an operand of '{name}' has more than {_MAX_TERMS} terms when multiplied out")
    if name in ("Max", "Min"):
        within = {choice for arg in args for choice in arg.atoms(sympy.Max, sympy.Min)}
        if len(args) + sum(len(choice.args) for choice in within) > _MAX_CHOICES:
            raise ValueError(f"there are more than {_MAX_CHOICES} operands of Max and Min")


def _leaves(value: sympy.Expr) -> int:
    """The symbols, numbers and functions that ``value`` consists of."""
    if isinstance(value, (sympy.Add, sympy.Mul, sympy.Pow)):
        return sum(map(_leaves, value.args))
    return 1


def _terms(value: sympy.Expr) -> float:
    """The number of terms, at most, that ``value`` has when it is multiplied out."""
    if isinstance(value, sympy.Add):
        return sum(map(_terms, value.args))
    if isinstance(value, sympy.Mul):
        return math.prod(map(_terms, value.args))
    if isinstance(value, sympy.Pow) and isinstance(value.exp, sympy.Integer) and value.exp > 0:
        terms = _terms(value.base)
        few = terms <= _MAX_TERMS and value.exp <= _MAX_TERMS
        return math.comb(int(terms) + int(value.exp) - 1, int(value.exp)) if few else terms if terms <= 1 else math.inf
    return 1


def _checked(value: sympy.Expr) -> sympy.Expr:
    """``value``, unless a number in it is too large. Raises ValueError."""
    if any(_bits(each) > _MAX_BITS for each in value.atoms(sympy.Rational)):
        raise ValueError("a number takes too many digits")
    return value


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
