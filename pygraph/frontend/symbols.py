"""Torch's symbolic numbers to sizes of the IR, and the example values of their symbols.

Which functions the IR keeps, and what torch's own (FloorDiv, ModularIndexing, …) become, ``pygraph.ir.dims`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from pygraph.ir.dims import canonical
from pygraph.ir.types import Dim, as_dim

__all__ = ["SymbolReader"]


class SymbolReader:
    """Translates symbolic numbers and collects the example values of every symbol that it met."""

    def __init__(self) -> None:
        self._known: dict[sympy.Basic, sympy.Expr] = {}
        self._hints: dict[str, int] = {}
        self._used: dict[str, None] = {}

    @property
    def hints(self) -> dict[str, int]:
        """Example values of the symbols met so far, in order of their names. Unbacked symbols have none."""
        return {name: self._hints[name] for name in sorted(self._used) if name in self._hints}

    def dim(self, value: int | torch.SymInt) -> Dim:
        """``value`` as a size of the IR."""
        return value if type(value) is int else self._dim(value)

    def _dim(self, value: int | torch.SymInt) -> Dim:
        return int(value) if isinstance(value, int) else as_dim(self.expr(value))

    def expr(self, value: torch.SymInt | torch.SymFloat) -> sympy.Expr:
        """The expression behind a symbolic number, over the IR's symbols."""
        # SymInt.node and its expr, with what the ShapeEnv learnt since put in: checked on 2.11, 2.13.
        found = value.node.expr
        known = self._known.get(found)
        if known is None:
            self._note(found, value.node.shape_env)
            known = self._known[found] = self.translate(found)
        return known

    def translate(self, expr: sympy.Basic) -> sympy.Expr:
        """``expr`` of torch in the IR's own terms."""
        self._used.update((str(found), None) for found in expr.free_symbols)
        return sympy.sympify(canonical(expr))

    def _note(self, expr: sympy.Basic, shape_env: Any) -> None:
        # ShapeEnv.backed_var_to_val: checked on 2.11, 2.13.
        hints: Mapping[sympy.Basic, Any] = {} if shape_env is None else shape_env.backed_var_to_val
        for found in expr.free_symbols:
            hint = hints.get(found)
            if hint is not None and hint.is_Integer:
                self._hints[str(found)] = int(hint)
