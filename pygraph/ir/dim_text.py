"""Symbolic expressions as text. What they may contain, and how they are built, is in ``dims``.

Text that the parser would simplify into something else is written in the exact form ``Add!(…)`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import sympy
from sympy.core.function import AppliedUndef

from pygraph.ir import dims
from pygraph.ir.lexical import quote, word_text
from pygraph.ir.types import Dim, symbol

__all__ = ["dim_text"]

_ADD, _MUL, _UNARY, _POW, _ATOM = range(5)


def dim_text(value: Dim) -> str:
    """``value`` as text. Parsing it gives an equal expression whenever ``value == canonical(value)``."""
    return _expression_text(value) if isinstance(value, sympy.Basic) else repr(value)


class _Tree(NamedTuple):
    """How an expression is written. ``parts`` are operands with a sign: added or subtracted, multiplied or divided."""

    kind: str
    text: str = ""
    parts: tuple[tuple[int, _Tree], ...] = ()

    @property
    def operands(self) -> list[_Tree]:
        return [part for _, part in self.parts]


def _node(kind: str, text: str, *operands: _Tree) -> _Tree:
    return _Tree(kind, text, tuple((1, operand) for operand in operands))


@lru_cache(maxsize=16384)
def _expression_text(value: sympy.Expr) -> str:
    for exact in (False, True):
        tree = _tree(value, exact)
        if _builds(tree, value):
            return _render(tree)[0]
    return _render(_tree(value, False))[0]


def _builds(tree: _Tree, value: sympy.Expr) -> bool:
    """Whether the parser would make ``value`` of this tree. Sympy may simplify what was made without evaluation."""
    try:
        return bool(_build(tree) == value)
    except (ArithmeticError, TypeError, ValueError):
        return False


def _tree(value: sympy.Basic, exact: bool) -> _Tree:
    if isinstance(value, sympy.Symbol):
        return _Tree("symbol", value.name)
    if isinstance(value, sympy.Number) or value in (sympy.zoo, sympy.I):
        return _atom_tree(value)
    name = type(value).__name__
    known = isinstance(value, (*dims.OPERATORS.values(), *dims.FUNCTIONS.values()))
    if exact and known and not isinstance(value, AppliedUndef):
        return _node("exact", name, *(_tree(arg, exact) for arg in value.args))
    if isinstance(value, sympy.Add):
        return _add_tree(value, exact)
    if isinstance(value, sympy.Mul):
        return _mul_tree(value.args, exact)
    if isinstance(value, sympy.Pow):
        return _pow_tree(value, exact)
    return _node("plain" if known else "opaque", name, *(_tree(arg, exact) for arg in value.args))


def _atom_tree(value: sympy.Expr) -> _Tree:
    if value is sympy.I:
        return _node("pow", "", _node("neg", "", _Tree("number", "1")), _mul_tree((sympy.Rational(1, 2),), False))
    for name, constant in dims.CONSTANTS.items():
        if value is constant:
            return _Tree("constant", name)
    if value.is_Rational and value.q != 1:
        return _mul_tree((value,), False)
    if value.is_extended_negative:
        return _node("neg", "", _atom_tree(-value))
    return _Tree("number", repr(float(value)) if isinstance(value, sympy.Float) else str(value.p))


def _add_tree(value: sympy.Add, exact: bool) -> _Tree:
    terms = [_signed(arg, exact) for arg in sorted(value.args, key=lambda arg: arg.is_Number)]
    if terms[0][0] < 0:
        terms.sort(key=lambda term: -term[0])
    return _Tree("add", "", tuple(terms))


def _signed(term: sympy.Expr, exact: bool) -> tuple[int, _Tree]:
    if isinstance(term, sympy.Number) and term.is_negative:
        return (-1, _tree(-term, exact))
    if isinstance(term, sympy.Mul) and isinstance(term.args[0], sympy.Number) and term.args[0].is_negative:
        rest = term.args[1:] if term.args[0] == -1 else (-term.args[0], *term.args[1:])
        return (-1, _mul_tree(rest, exact))
    return (1, _tree(term, exact))


def _mul_tree(args: Sequence[sympy.Expr], exact: bool) -> _Tree:
    above: list[_Tree] = []
    below: list[_Tree] = []
    minus = False
    for arg in args:
        if isinstance(arg, sympy.Rational) and arg.is_finite:
            minus ^= bool(arg.is_negative)
            above += [_Tree("number", str(abs(arg.p)))] if abs(arg.p) != 1 else []
            below += [_Tree("number", str(arg.q))] if arg.q != 1 else []
        elif isinstance(arg, sympy.Pow) and _is_negative_integer(arg.exp):
            below.append(_pow_tree(sympy.Pow(arg.base, -arg.exp, evaluate=False), exact))
        else:
            above.append(_tree(arg, exact))
    above = above or [_Tree("number", "1")]
    if minus:
        above[0] = _node("neg", "", above[0])
    if len(above) == 1 and not below:
        return above[0]
    return _Tree("mul", "", (*((1, tree) for tree in above), *((-1, tree) for tree in below)))


def _pow_tree(value: sympy.Pow, exact: bool) -> _Tree:
    if value.exp == 1:
        return _tree(value.base, exact)
    if _is_negative_integer(value.exp):
        return _mul_tree((value,), exact)
    return _node("pow", "", _tree(value.base, exact), _tree(value.exp, exact))


def _is_negative_integer(value: sympy.Expr) -> bool:
    return isinstance(value, sympy.Integer) and bool(value.is_negative)


def _build(tree: _Tree) -> sympy.Expr:
    """What the parser makes of the text of ``tree``."""
    kind, text, parts = tree
    if kind == "symbol":
        return symbol(text)
    if kind == "constant":
        return dims.CONSTANTS[text]
    if kind == "number":
        return dims.number(text)
    built = [(sign, _build(part)) for sign, part in parts]
    if kind == "add":
        return dims.add(built)
    if kind == "mul":
        return dims.multiply(built)
    operands = [operand for _, operand in built]
    if kind == "neg":
        return dims.negate(*operands)
    if kind == "pow":
        return dims.power(*operands)
    return dims.apply(text, operands, exact=kind == "exact", opaque=kind == "opaque")


def _render(tree: _Tree) -> tuple[str, int]:
    """The text of ``tree`` and how tightly its outermost operator binds."""
    kind, text, parts = tree
    if kind == "symbol":
        return (quote(text) if text in dims.CONSTANTS else word_text(text), _ATOM)
    if kind in ("constant", "number"):
        return (text, _ATOM)
    if kind == "add":
        return (_joined(parts, (" + ", " - "), "-", _MUL), _ADD)
    if kind == "mul":
        return (_joined(parts, ("*", "/"), "1/", _UNARY), _MUL)
    operands = tree.operands
    if kind == "neg":
        return (f"-{_within(operands[0], _UNARY)}", _UNARY)
    if kind == "pow":
        return (f"{_within(operands[0], _ATOM)}**{_within(operands[1], _UNARY)}", _POW)
    return (f"{_function_text(text, kind)}({', '.join(_render(operand)[0] for operand in operands)})", _ATOM)


def _joined(parts: tuple[tuple[int, _Tree], ...], operators: tuple[str, str], lead: str, level: int) -> str:
    text = ""
    for sign, part in parts:
        written = _within(part, level)
        operator = operators[0] if sign > 0 else operators[1]
        text += operator + written if text else written if sign > 0 else lead + written
    return text


def _within(tree: _Tree, level: int) -> str:
    text, binds = _render(tree)
    return text if binds >= level else f"({text})"


def _function_text(name: str, kind: str) -> str:
    if kind == "exact":
        return f"{name}!"
    return quote(name) if kind == "opaque" and dims.is_reserved(name) else word_text(name)
