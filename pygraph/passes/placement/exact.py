"""Which CPU operators give the same bits on the device: factories, movement of data, arithmetic on integers, casts.

Checked by running them on an x86 CPU and on one H200. Random factories are in no table: another generator draws other
numbers. So are indexing (out-of-range indices raise on the CPU only) and, unless asked for, arithmetic on floats.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from pygraph.ir import CONSTANT, Arg, DType, KernelNode, ScalarType, TensorType, Value, base_name

_TABLE = {
    # factories whose values are given, or anything
    "fills": f"""
        aten.empty aten.empty_permuted aten.empty_strided aten.eye aten.full aten.ones aten.scalar_tensor
        aten.tril_indices aten.triu_indices aten.zeros prims.empty prims.empty_permuted prims.empty_strided prims.full
        prims.scalar_tensor {CONSTANT}
    """,
    # factories that count: in floating-point they are computed differently (f16, bf16 and fractional steps differ)
    "ranges": "aten.arange prims.iota",
    # operators that put elements elsewhere, where all operands but masks have the element type of the result
    "movement": """
        aten._reshape_alias aten._unsafe_view aten.alias aten.broadcast_to aten.cat aten.clone aten.constant_pad_nd
        aten.detach aten.diagonal aten.empty_like aten.expand aten.fill aten.flip aten.full_like aten.lift_fresh
        aten.lift_fresh_copy aten.masked_fill aten.new_empty aten.new_full aten.new_ones aten.new_zeros aten.ones_like
        aten.permute aten.repeat aten.reshape aten.roll aten.select aten.slice aten.split aten.split_with_sizes
        aten.squeeze aten.stack aten.t aten.transpose aten.tril aten.triu aten.unbind aten.unsqueeze aten.view
        aten.where aten.zeros_like prims.broadcast_in_dim prims.cat prims.clone prims.squeeze prims.transpose
        prims.where
    """,
    # exact on integers and booleans, sums included; shifts and powers are not: beyond the width, devices differ
    "integer": """
        aten.abs aten.add aten.all aten.any aten.bitwise_and aten.bitwise_not aten.bitwise_or aten.bitwise_xor
        aten.clamp aten.clamp_max aten.clamp_min aten.cumsum aten.eq aten.ge aten.gt aten.le aten.logical_and
        aten.logical_not aten.logical_or aten.logical_xor aten.lt aten.maximum aten.minimum aten.mul aten.ne aten.neg
        aten.rsub aten.sign aten.sub aten.sum
    """,
    # exact on integers; dividing by zero raises on the CPU only, so the divisor has to be a number that is not zero
    "divisions": "aten.div aten.floor_divide aten.fmod aten.remainder",
    "casts": "aten._to_copy prims.convert_element_type",
    # what the option ``floating`` adds, beside floats in integer arithmetic: the last bit may differ
    "floating": """
        aten.arange aten.cos aten.div aten.erf aten.exp aten.linspace aten.log aten.pow aten.reciprocal aten.rsqrt
        aten.sigmoid aten.sin aten.sqrt aten.tan aten.tanh
    """,
}
_OPERATORS = {kind: frozenset(names.split()) for kind, names in _TABLE.items()}

_WIDE = frozenset({DType.F32, DType.F64})
_NARROW = frozenset({DType.F16, DType.BF16})
_ROUNDED = {
    DType.F64: _WIDE,
    DType.F32: _WIDE | _NARROW,
    DType.F16: _WIDE | {DType.F16},
    DType.BF16: _WIDE | {DType.BF16},
}
"""Floating types that a floating type may be cast to. From f64 to 16 bits devices round once or twice."""


def is_factory(node: KernelNode) -> bool:
    """Whether ``node`` makes tensors from numbers alone."""
    return not _dtypes(node.inputs)


def is_exact(node: KernelNode, *, floating: bool = False) -> bool:
    """Whether ``node`` gives the same bits on any device; ``floating`` admits floats whose last bit may differ."""
    base = base_name(node.op)
    kinds = [kind for kind, names in _OPERATORS.items() if base in names]
    taken, made = _dtypes(node.inputs), _dtypes(node.outputs)
    if "fills" in kinds:
        return True
    if "movement" in kinds:
        return len(set(made)) == 1 and set(taken) <= {*made, DType.B8}
    if "casts" in kinds:
        return bool(taken and made) and _casts_exactly(taken[0], made[0])
    if all(map(_is_integral, (*taken, *made))) and (
        ("ranges" in kinds and all(map(_is_whole, node.args)))
        or ("integer" in kinds and _whole_numbers(node))
        or ("divisions" in kinds and _divides_by_number(node))
    ):
        return True
    real = all(_is_integral(dtype) or dtype in _WIDE | _NARROW for dtype in (*taken, *made))
    return floating and real and ("floating" in kinds or "integer" in kinds)


def _dtypes(values: Iterable[Value]) -> list[DType]:
    return [value.type.dtype for value in values if isinstance(value.type, TensorType)]


def _is_integral(dtype: DType) -> bool:
    return dtype is DType.B8 or dtype.value[0] in "iu"


def _is_whole(arg: Arg) -> bool:
    if isinstance(arg, Value):
        return isinstance(arg.type, ScalarType) and arg.type.kind == "int"
    return arg is None or isinstance(arg, int | sympy.Expr)


def _whole_numbers(node: KernelNode) -> bool:
    """Whether every number among the operands is an integer or a boolean."""
    literals = (arg for arg in (*node.args, *node.attrs.values()) if not isinstance(arg, Value))
    scalars = (value.type for value in node.inputs if isinstance(value.type, ScalarType))
    return not any(isinstance(arg, float | complex) for arg in literals) and all(s.kind != "float" for s in scalars)


def _divides_by_number(node: KernelNode) -> bool:
    divisor = node.args[1] if len(node.args) > 1 else None
    mode = node.attrs.get("rounding_mode", "floor")
    return isinstance(divisor, int) and not isinstance(divisor, bool) and divisor != 0 and mode is not None


def _casts_exactly(source: DType, result: DType) -> bool:
    """Whether the cast rounds once, to nearest, or not at all. Floats to integers are undefined out of range."""
    if _is_integral(source):
        return _is_integral(result) or result in _WIDE or (source is DType.B8 and result in _NARROW)
    return result in _ROUNDED.get(source, ())
