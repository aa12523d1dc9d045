"""The numeric domain of the interpreter: contents are Python numbers and nested lists, for a handful of operators.

It exists to test by value that passes and the machine itself keep a program's meaning; it is no tensor library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from pygraph.ir.interp import UNREAD, Call, InterpretError, Results
from pygraph.ir.node import Value

__all__ = ["NumericDomain"]

Array: TypeAlias = "float | list[Array]"

_IDENTITIES = ("aten.alias.default", "aten.detach.default")


class NumericDomain:
    """Contents as floats and nested lists of them. Random numbers depend on the generator's count of draws alone."""

    def given(self, value: Value, content: object) -> object:
        """The caller's array. Raises InterpretError when there is none."""
        if content is None:
            raise InterpretError(f"input {value!r} was not given")
        return content

    def view(self, content: object, _call: Call, _result: int) -> object:
        """The content: all known views show the whole."""
        return content

    def put(self, _content: object, _path: Sequence[tuple[Call, int]], new: object) -> object:
        """All known views show the whole, so what is written replaces it."""
        return new

    def call(self, call: Call) -> Results:
        """Run one operator. Raises InterpretError for one that is not known."""
        if call.op in _IDENTITIES:
            return Results({}, {})
        if call.is_move:
            return Results({operand.position: operand.content for operand in call.operands}, {})
        compute = _OPERATORS.get(call.op)
        if compute is None:
            raise InterpretError(f"numbers have no operator {call.op}")
        result = compute(call)
        return Results(dict.fromkeys(range(call.results), result), dict.fromkeys(call.writes, result))

    def event(self, call: Call) -> str:
        """The operator and what it read; nothing for a move between devices."""
        if call.is_move:
            return ""
        return f"{call.op}{[operand.content for operand in call.operands if operand.content is not UNREAD]}"


def _array(call: Call, position: int) -> Array:
    argument = call.args[position]
    content = getattr(argument, "content", argument)
    if not isinstance(content, (int, float, list)):
        raise InterpretError(f"{call.op}: argument {position} is no array")
    return content


def _map(compute: Callable[..., float], *arrays: Array) -> Array:
    """``compute`` element by element; a number stands for an array of it."""
    lists = [array for array in arrays if isinstance(array, list)]
    if not lists:
        return compute(*arrays)
    if len({len(array) for array in lists}) != 1:
        raise InterpretError("arrays of different lengths")
    rows = zip(*(array if isinstance(array, list) else [array] * len(lists[0]) for array in arrays), strict=True)
    return [_map(compute, *row) for row in rows]


def _total(array: Array) -> float:
    return sum(map(_total, array)) if isinstance(array, list) else array


def _product(one: Array, other: Array) -> Array:
    if not isinstance(one, list) or not isinstance(other, list):
        raise InterpretError("a matrix product needs matrices")
    columns: list[Array] = [list(column) for column in zip(*map(_row, other), strict=True)]
    return [[_total(_map(lambda a, b: a * b, row, column)) for column in columns] for row in one]


def _row(array: Array) -> list[Array]:
    if not isinstance(array, list):
        raise InterpretError("a matrix product needs matrices")
    return array


def _random(call: Call) -> Array:
    if call.draw is None or not isinstance(call.args[0], tuple):
        raise InterpretError(f"{call.op} needs a size and a generator")
    return _filled(call.args[0], float(call.draw[1]))


def _filled(shape: tuple[object, ...], seed: float) -> Array:
    if not shape:
        return (seed * 0.618 + 0.1) % 1.0
    if not isinstance(shape[0], int):
        raise InterpretError("a size must be a number")
    return [_filled(shape[1:], seed * 31 + index + 1) for index in range(shape[0])]


def _binary(compute: Callable[[float, float], float]) -> Callable[[Call], Array]:
    return lambda call: _map(compute, _array(call, 0), _array(call, 1))


_OPERATORS: Mapping[str, Callable[[Call], Array]] = {
    "aten._local_scalar_dense.default": lambda call: _total(_array(call, 0)),
    "aten.add.Tensor": _binary(lambda a, b: a + b),
    "aten.add_.Tensor": _binary(lambda a, b: a + b),
    "aten.copy_.default": lambda call: _array(call, 1),
    "aten.mm.default": lambda call: _product(_array(call, 0), _array(call, 1)),
    "aten.mul.Tensor": _binary(lambda a, b: a * b),
    "aten.mul_.Tensor": _binary(lambda a, b: a * b),
    "aten.rand.default": _random,
    "aten.relu.default": lambda call: _map(lambda a: max(a, 0.0), _array(call, 0)),
    "aten.sum.default": lambda call: _total(_array(call, 0)),
}
