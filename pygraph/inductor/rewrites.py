"""Rewrites of the FX graph before it is lifted, so that more of it can be captured, or less is computed.

attention     without dropout needs no random state. Its seed and offset may lie on the CPU outside of a capture, never
              inside, and an output without a value or a device of its own cannot be replayed
convolutions  of a training step, forward and backward, get one layout: Inductor moves forward ones to channels-last if
              that pays, and keeps operands of backward ones in their traced order. Two graphs agree, since the backward
              pass receives the strides of the compiled forward pass; one graph would write every activation twice
scalars       on the device are computed once, and not again for every element of their readers
gradients     that ranks average are sent as soon as they are known, and not only when all are
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from pygraph import compat
from pygraph.frontend.names import op_name
from pygraph.inductor.write_back import refresh_values
from pygraph.program.recording import WAIT, is_functional_collective


def _finish(gm: torch.fx.GraphModule, made: Sequence[FxNode] = ()) -> None:
    """Recompute the values of nodes that were ``made``, and of nodes that depend on them; then the code."""
    refresh_values(gm.graph, made)
    gm.graph.lint()
    gm.recompile()


def _tensor(node: Any) -> Any:
    """The traced tensor of a node, or None."""
    value = node.meta.get("val") if isinstance(node, FxNode) else None
    return value if isinstance(value, torch.Tensor) else None


# -- attention ---------------------------------------------------------------------------------------------------------

_WRAPPER = "hop.graphsafe_run_with_rng_state"

_STATES = {
    "_scaled_dot_product_flash_attention": (6, 7),
    "_scaled_dot_product_efficient_attention": (2, 3),
    "_scaled_dot_product_cudnn_attention": (6, 7),
}
"""Attention operators ▸ indices of their results that are random state."""


def _idle_states(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of results that are unused random state, as in attention without dropout; else empty."""
    schema: Any = getattr(target, "_schema", None)
    states = _STATES.get("" if schema is None else str(schema.name).removeprefix("aten::"), ())
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs} if states else {}
    return states if given.get("dropout_p", 0.0) == 0.0 else ()


def unwrap_idle(gm: torch.fx.GraphModule) -> list[str]:
    """Call attention without dropout directly, in the FX graph of ``gm``, where it is wrapped with a generator.

    before:  graphsafe_run_with_rng_state(attention, q, k, v, …, dropout_p=0.0, rng_state=generator)
    after:   attention(q, k, v, …, dropout_p=0.0)

    Checkpointing wraps every operator that may draw, so that recomputation draws the same numbers. Attention without
    dropout draws none: no generator is read or advanced either way. Returns a note if anything was replaced.
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
            # AOTAutograd leaves wrappers in a forward graph without ``meta``.
            made[-1].meta = dict(node.meta or next((user.meta for user in node.users), {}))
            node.replace_all_uses_with(made[-1])
            gm.graph.erase_node(node)
    if not made:
        return []
    _finish(gm, made)
    return [f"attention without dropout that was given a generator: {len(made)} called without"]


def inputs_in_use(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The fake ``inputs`` of ``gm``, with None for generators without users, which Inductor refuses."""
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
            value = _tensor(item)
            if not item.users or value is None:
                continue
            facts = {"dtype": value.dtype, "device": node.args[0].meta["val"].device}
            facts |= {"layout": torch.strided, "pin_memory": False}
            with gm.graph.inserting_after(item):
                made.append(gm.graph.call_function(torch.ops.aten.full.default, (list(value.size()), 0), facts))
            made[-1].meta = dict(item.meta)
            item.replace_all_uses_with(made[-1])
            notes.append(f"{item.name}: random state of attention without dropout is zero")
    if made:
        _finish(gm, made)
    return notes


# -- convolutions ------------------------------------------------------------------------------------------------------

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_OPERANDS = {_FORWARD: (0, 1), _BACKWARD: (0, 1, 2)}
_CLONE = torch.ops.aten.clone.default
_LOGICAL, _BY_STRIDES = ("aten", "prims"), "as_strided"
"""Namespaces whose operators do not depend on the strides of their operands; and the exceptions among these."""


def align_convolutions(gm: torch.fx.GraphModule) -> bool | None:
    """True if the convolutions of a graph with its own backward pass are to be channels-last, as Inductor decides for
    training; their operands are then cloned to that layout. False if not. None, without changes, for other graphs, and
    if operators depend on strides, or results share memory or are not contiguous."""
    nodes: list[Any] = list(gm.graph.nodes)
    convolutions = [node for node in nodes if node.target in _OPERANDS]
    if len({node.target for node in convolutions}) < len(_OPERANDS):
        return None
    operands = {node.args[place]: None for node in convolutions for place in _OPERANDS[node.target]}
    output = nodes[-1]
    given = {_storage(node) for node in nodes if node.op == "placeholder"}
    outputs = {node: _storage(node) for node in output.args[0] if _tensor(node) is not None}
    outputs = {node: storage for node, storage in outputs.items() if storage not in given}
    flat = all(_tensor(node) is not None and _tensor(node).dim() == 4 for node in operands)
    if not flat or not all(map(_is_logical, nodes)) or len(set(outputs.values())) < len(outputs):
        return None
    if not all(_tensor(node).is_contiguous() for node in outputs):
        return None
    if not compat.decide_layout_opt(gm, is_inference=False):
        return False
    made = {node: _cloned(gm, node, torch.channels_last) for node in operands}
    for node in convolutions:
        for place in _OPERANDS[node.target]:
            node.update_arg(place, made[node.args[place]])
    kept = {node: _cloned(gm, node, torch.contiguous_format) for node in outputs}
    output.args = (type(output.args[0])(kept.get(node, node) for node in output.args[0]),)
    _finish(gm)
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
    value = _tensor(node)
    return None if value is None else value.untyped_storage()._cdata


# -- scalars -----------------------------------------------------------------------------------------------------------

_CONVERT = torch.ops.prims.convert_element_type.default
_COMPUTED_IN_FLOAT = (torch.float, torch.half, torch.bfloat16)


def compute_scalars_once(gm: torch.fx.GraphModule) -> None:
    """Convert to float32 each 0-dimensional double that a foreach operator makes and another one combines with larger
    tensors. The combining operators compute in float32 themselves, so that results do not change.

    before:  _foreach_pow(beta, [step, …]) ─► _foreach_mul([weight, …], [number, …])
    after:   _foreach_pow(beta, [step, …]) ─► convert, … ─► _foreach_mul([weight, …], [number, …])

    Inductor fuses a foreach operator into the next, so that each element of a weight would compute its own power, in
    double precision. The conversion ends the chain: a separate kernel computes all numbers at once.
    """
    made: dict[FxNode, FxNode] = {}
    for node, place in _scaled_lists(gm):
        numbers = dict.fromkeys(item for item in node.args[place] if _is_computed_number(item))
        for item in (item for item in numbers if item not in made):
            with gm.graph.inserting_after(item):
                made[item] = gm.graph.call_function(_CONVERT, (item, torch.float))
            made[item].meta = {**item.meta, "val": item.meta["val"].float()}
        node.update_arg(place, [made.get(item, item) for item in node.args[place]])
    if made:
        _finish(gm)


def _scaled_lists(gm: torch.fx.GraphModule) -> Iterator[tuple[Any, int]]:
    """The foreach operators that compute larger tensors in float, each with the position of an argument that is another
    list of the same length."""
    for node in list(gm.graph.nodes):
        given = node.args[0] if _is_foreach(node) else None
        larger = list(map(_tensor, given)) if isinstance(given, (list, tuple)) else []
        if larger and all(value is not None and value.dim() and value.dtype in _COMPUTED_IN_FLOAT for value in larger):
            for place, other in enumerate(node.args):
                if place and isinstance(other, (list, tuple)) and len(other) == len(larger):
                    yield node, place


def _is_computed_number(item: Any) -> bool:
    value = _tensor(item)
    if value is None or value.dim() or value.dtype != torch.double:
        return False
    return item.target is operator.getitem and _is_foreach(item.args[0])


def _is_foreach(node: Any) -> bool:
    return isinstance(node, FxNode) and str(node.target).startswith("aten._foreach_")


# -- gradients of several ranks ----------------------------------------------------------------------------------------

SENT_EARLY = "pygraph_sent_early"
"""Key in the ``meta`` of an FX node: the node is a collective that was moved ahead."""

_ALL_REDUCE = "_c10d_functional.all_reduce.default"
_PACKS = frozenset(
    f"aten.{name}" for name in ("cat.default", "clone.default", "mul.Tensor", "reshape.default", "view.default")
)
"""Operators that scale gradients and pack them side by side."""

_ROWS = frozenset(f"aten.{name}.default" for name in ("cat", "reshape", "view"))
"""Operators that end the packing, with a one-dimensional result."""


def send_early(gm: torch.fx.GraphModule) -> None:
    """Move each all-reduce of packed tensors, and the nodes that pack them, right behind the last operand. Collectives
    keep their order. Waits stay in place, so that the rest of a backward pass runs concurrently.

    before:  backward of layer 2 ─► backward of layer 1 ─► all_reduce(2) ─► all_reduce(1) ─► wait, …
    after:   backward of layer 2 ─► all_reduce(2) ─► backward of layer 1 ─► all_reduce(1) ─► wait, …
    """
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    ends: dict[int, FxNode] = {}  # the last node that was moved behind a node, by the number of the latter
    latest: list[FxNode] = []  # the previous collective
    for node in sorted(order, key=order.__getitem__):
        if not is_functional_collective(str(node.target)) or str(node.target).startswith(WAIT):
            continue
        if str(node.target) == _ALL_REDUCE and _is_packed(node.all_input_nodes[0]):
            for each in (*_packing(node), node):
                last = max([*each.all_input_nodes, *(latest if each is node else ())], key=order.__getitem__)
                order[each] = number = order[last]
                ends.get(number, last).append(each)
                ends[number] = each
            node.meta[SENT_EARLY] = True
        latest = [node]
    if ends:
        gm.graph.lint()
        gm.recompile()


def _is_packed(node: FxNode) -> bool:
    """True if ``node`` packs other tensors into one dimension."""
    value = _tensor(node)
    return str(node.target) in _ROWS and value is not None and value.dim() == 1


def _packing(node: FxNode) -> list[FxNode]:
    """The nodes that only prepare the operands of ``node``, in order."""
    found = {node: None}
    waiting = [node]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if str(each.target) in _PACKS and each.users.keys() <= found.keys():
                found[each] = None
                waiting.append(each)
    return list(reversed(found))[:-1]
