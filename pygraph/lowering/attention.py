"""Gives a defined value, on the GPU, to the random state that attention returns although it drops nothing.

Attention returns seed and offset for its backward. Outside of a capture they may lie on the CPU, inside one never,
and without dropout nobody sets or reads them: an output without a value or a device of its own cannot be replayed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node as FxNode

from pygraph.compat import detect_fake_mode

__all__ = ["define_seeds"]


@dataclass(frozen=True)
class _Attention:
    """Where an attention operator takes its dropout probability, and which of its results are random state."""

    dropout: int
    states: tuple[int, ...]


_OPERATORS = {
    "_scaled_dot_product_flash_attention": _Attention(3, (6, 7)),
    "_scaled_dot_product_efficient_attention": _Attention(5, (2, 3)),
    "_scaled_dot_product_cudnn_attention": _Attention(5, (6, 7)),
}


def define_seeds(gm: torch.fx.GraphModule) -> list[str]:
    """Replace, in the FX graph of ``gm``, the random state of attention without dropout by zeros on its device.

    before:  out, lse, seed, offset = attention(q, k, v, …, dropout_p=0.0);  return out, seed, offset
    after:   out, lse, _, _ = attention(…);  zero = full([], 0, device=q.device);  return out, zero, zero′

    Returns notes on what was replaced.
    """
    notes: list[str] = []
    for node in list(gm.graph.nodes):
        facts = _OPERATORS.get(_name(node))
        if facts is None or _dropout(node, facts) != 0.0:
            continue
        for item in [user for user in node.users if user.target is operator.getitem and user.args[1] in facts.states]:
            if item.users:
                _define(gm, node, item)
                notes.append(f"{item.name}: random state of attention without dropout is zero")
    if notes:
        gm.graph.lint()
        gm.recompile()
    return notes


def _name(node: FxNode) -> str:
    """The name of the aten operator that ``node`` calls, or nothing."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).removeprefix("aten::")


def _dropout(node: FxNode, facts: _Attention) -> object:
    return node.args[facts.dropout] if len(node.args) > facts.dropout else node.kwargs.get("dropout_p", 0.0)


def _define(gm: torch.fx.GraphModule, node: FxNode, item: FxNode) -> None:
    """Let a constant take the place of ``item``, a result of the attention ``node``."""
    query = node.args[0]
    value = item.meta.get("val")
    if not isinstance(query, FxNode) or not isinstance(value, torch.Tensor):
        return
    device, size = query.meta["val"].device, list(value.size())
    with gm.graph.inserting_after(item):
        zero = gm.graph.call_function(
            torch.ops.aten.full.default,
            (size, 0),
            {"dtype": value.dtype, "layout": torch.strided, "device": device, "pin_memory": False},
        )
    zero.meta = dict(item.meta)
    mode = detect_fake_mode(value)
    if mode is not None:
        with mode:
            zero.meta["val"] = torch.full(size, 0, dtype=value.dtype, device=device)
    item.replace_all_uses_with(zero)
