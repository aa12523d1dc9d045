"""Symbolic expressions: canonical forms and their text. Torch's own functions: ``tests/frontend/test_types.py``."""

from __future__ import annotations

import pytest
import sympy

from pygraph.ir import parse_graph
from pygraph.ir.dims import canonical, dim_text
from pygraph.ir.types import symbol

A, B = symbol("s0"), symbol("u1")
F = sympy.Function


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (A + 1, "s0 + 1"),
        (1 - A, "1 - s0"),
        (-A, "-s0"),
        (3 * A / (4 * B**2), "3*s0/4/u1**2"),
        (sympy.Rational(-1, 3), "-1/3"),
        (sympy.Rational(1, 3) * (A + B), "s0/3 + u1/3"),
        (2**A, "2**s0"),
        ((-A) ** B, "(-s0)**u1"),
        (A ** (B + 1), "s0**(u1 + 1)"),
        (sympy.sqrt(A), "s0**(1/2)"),
        (sympy.floor(A / 2) + sympy.Max(1, A), "floor(s0/2) + Max(1, s0)"),
        (sympy.Float(1.5) * A, "1.5*s0"),
        (sympy.oo, "oo"),
        (symbol("oo"), '"oo"'),
        (symbol("a b") * 2, '2*"a b"'),
        (F("Max")(A), '"Max"(s0)'),
        (F("my op")(A, B), '"my op"(s0, u1)'),
    ],
)
def test_text(value: sympy.Expr, text: str) -> None:
    assert dim_text(value) == text


def test_canonical_translates_symbols_and_numbers() -> None:
    foreign = sympy.Symbol("s0", positive=True)
    assert canonical(foreign * 2) == 2 * A
    assert canonical(sympy.pi * foreign) == F("Pi")() * A
    assert canonical(sympy.Piecewise((foreign, foreign > 1), (0, True))).free_symbols == {A}
    assert canonical(sympy.Integer(3)) == 3
    assert type(canonical(sympy.Integer(3))) is int
    assert canonical(sympy.Float(0.1, 40)) == sympy.Float(0.1)
    assert canonical(0.5) == sympy.Float(0.5)
    with pytest.raises(TypeError):
        canonical("s0")


@pytest.mark.parametrize(
    "value",
    [
        sympy.Add(A, 2, 3, evaluate=False),
        sympy.Mul(2, A + B, evaluate=False),
        sympy.Mul(2, sympy.Mul(A, sympy.Add(A, A, evaluate=False), evaluate=False), evaluate=False),
        sympy.Max(1, 2, evaluate=False),
        sympy.floor(sympy.Integer(7) / 2 + A, evaluate=False),
        sympy.Pow(A, 1, evaluate=False),
        -sympy.oo,
        sympy.I * A,
    ],
)
def test_canonical_expressions_are_simplified_once_and_for_all(value: sympy.Expr) -> None:
    found = canonical(value)
    assert found == canonical(value.doit())
    assert canonical(found) == found
    assert parse_graph(f"graph @g () {{ ^a = f($({dim_text(found)})) return () }}").nodes[0].args == (found,)
