"""Has numbers on the device computed once, and not in every element of what reads them.

    _foreach_pow(beta, [step, …])  ─►  _foreach_mul([weight, …], [number, …])

Inductor fuses a foreach operator into the next, so that each element of a weight would compute its own power, in double
precision. A conversion in between ends the chain: numbers get a kernel of their own, which computes all at once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

__all__ = ["compute_scalars_once"]

_CONVERT = torch.ops.prims.convert_element_type.default
_COMPUTED_IN_FLOAT = (torch.float, torch.half, torch.bfloat16)


def compute_scalars_once(gm: torch.fx.GraphModule) -> None:
    """Convert each 0-dimensional double that a foreach operator makes, and another combines with larger tensors, to
    float32. These operators compute in that type themselves: results stay the same."""
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in list(gm.graph.nodes):
        if not _is_foreach(node) or not isinstance(node.args[0], (list, tuple)):
            continue
        larger = [_value(item) for item in node.args[0]]
        if not all(value is not None and value.dim() and value.dtype in _COMPUTED_IN_FLOAT for value in larger):
            continue
        for place, given in enumerate(node.args[1:], 1):
            if not isinstance(given, (list, tuple)) or len(given) != len(larger):
                continue
            items = list(given)
            for index, item in enumerate(items):
                value = _value(item)
                if value is None or value.dim() or value.dtype != torch.double:
                    continue
                if item.target is not operator.getitem or not _is_foreach(item.args[0]):
                    continue
                if item not in made:
                    with gm.graph.inserting_after(item):
                        made[item] = gm.graph.call_function(_CONVERT, (item, torch.float))
                    made[item].meta = {**item.meta, "val": value.float()}
                items[index] = made[item]
            node.update_arg(place, items)
    if made:
        gm.graph.lint()
        gm.recompile()


def _is_foreach(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and str(node.target).startswith("aten._foreach_")


def _value(item: Any) -> torch.Tensor | None:
    value = item.meta.get("val") if isinstance(item, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
