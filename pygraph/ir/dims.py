"""Symbolic expressions: which ones the IR knows, how they are written, and how one is built from what is written.

    sympy ── write ──► Written ── render ──► text ── the parser ──► Written ── build ──► sympy

An expression is canonical when writing and building it again gives an equal one. Graphs hold canonical expressions only
(the verifier's rule ``expressions``), so that every graph parses back to itself. What a text asks for is measured
before sympy sees it, since a short text can ask for a computation that never ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import sympy
from sympy.core.function import AppliedUndef

from pygraph.ir.text.words import quote, word_text
from pygraph.ir.types import Dim, as_dim, symbol

__all__ = ["CONSTANTS", "FUNCTIONS", "TRANSLATED", "Written", "build", "call", "canonical", "dim_text", "read"]

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


class Written(NamedTuple):
    """An expression as it is written.

    ``kind`` is symbol, number, constant, add, mul, neg, pow, call (of a function of the IR) or opaque (of any
    other). ``text`` is the name or number; ``parts`` are operands with a sign: added or subtracted, multiplied
    or divided.
    """

    kind: str
    text: str = ""
    parts: tuple[tuple[int, Written], ...] = ()

    @staticmethod
    def of(kind: str, text: str, operands: Sequence[Written]) -> Written:
        """An expression of operands without signs."""
        return Written(kind, text, tuple((1, operand) for operand in operands))

    @property
    def operands(self) -> list[Written]:
        """The parts without their signs."""
        return [part for _, part in self.parts]


def _quotient(a: Written, b: Written) -> Written:
    return Written("mul", "", ((1, a), (-1, b)))


def _floor(a: Written) -> Written:
    return Written.of("call", "floor", [a])


def _ceiling(a: Written) -> Written:
    return Written.of("call", "ceiling", [a])


def _power(a: Written, b: Written) -> Written:
    return Written.of("pow", "", [a, b])


def _mod(a: Written, b: Written) -> Written:
    return Written.of("call", "Mod", [a, b])


TRANSLATED: dict[str, Callable[..., Written]] = {
    "CeilDiv": lambda a, b: _ceiling(_quotient(a, b)),
    "CeilToInt": _ceiling,
    "CleanDiv": _quotient,
    "FloatPow": _power,
    "FloatTrueDiv": _quotient,
    "FloorDiv": lambda a, b: _floor(_quotient(a, b)),
    "FloorToInt": _floor,
    "Identity": lambda a: a,
    "IntTrueDiv": _quotient,
    "ModularIndexing": lambda a, divisor, size: _mod(_floor(_quotient(a, divisor)), size),
    "PowByNatural": _power,
    "PythonMod": _mod,
    "ToFloat": lambda a: a,
}
"""Functions of torch's symbolic shapes that the IR expresses by the ones above, as exact arithmetic on numbers."""


def call(name: str, operands: Sequence[Written], *, opaque: bool = False) -> Written:
    """The function ``name`` of ``operands``: one of the IR's, one of torch's in the IR's terms, or an opaque one.

    Raises TypeError for the wrong number of operands of torch's.
    """
    if name in TRANSLATED and not opaque:
        return TRANSLATED[name](*operands)
    return Written.of("call" if name in FUNCTIONS and not opaque else "opaque", name, operands)


def canonical(value: object) -> Dim:
    """``value`` in the IR's own terms: its symbols, doubles, its functions; any other function becomes an opaque one.

    Raises TypeError for what is no number and no sympy expression.
    """
    if isinstance(value, float):
        return as_dim(sympy.Float(value))
    return as_dim(_canonical(value)) if isinstance(value, sympy.Basic) else as_dim(value)


@lru_cache(maxsize=16384)
def _canonical(value: sympy.Basic) -> sympy.Basic:
    for _ in range(8):  # sympy simplifies what it simplified before: two rounds are the rule
        again = build(write(value))
        if again == value:
            break
        value = again
    return value


@lru_cache(maxsize=16384)
def dim_text(value: Dim) -> str:
    """``value`` as text. Parsing it gives an equal expression when ``value`` is canonical."""
    return _render(write(value))[0] if isinstance(value, sympy.Basic) else repr(value)


# -- from sympy to what is written, and back --------------------------------------------------------------------------


def write(value: sympy.Basic) -> Written:
    """How ``value`` is written."""
    if isinstance(value, sympy.Symbol):
        return Written("symbol", value.name)
    if isinstance(value, sympy.Number) or value in (sympy.zoo, sympy.I):
        return _write_number(value)
    if isinstance(value, sympy.Add):
        terms = [_signed(arg) for arg in sorted(value.args, key=lambda arg: bool(arg.is_Number))]
        return Written("add", "", tuple(terms if terms[0][0] > 0 else sorted(terms, key=lambda term: -term[0])))
    if isinstance(value, sympy.Mul):
        return _write_product(value.args)
    if isinstance(value, sympy.Pow):
        if _is_negative_integer(value.exp):
            return _write_product((value,))
        return Written.of("pow", "", [write(value.base), write(value.exp)])
    name = type(value).__name__
    return call(name, [write(arg) for arg in value.args], opaque=isinstance(value, AppliedUndef))


def _write_number(value: sympy.Expr) -> Written:
    if value is sympy.I:
        return Written.of("pow", "", [Written.of("neg", "", [Written("number", "1")]), write(sympy.Rational(1, 2))])
    for name, constant in CONSTANTS.items():
        if value is constant:
            return Written("constant", name)
    if value.is_Rational and value.q != 1:
        return _write_product((value,))
    if value.is_extended_negative:
        return Written.of("neg", "", [_write_number(-value)])
    return Written("number", repr(float(value)) if isinstance(value, sympy.Float) else str(value.p))


def _signed(term: sympy.Expr) -> tuple[int, Written]:
    if isinstance(term, sympy.Number) and term.is_negative:
        return (-1, write(-term))
    if isinstance(term, sympy.Mul) and isinstance(term.args[0], sympy.Number) and term.args[0].is_negative:
        rest = term.args[1:] if term.args[0] == -1 else (-term.args[0], *term.args[1:])
        return (-1, _write_product(rest))
    return (1, write(term))


def _write_product(args: Sequence[sympy.Expr]) -> Written:
    above: list[Written] = []
    below: list[Written] = []
    minus = False
    for arg in args:
        if isinstance(arg, sympy.Rational) and arg.is_finite:
            minus ^= bool(arg.is_negative)
            above += [Written("number", str(abs(arg.p)))] if abs(arg.p) != 1 else []
            below += [Written("number", str(arg.q))] if arg.q != 1 else []
        elif isinstance(arg, sympy.Pow) and _is_negative_integer(arg.exp):
            exponent = -arg.exp
            base = write(arg.base)
            below.append(base if exponent == 1 else Written.of("pow", "", [base, write(exponent)]))
        else:
            above.append(write(arg))
    above = above or [Written("number", "1")]
    if minus:
        above[0] = Written.of("neg", "", [above[0]])
    if len(above) == 1 and not below:
        return above[0]
    return Written("mul", "", (*((1, part) for part in above), *((-1, part) for part in below)))


def _is_negative_integer(value: sympy.Expr) -> bool:
    return isinstance(value, sympy.Integer) and bool(value.is_negative)


def build(written: Written) -> sympy.Expr:
    """The expression that is written, as sympy simplifies it. Raises what sympy raises on senseless arguments."""
    kind, text, parts = written
    if kind == "symbol":
        return symbol(text)
    if kind == "constant":
        return CONSTANTS[text]
    if kind == "number":
        return sympy.Integer(int(text)) if text.isdigit() else sympy.Float(float(text))
    operands = [build(part) for _, part in parts]
    if kind == "add":
        signs = (sign for sign, _ in parts)
        return sympy.Add(*(o if sign > 0 else sympy.Mul(-1, o) for sign, o in zip(signs, operands, strict=True)))
    if kind == "mul":
        signs = (sign for sign, _ in parts)
        return sympy.Mul(*(o if sign > 0 else sympy.Pow(o, -1) for sign, o in zip(signs, operands, strict=True)))
    if kind == "neg":
        return sympy.Mul(-1, *operands)
    if kind == "pow":
        return sympy.Pow(*operands)
    if kind == "opaque":
        return sympy.Function(text)(*operands)
    return FUNCTIONS[text](*operands)


# -- text --------------------------------------------------------------------------------------------------------------

_ADD, _MUL, _UNARY, _POW, _ATOM = range(5)


def _render(written: Written) -> tuple[str, int]:
    """The text, and how tightly its outermost operator binds."""
    kind, text, parts = written
    if kind == "symbol":
        return (quote(text) if text in CONSTANTS else word_text(text), _ATOM)
    if kind in ("constant", "number"):
        return (text, _ATOM)
    if kind == "add":
        return (_joined(parts, (" + ", " - "), "-", _MUL), _ADD)
    if kind == "mul":
        return (_joined(parts, ("*", "/"), "1/", _UNARY), _MUL)
    operands = written.operands
    if kind == "neg":
        return (f"-{_within(operands[0], _UNARY)}", _UNARY)
    if kind == "pow":
        return (f"{_within(operands[0], _ATOM)}**{_within(operands[1], _UNARY)}", _POW)
    hidden = kind == "opaque" and (text in FUNCTIONS or text in TRANSLATED)
    name = quote(text) if hidden else word_text(text)
    return (f"{name}({', '.join(_render(operand)[0] for operand in operands)})", _ATOM)


def _joined(parts: Sequence[tuple[int, Written]], operators: tuple[str, str], lead: str, level: int) -> str:
    text = ""
    for sign, part in parts:
        written = _within(part, level)
        operator = operators[0] if sign > 0 else operators[1]
        text += operator + written if text else written if sign > 0 else lead + written
    return text


def _within(written: Written, level: int) -> str:
    text, binds = _render(written)
    return text if binds >= level else f"({text})"


# -- what a text may ask for ------------------------------------------------------------------------------------------

_MAX_DIGITS = 4300
_MAX_BITS = 14_000
"""Numbers that take more bits are refused: Python writes none of more than 4,300 digits."""
_MAX_OPERANDS = 4096
"""Terms of a sum, factors of a product, arguments of a function."""
_MAX_FUNCTIONS, _MAX_NESTED = 128, 25
"""Functions within an expression; functions within another one, which asks sympy about each."""
_MAX_PARTS = 1024
"""Symbols, numbers and functions in one argument of a function."""
_MAX_FACTORS, _MAX_TERMS, _MAX_CHOICES = 32, 16, 16
"""Of Mod, Max and Min: such parts; terms once an argument is multiplied out, as sympy does; arguments of the Max and
Min within one another, which sympy compares in pairs."""
_COMPARING = ("Max", "Min", "Mod")


@lru_cache(maxsize=16384)
def read(written: Written) -> Dim:
    """The canonical expression that is written. Raises ValueError when building it could take sympy long, and what
    sympy raises on senseless arguments."""
    if _size(written).functions > _MAX_FUNCTIONS:
        raise ValueError(f"there are more than {_MAX_FUNCTIONS} functions within one expression")
    return canonical(build(written))


class _Size(NamedTuple):
    """What sympy's work on an expression depends on; ``bits`` bounds the numbers in it."""

    parts: int = 1
    functions: int = 0
    terms: float = 1
    choices: int = 0
    bits: float = 0


def _size(written: Written) -> _Size:
    kind, text, parts = written
    if len(parts) > _MAX_OPERANDS:
        raise ValueError(f"there are more than {_MAX_OPERANDS} operands")
    if kind == "number":
        return _Size(bits=_bits(text))
    if not parts and kind != "call":
        return _Size()
    sizes = [_size(part) for _, part in parts]
    if kind == "call":
        return _size_of_call(text, sizes)
    add = math.prod if kind == "mul" else sum
    terms, bits = add(size.terms for size in sizes), (sum if kind == "mul" else max)(size.bits for size in sizes)
    if kind == "pow":
        terms, bits = _size_of_power(sizes[0], build(written.operands[1]))
    if bits > _MAX_BITS:
        raise ValueError(f"{'this power' if kind == 'pow' else 'a number'} takes too many digits")
    is_leaf = kind == "opaque"
    columns = (sum(column) for column in list(zip(*sizes, strict=True))[:4])
    count, functions, _, choices = columns
    return _Size(1 if is_leaf else int(count), int(functions), 1 if is_leaf else terms, int(choices), bits)


def _bits(number: str) -> float:
    if len(number) > _MAX_DIGITS:
        raise ValueError("a number takes too many digits")
    if number.isdigit():
        return int(number).bit_length() if number not in ("0", "1") else 0
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number} exceeds the range of a double")
    return abs(math.log2(value)) if value else 0


def _size_of_power(base: _Size, exponent: sympy.Expr) -> tuple[float, float]:
    """The terms and the bits of a power, whose exponent is small enough to be built."""
    if not exponent.is_number or not exponent.is_finite:
        return 1, base.bits
    bits = base.bits * abs(float(exponent)) if base.bits else 0
    if not isinstance(exponent, sympy.Integer) or exponent < 0 or base.terms <= 1:
        return 1, bits
    if base.terms > _MAX_TERMS or exponent > _MAX_TERMS:
        return math.inf, bits
    return math.comb(int(base.terms) + int(exponent) - 1, int(exponent)), bits


def _size_of_call(name: str, sizes: Sequence[_Size]) -> _Size:
    functions = sum(size.functions for size in sizes)
    choices = sum(size.choices for size in sizes) + (len(sizes) if name in ("Max", "Min") else 0)
    limit = _MAX_FACTORS if name in _COMPARING else _MAX_PARTS
    if functions > _MAX_NESTED:
        raise ValueError(f"there are more than {_MAX_NESTED} functions within '{name}'")
    if any(size.parts > limit for size in sizes):
        raise ValueError(f"an operand of '{name}' has more than {limit} parts")
    if name in _COMPARING and any(size.terms > _MAX_TERMS for size in sizes):
        raise ValueError(f"an operand of '{name}' has more than {_MAX_TERMS} terms when multiplied out")
    if choices > _MAX_CHOICES:
        raise ValueError(f"there are more than {_MAX_CHOICES} operands of Max and Min")
    return _Size(1, functions + 1, 1, choices, 2 * max((size.bits for size in sizes), default=0))
