"""Brings the fake results of FX nodes up to date after an edit: sizes, strides and devices that Inductor relies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from pygraph import compat

__all__ = ["refresh_values"]


def refresh_values(graph: FxGraph, changed: Sequence[FxNode]) -> None:
    """Recompute ``meta["val"]`` of the ``changed`` nodes and of all that follows from them."""
    if not changed:
        return
    mode = compat.detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    stale = set(changed)
    for node in graph.nodes:
        if node.op != "call_function" or not (node in stale or stale.intersection(node.all_input_nodes)):
            continue
        before = node.meta.get("val")
        node.meta["val"] = _evaluate(node, mode)
        if node in stale or not _alike(before, node.meta["val"]):
            stale.add(node)


def _evaluate(node: FxNode, mode: Any) -> Any:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target is callable


def _alike(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return type(before) is type(after) and not isinstance(before, (torch.Tensor, tuple, list))
    same = (before.dtype, before.device, before.shape) == (after.dtype, after.device, after.shape)
    return same and before.stride() == after.stride()
