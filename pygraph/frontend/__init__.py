"""From torch to the IR: FX graphs of operators, names, literals, costs, source lines.

The names below are loaded at first use: a program that comes from a cache is not lifted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pygraph.frontend.args import to_fx_arg
    from pygraph.frontend.costs import cost_of
    from pygraph.frontend.fx import FX_MADE_FROM, lift, made_from, result_paths
    from pygraph.frontend.location import location_of
    from pygraph.frontend.names import FrontendError, op_name, resolve_op
    from pygraph.frontend.roles import backward_static_inputs, held_inputs, lent_inputs

__all__ = [
    "FX_MADE_FROM",
    "FrontendError",
    "backward_static_inputs",
    "cost_of",
    "held_inputs",
    "lent_inputs",
    "lift",
    "location_of",
    "made_from",
    "op_name",
    "resolve_op",
    "result_paths",
    "to_fx_arg",
]

_HOMES = {
    "args": ("to_fx_arg",),
    "costs": ("cost_of",),
    "fx": ("FX_MADE_FROM", "lift", "made_from", "result_paths"),
    "location": ("location_of",),
    "names": ("FrontendError", "op_name", "resolve_op"),
    "roles": ("backward_static_inputs", "held_inputs", "lent_inputs"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
