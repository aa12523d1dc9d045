"""Formulas by operator: a table from a name without overload to a function of the node.

A formula gives the whole cost, or the flops alone when its operator just reads its operands and writes its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from pygraph.ir import Cost, Dim, KernelNode

__all__ = ["COSTS", "FLOPS", "CostFormula", "FlopsFormula", "costs", "flops"]

FlopsFormula: TypeAlias = Callable[[KernelNode], "Dim | None"]
CostFormula: TypeAlias = Callable[[KernelNode], Cost]
_Formula = TypeVar("_Formula", FlopsFormula, CostFormula)

FLOPS: dict[str, FlopsFormula] = {}
"""Floating-point operations of an operator whose traffic is the plain one: each operand read, each result written."""

COSTS: dict[str, CostFormula] = {}
"""The whole cost of an operator whose traffic is not the plain one."""


def flops(*ops: str) -> Callable[[FlopsFormula], FlopsFormula]:
    """Register a formula for the flops of ``ops`` (names without overload)."""
    return _registering(FLOPS, ops)


def costs(*ops: str) -> Callable[[CostFormula], CostFormula]:
    """Register a formula for the whole cost of ``ops`` (names without overload)."""
    return _registering(COSTS, ops)


def _registering(table: dict[str, _Formula], ops: tuple[str, ...]) -> Callable[[_Formula], _Formula]:
    def register(formula: _Formula) -> _Formula:
        table.update(dict.fromkeys(ops, formula))
        return formula

    return register
