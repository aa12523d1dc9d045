"""Has the convolutions of a training step, forward and backward, agree on one layout.

    convolution(x, w), convolution_backward(g, x, w)  ─►  the same of clone(x), clone(w), clone(g), all channels-last

Inductor moves forward convolutions to channels-last where that pays, and keeps operands of backward ones in the order
that was traced. Two graphs agree, since the backward pass is told the strides of the compiled forward pass. In one
graph every activation would be written twice. Clones that change nothing are removed by Inductor.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from pygraph import compat

__all__ = ["align_convolutions"]

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_OPERANDS = {_FORWARD: (0, 1), _BACKWARD: (0, 1, 2)}
_CLONE = torch.ops.aten.clone.default
_LOGICAL, _BY_STRIDES = ("aten", "prims"), "as_strided"
"""Namespaces of operators whose results do not depend on the strides of their operands, and those of them that do."""


def align_convolutions(gm: torch.fx.GraphModule) -> bool | None:
    """Whether convolutions of a graph that holds its own backward pass shall be channels-last, as Inductor decides it
    for training; their operands are then cloned to that layout. None, and nothing is changed, for other graphs, and
    where operators depend on strides, or results share memory or are no plain tensors."""
    nodes: list[Any] = list(gm.graph.nodes)
    convolutions = [node for node in nodes if node.target in _OPERANDS]
    if len({node.target for node in convolutions}) < len(_OPERANDS):
        return None
    operands = {node.args[place]: None for node in convolutions for place in _OPERANDS[node.target]}
    output = nodes[-1]
    given = {_storage(node) for node in nodes if node.op == "placeholder"}
    outputs = {node: _storage(node) for node in output.args[0] if _value(node) is not None}
    outputs = {node: storage for node, storage in outputs.items() if storage not in given}
    flat = all(_value(node) is not None and _value(node).dim() == 4 for node in operands)
    if not flat or not all(map(_is_logical, nodes)) or len(set(outputs.values())) < len(outputs):
        return None
    if not all(_value(node).is_contiguous() for node in outputs):
        return None
    if not compat.decide_layout_opt(gm, is_inference=False):
        return False
    made = {node: _cloned(gm, node, torch.channels_last) for node in operands}
    for node in convolutions:
        for place in _OPERANDS[node.target]:
            node.update_arg(place, made[node.args[place]])
    kept = {node: _cloned(gm, node, torch.contiguous_format) for node in outputs}
    output.args = (type(output.args[0])(kept.get(node, node) for node in output.args[0]),)
    gm.graph.lint()
    gm.recompile()
    return True


def _cloned(gm: torch.fx.GraphModule, node: Any, layout: torch.memory_format) -> torch.fx.Node:
    after = node
    while after.op == "placeholder" and after.next.op == "placeholder":  # all of them come first
        after = after.next
    with gm.graph.inserting_after(after):
        made = gm.graph.call_function(_CLONE, (node,), {"memory_format": layout})
    made.meta = {**node.meta, "val": torch.clone(node.meta["val"], memory_format=layout)}
    return made


def _is_logical(node: Any) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    return getattr(node.target, "namespace", None) in _LOGICAL and _BY_STRIDES not in str(node.target)


def _storage(node: Any) -> int | None:
    value = _value(node)
    return None if value is None else value.untyped_storage()._cdata


def _value(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
