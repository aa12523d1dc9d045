"""Symbolic expressions: the forms of the IR, their text, and limits on texts that would be slow in sympy.

Graphs hold canonical expressions only (the verifier's rule ``expressions``), so that every graph parses back to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import sympy
from sympy.core.function import AppliedUndef
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from pygraph.ir.types import Dim, as_dim, symbol
from pygraph.text.words import quote, word_text

CONSTANTS: dict[str, sympy.Expr] = {"oo": sympy.oo, "I": sympy.I}

FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    "Abs": sympy.Abs,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
    "ceiling": sympy.ceiling,
    "floor": sympy.floor,
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "CeilToInt": sympy.ceiling,
    "CleanDiv": lambda a, b: a / b,
    "FloatPow": sympy.Pow,
    "FloatTrueDiv": lambda a, b: a / b,
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "FloorToInt": sympy.floor,
    "Identity": lambda a: a,
    "IntTrueDiv": lambda a, b: a / b,
    "ModularIndexing": lambda a, divisor, size: sympy.Mod(sympy.floor(a / divisor), size),
    "PowByNatural": sympy.Pow,
    "PythonMod": sympy.Mod,
    "ToFloat": lambda a: a,
}
"""The functions of the IR, and those of torch's symbolic shapes as exact arithmetic on numbers."""


def call(name: str, operands: Sequence[sympy.Expr], *, opaque: bool = False) -> sympy.Expr:
    """The function ``name`` of ``operands``: one of FUNCTIONS, or an opaque one.

    Raises TypeError for a wrong number of operands, ArithmeticError for a division by zero.
    """
    return _defined(sympy.Function(name)(*operands) if opaque else FUNCTIONS[name](*operands))


def _defined(value: sympy.Basic) -> sympy.Basic:
    """``value``. Raises ZeroDivisionError if sympy has divided by zero."""
    if value.has(sympy.zoo, sympy.nan):
        raise ZeroDivisionError("division by zero")
    return value


def canonical(value: object) -> Dim:
    """``value`` in the IR's own terms: its symbols, doubles, its functions; any other function becomes an opaque one.

    Raises TypeError unless ``value`` is a number or a sympy expression, ZeroDivisionError if it has no value.
    """
    if isinstance(value, float):
        return as_dim(sympy.Float(value))
    return as_dim(_canonical(value)) if isinstance(value, sympy.Basic) else as_dim(value)


@lru_cache(maxsize=16384)
def _canonical(value: sympy.Basic) -> sympy.Basic:
    for _ in range(8):  # sympy may simplify its own results further: usually two rounds
        again = _rebuilt(_defined(value))
        if again == value:
            break
        value = again
    return value


def _rebuilt(value: sympy.Basic) -> sympy.Basic:
    if isinstance(value, sympy.Symbol):
        return symbol(value.name)
    if isinstance(value, sympy.Float):
        return sympy.Float(float(value))
    if isinstance(value, sympy.Number) or value in CONSTANTS.values():
        return value
    operands = [_rebuilt(arg) for arg in value.args]
    if isinstance(value, (sympy.Add, sympy.Mul, sympy.Pow)):
        return value.func(*operands)
    name = type(value).__name__
    return call(name, operands, opaque=isinstance(value, AppliedUndef) or name not in FUNCTIONS)


# -- text --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16384)
def dim_text(value: Dim) -> str:
    """``value`` as text. If ``value`` is canonical, the text parses to an equal expression."""
    return _Writer().doprint(value) if isinstance(value, sympy.Basic) else repr(value)


class _Writer(StrPrinter):  # type: ignore[misc]  # sympy has no types
    """sympy's own text, with names quoted if they are not words or have another meaning."""

    def _print_Symbol(self, value: sympy.Symbol) -> str:
        return quote(value.name) if value.name in CONSTANTS else word_text(value.name)

    def _print_Float(self, value: sympy.Float) -> str:
        return repr(float(value))

    def _print_Mul(self, value: sympy.Mul) -> str:
        """Each divisor is written separately, ``a/b/c``: sympy would multiply a number into a sum in ``a/(b*c)``."""
        coefficient, rest = value.as_coeff_Mul()
        above, below = [], []
        for factor in (abs(coefficient), *rest.as_ordered_factors()):
            if isinstance(factor, sympy.Rational):
                above += [factor.p] if factor.p != 1 else []
                below += [factor.q] if factor.q != 1 else []
            elif isinstance(factor, sympy.Pow) and isinstance(factor.exp, sympy.Integer) and factor.exp < 0:
                below.append(1 / factor)
            else:
                above.append(factor)
        factors = [self.parenthesize(sympy.sympify(part), PRECEDENCE["Mul"]) for part in above or [1]]
        divisors = ["/" + self.parenthesize(sympy.sympify(part), PRECEDENCE["Mul"]) for part in below]
        return ("-" if coefficient < 0 else "") + "*".join(factors) + "".join(divisors)

    def _print_Pow(self, value: sympy.Pow) -> str:
        base = self.parenthesize(value.base, PRECEDENCE["Pow"])
        if value.exp == -1:
            return f"1/{base}"
        # a power of powers as a**b**c: added brackets could be nested too deep for the parser
        is_power = isinstance(value.exp, sympy.Pow) and value.exp.exp != -1
        return f"{base}**{self.parenthesize(value.exp, PRECEDENCE['Pow'], strict=is_power)}"

    def _print_Function(self, value: sympy.Expr) -> str:
        name = type(value).__name__
        return f"{quote(name) if isinstance(value, AppliedUndef) else name}({self.stringify(value.args, ', ')})"


# -- limits on texts --------------------------------------------------------------------------------------------------

_MAX_BITS = 14_000
"""Maximum number of bits of a number: Python does not print numbers of more than 4,300 digits."""
_MAX_NESTED = 25
"""Maximum number of functions within another one: building it makes sympy query each of them."""
_MAX_OPERATIONS, _MAX_TERMS, _MAX_CHOICES = 32, 16, 16
"""Limits for Mod, Max and Min: operations in an operand; its terms once sympy has multiplied it out; operands of nested
Max and Min together, which sympy compares in pairs."""


def within_limits(name: str, operands: Sequence[sympy.Expr]) -> Sequence[sympy.Expr]:
    """``operands``. Raises ValueError if sympy could take long to build the function ``name`` of them."""
    if name == "**":
        base, exponent = operands
        bits = max((_bits(number) for number in base.atoms(sympy.Number)), default=0)
        if exponent.is_number and exponent.is_finite and bits * abs(float(exponent)) > _MAX_BITS:
            raise ValueError("this power takes too many digits")
        return operands
    inner = {function for operand in operands for function in operand.atoms(sympy.Function, sympy.Max, sympy.Min)}
    if len(inner) > _MAX_NESTED:
        raise ValueError(f"there are more than {_MAX_NESTED} functions within '{name}'")
    if name not in ("Max", "Min", "Mod"):
        return operands
    if any(operand.count_ops() > _MAX_OPERATIONS or _terms(operand) > _MAX_TERMS for operand in operands):
        raise ValueError(f"an operand of '{name}' is too long")
    if len(operands) + sum(len(f.args) for f in inner if isinstance(f, (sympy.Max, sympy.Min))) > _MAX_CHOICES:
        raise ValueError(f"there are more than {_MAX_CHOICES} operands of Max and Min")
    return operands


def read(value: sympy.Expr) -> Dim:
    """The expression of a text, in canonical form. Raises ValueError for a number that is too long to print."""
    if any(_bits(number) > _MAX_BITS for number in value.atoms(sympy.Number)):
        raise ValueError("a number takes too many digits")
    return canonical(value)


def _bits(number: sympy.Number) -> float:
    if isinstance(number, sympy.Rational) and number.is_finite:
        return max(int(number.p).bit_length(), int(number.q).bit_length()) if abs(number) != 1 else 0
    return abs(math.log2(abs(float(number)))) if number.is_finite and number else 0


def _terms(value: sympy.Expr) -> int:
    """Approximate number of terms of ``value`` once it is multiplied out."""
    if isinstance(value, sympy.Add):
        return sum(map(_terms, value.args))
    if isinstance(value, sympy.Mul):
        return math.prod(map(_terms, value.args))
    if isinstance(value, sympy.Pow) and isinstance(value.exp, sympy.Integer) and value.exp > 0:
        return int(_terms(value.base) ** min(value.exp, _MAX_TERMS))
    return 1
