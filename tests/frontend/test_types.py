"""Names and literals: from torch to the IR and back."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch.utils._sympy import functions as t

from pygraph.frontend.names import FrontendError, op_name, resolve_op
from pygraph.frontend.types import TypeReader, literal, to_fx_arg
from pygraph.ir import Device, DType, GraphRef, Token, Value, symbol

TARGETS = {
    "aten.add.Tensor": torch.ops.aten.add.Tensor,
    "aten.mm": torch.ops.aten.mm,
    "prims.iota.default": torch.ops.prims.iota.default,
    "_c10d_functional.wait_tensor.default": torch.ops._c10d_functional.wait_tensor.default,
    "sym.add": operator.add,
    "sym.max": torch.sym_max,
    "sym.int": torch.sym_int,
    "sym.floor": math.floor,
    "sym.pow": operator.pow,
    "sym.math_pow": math.pow,
    "sym.math_sqrt": math.sqrt,
    "sym.getitem": operator.getitem,
    "sym.round": round,
    "sym.max_of": max,
    "hop.cond": torch.ops.higher_order.cond,
    "hop.auto_functionalized_v2": torch.ops.higher_order.auto_functionalized_v2,
    "py.torch.nn.functional.relu": torch.nn.functional.relu,
}


@pytest.mark.parametrize("name", TARGETS)
def test_names_resolve_to_what_they_name(name: str) -> None:
    assert op_name(TARGETS[name]) == name
    assert resolve_op(name) is TARGETS[name]


def test_names_of_nothing_are_refused() -> None:
    nothing = "aten.nothing.default aten.add.Nothing aten a.b.c.d sym.nothing hop.nothing py.nowhere.f py.a.<locals>"
    for name in (*nothing.split(), "py.x", ""):
        with pytest.raises(FrontendError, match="has no operator"):
            resolve_op(name)


# -- literals ----------------------------------------------------------------------------------------------------------


def to_ir(arg: Any) -> Any:
    return literal(arg, TypeReader(), {})


def back(arg: Any) -> Any:
    def refuse(value: Value) -> Any:
        raise AssertionError(value)

    return to_fx_arg(arg, refuse)


FORMS = [
    (torch.float16, DType.F16),
    (torch.bool, DType.B8),
    (torch.device("cuda:1"), Device("cuda", 1)),
    (torch.device("cpu"), Device("cpu")),
    (torch.strided, Token("strided")),
    (torch.channels_last, Token("channels_last")),
    (torch.qint8, Token("qint8")),
    (torch.ops.aten.add.Tensor, Token("aten.add.Tensor")),
    (torch.ops.higher_order.cond, Token("hop.cond")),
    ([1, [2.5, None]], (1, (2.5, None))),
    ({"a": [1], "b": torch.float32}, (Token("dict"), ("a", (1,)), ("b", DType.F32))),
    (slice(1, None, 2), (Token("slice"), 1, None, 2)),
    (1j, 1j),
]


@pytest.mark.parametrize(("torch_form", "ir_form"), FORMS, ids=[str(form) for _, form in FORMS])
def test_literals_go_there_and_back(torch_form: Any, ir_form: Any) -> None:
    assert to_ir(torch_form) == ir_form
    assert back(ir_form) == torch_form


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
NESTED = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(NESTED)
@budget(max_examples=100)
def test_structures_go_there_and_back(arg: Any) -> None:
    assert repr(back(to_ir(arg))) == repr(arg)


def test_what_only_fx_can_hold_has_no_literal() -> None:
    assert to_ir(object()) == Token("object.object")
    for arg in (symbol("s0"), GraphRef("body"), Token("object.object")):
        with pytest.raises(FrontendError, match="no literal form"):
            back(arg)


S0, S1 = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (t.FloorDiv(S0, S1), "floor(s0/s1)"),
        (t.ModularIndexing(S0, 4, S1), "Mod(floor(s0/4), s1)"),
        (t.Mod(S0, S1), "Mod(s0, s1)"),
        (t.PythonMod(S0, S1), "Mod(s0, s1)"),
        (t.Max(S0, S1), "Max(s0, s1)"),
        (t.Min(S0, 3), "Min(3, s0)"),
        (t.CeilToInt(t.IntTrueDiv(S0, S1)), "ceiling(s0/s1)"),
        (t.PowByNatural(S0, 2), "s0**2"),
        (t.Identity(S0) + 1, "s0 + 1"),
        (t.TruncToInt(t.ToFloat(S0)), "TruncToInt(s0)"),
        (S0 * S1 + 2 * S0, "s0*s1 + 2*s0"),
    ],
)
def test_sizes_of_torch_are_said_in_plain_sympy_of_the_same_value(expr: sympy.Basic, text: str) -> None:
    ours = to_ir(expr)
    assert str(ours) == text
    if "Trunc" in text or expr.atoms(t.Identity):
        return
    for x, y in ((1, 1), (7, 2), (2, 7), (48, 50), (50, 6)):
        torchs = expr.xreplace({S0: sympy.Integer(x), S1: sympy.Integer(y)})
        assert ours.subs({symbol("s0"): x, symbol("s1"): y}) == torchs
