"""Costs of operators, symbolic in their sizes. Formulas live in the files beside this one, by kind of operator.

``cost_of`` is all that the rest of the compiler uses. An operator without a formula costs UNKNOWN, never 0.
"""

from pygraph.frontend.costs.model import cost_of

__all__ = ["cost_of"]
