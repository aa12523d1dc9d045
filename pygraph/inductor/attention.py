"""Frees attention that drops nothing from the random state that it is given, and that it returns.

Attention returns seed and offset for its backward. Outside of a capture they may lie on the CPU, inside one never,
and without dropout nobody sets or reads them: an output without a value or a device of its own cannot be replayed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from pygraph.frontend.names import op_name
from pygraph.inductor.write_back import refresh_values

__all__ = ["define_seeds", "inputs_in_use", "unwrap_idle"]

_WRAPPER = "hop.graphsafe_run_with_rng_state"

_STATES = {
    "_scaled_dot_product_flash_attention": (6, 7),
    "_scaled_dot_product_efficient_attention": (2, 3),
    "_scaled_dot_product_cudnn_attention": (6, 7),
}
"""Attention operators ▸ which of their results are random state."""


def _idle_states(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Which results of a call are random state that nobody sets or reads: attention that drops nothing has some."""
    schema: Any = getattr(target, "_schema", None)
    states = _STATES.get("" if schema is None else str(schema.name).removeprefix("aten::"), ())
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs} if states else {}
    return states if given.get("dropout_p", 0.0) == 0.0 else ()


def unwrap_idle(gm: torch.fx.GraphModule) -> list[str]:
    """Have attention without dropout, in the FX graph of ``gm``, called as it is where it is given a generator.

    before:  graphsafe_run_with_rng_state(attention, q, k, v, …, dropout_p=0.0, rng_state=generator)
    after:   attention(q, k, v, …, dropout_p=0.0)

    Checkpointing wraps every operator that may draw, so that it draws the same numbers when it is computed again. This
    one draws none: no generator is read or advanced either way. Returns a note if anything was replaced.
    """
    made: list[FxNode] = []
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or op_name(node.target) != _WRAPPER:
            continue
        target, args = node.args[0], node.args[1:]
        kwargs = {key: value for key, value in node.kwargs.items() if key != "rng_state"}
        if _idle_states(target, args, kwargs):
            with gm.graph.inserting_before(node):
                made.append(gm.graph.call_function(target, args, kwargs))
            # AOTAutograd says nothing of wrappers in a forward graph.
            made[-1].meta = dict(node.meta or next((user.meta for user in node.users), {}))
            node.replace_all_uses_with(made[-1])
            gm.graph.erase_node(node)
    _finish(gm, made)
    return [f"attention without dropout that was given a generator: {len(made)} called without"] if made else []


def inputs_in_use(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The fake ``inputs`` of ``gm``, with None for generators that no operator takes: Inductor refuses those."""
    pairs = zip(inputs, gm.graph.find_nodes(op="placeholder"), strict=True)
    return [each if node.users or not isinstance(each, torch.Generator) else None for each, node in pairs]


def define_seeds(gm: torch.fx.GraphModule) -> list[str]:
    """Replace, in the FX graph of ``gm``, the random state of attention without dropout by zeros on its device.

    before:  out, lse, seed, offset = attention(q, k, v, …, dropout_p=0.0);  return out, seed, offset
    after:   out, lse, _, _ = attention(…);  zero = full([], 0, device=q.device);  return out, zero, zero′

    Returns notes on what was replaced.
    """
    notes: list[str] = []
    made: list[FxNode] = []
    for node in list(gm.graph.nodes):
        states = _idle_states(node.target, node.args, node.kwargs)
        for item in [user for user in node.users if user.target is operator.getitem and user.args[1] in states]:
            value = item.meta.get("val")
            if not item.users or not isinstance(value, torch.Tensor):
                continue
            facts = {"dtype": value.dtype, "device": node.args[0].meta["val"].device}
            facts |= {"layout": torch.strided, "pin_memory": False}
            with gm.graph.inserting_after(item):
                made.append(gm.graph.call_function(torch.ops.aten.full.default, (list(value.size()), 0), facts))
            made[-1].meta = dict(item.meta)
            item.replace_all_uses_with(made[-1])
            notes.append(f"{item.name}: random state of attention without dropout is zero")
    _finish(gm, made)
    return notes


def _finish(gm: torch.fx.GraphModule, made: list[FxNode]) -> None:
    """Recompute the values of what was ``made``, and of what follows from it; then the code."""
    if made:
        refresh_values(gm.graph, made)
        gm.graph.lint()
        gm.recompile()
