"""Effects of higher-order operators: control flow, subgraphs, wrapped operators, Triton kernels.

What a subgraph does is what its nodes do together; its writes and views are carried over to the operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import sympy
from torch import fx

from pygraph import compat
from pygraph.frontend.effects import Call, effects_of
from pygraph.frontend.names import HOP, FrontendError, op_name, resolve_op
from pygraph.frontend.types import DICT
from pygraph.ir import (
    PURE,
    Arg,
    Effects,
    Graph,
    GraphRef,
    ScalarType,
    TensorType,
    Token,
    Value,
    graph_refs_in,
    values_in,
)
from pygraph.ir.effects import FLAGS, NAMED
from pygraph.ir.order import memory_roots

__all__ = ["higher_order_effects", "wrapped_operator"]

_PURE = frozenset(
    {"flex_attention", "flex_attention_backward", "inline_asm_elementwise", "triton_kernel_wrapper_functional"}
)
_WRAPPERS = frozenset({"auto_functionalized", "auto_functionalized_v2"})
_RANDOM = frozenset(
    {"graphsafe_run_with_rng_state", "run_and_save_rng_state", "run_dtensor_rng_op", "run_with_rng_state"}
)
_SELECTING = frozenset({"cond", "switch"})
_HOST_CONTROLLED = _SELECTING | {"while_loop", "while_loop_stack_output"}


def higher_order_effects(call: Call) -> Effects:
    """The effects of the higher-order ``call``; a barrier where nothing is known of it."""
    name = call.op.removeprefix(HOP)
    if name == "triton_kernel_wrapper_mutation":
        return Effects(writes=tuple(_triton_writes(call)))
    if name in _PURE:
        return PURE
    if name in _WRAPPERS:
        return replace(_wrapped_effects(call), writes=(), aliases=())
    if name in _RANDOM:
        return replace(_wrapped_effects(call), rng="cpu" if call.device is None else str(call.device))
    if name == "with_effects":
        return replace(_wrapped_effects(call), barrier=True)
    graphs = [call.subgraphs[ref.name] for ref in graph_refs_in((*call.args, *call.attrs.values()))]
    if not graphs:
        return replace(PURE, barrier=True)
    effects = _of_subgraphs(call, graphs)
    return replace(effects, sync=effects.sync or (name in _HOST_CONTROLLED and _reads_tensor_control(call, name)))


def wrapped_operator(call: Call) -> Any | None:
    """The operator that a higher-order one runs for its caller (``auto_functionalized``, ``with_effects``), or None."""
    tokens = [arg for arg in call.args if isinstance(arg, Token)]
    try:
        return resolve_op(tokens[0].name) if tokens else None
    except FrontendError:
        return None


def _reads_tensor_control(call: Call, name: str) -> bool:
    control = call.args[0] if call.args else None
    symbolic = isinstance(control, bool) or (isinstance(control, Value) and isinstance(control.type, ScalarType))
    return name not in _SELECTING or not symbolic


# -- wrapped operators -----------------------------------------------------------------------------------------------


def _wrapped_effects(call: Call) -> Effects:
    """What the wrapped operator does, its operands standing in for those of the wrapper."""
    target = wrapped_operator(call)
    if target is None:
        return replace(PURE, barrier=True)
    index = next(i for i, arg in enumerate(call.args) if isinstance(arg, Token))
    inner = replace(call, op=op_name(target), target=target, args=call.args[index + 1 :])
    found = higher_order_effects(inner) if isinstance(target, compat.HigherOrderOperator) else effects_of(inner)
    before = sum(1 for _ in values_in(call.args[:index]))
    return replace(found, writes=tuple(p + before for p in found.writes), aliases=(), reads=None)


def _triton_writes(call: Call) -> Iterator[int]:
    """Positions of the tensors that a Triton kernel writes: as torch's analysis says, else all of them."""
    written = _analysed_writes(call.node) if call.node is not None else None
    position = {value: index for index, value in enumerate(call.operands)}
    for name, value in _keyword_tensors(call.attrs.get("kwargs")):
        if written is None or name in written:
            yield position[value]


def _keyword_tensors(kwargs: Arg) -> list[tuple[str, Value]]:
    pairs = kwargs[1:] if isinstance(kwargs, tuple) and kwargs[:1] == (DICT,) else ()
    named = [pair for pair in pairs if isinstance(pair, tuple) and len(pair) == 2]
    return [(str(k), v) for k, v in named if isinstance(v, Value) and isinstance(v.type, TensorType)]


def _analysed_writes(node: fx.Node) -> frozenset[str] | None:
    """The names of the arguments that torch found written, or None when it does not know the kernel."""
    kwargs: Any = node.kwargs.get("kwargs")
    tensors = {k: v.meta.get("val") if isinstance(v, fx.Node) else v for k, v in kwargs.items()}
    tma: Any = node.kwargs.get("tma_descriptor_metadata") or {}
    kernel: Any = node.kwargs.get("kernel_idx")
    constants: Any = node.kwargs.get("constant_args_idx")
    try:
        return frozenset(compat.get_mutated_tensors(kernel, constants, tensors, tma))
    except (AssertionError, KeyError, ImportError):
        return None


# -- subgraphs -------------------------------------------------------------------------------------------------------


def _of_subgraphs(call: Call, graphs: list[Graph]) -> Effects:
    nodes = [node.effects for graph in graphs for node in graph.nodes]
    leaves = _leaves(call)
    found: dict[str, Any] = {flag: any(getattr(effects, flag) for effects in nodes) for flag in FLAGS}
    found["dynamic"] = call.binds
    for kind in NAMED:
        names = list(dict.fromkeys(getattr(effects, kind) for effects in nodes if getattr(effects, kind) is not None))
        found[kind] = names[0] if names else None
        found["barrier"] |= len(names) > 1
    return Effects(
        writes=tuple(sorted({p for graph in graphs for p in _written(call, graph, leaves)})),
        aliases=tuple(sorted({pair for graph in graphs for pair in _shared(call, graph, leaves)})),
        **found,
    )


def _leaves(call: Call) -> list[int | None]:
    """What the subgraphs get, in order: the position of each value after the last subgraph, None for a literal."""
    last = max((i for i, arg in enumerate(call.args) if isinstance(arg, GraphRef)), default=-1)
    start = sum(1 for _ in values_in(call.args[: last + 1]))
    counter = iter(range(start, len(call.operands)))
    return [next(counter) if isinstance(leaf, Value) else None for leaf in _flat(call.args[last + 1 :])]


def _flat(arg: Arg) -> Iterator[Arg]:
    if isinstance(arg, tuple):
        for item in arg:
            yield from _flat(item)
    elif isinstance(arg, (Value, int, float, sympy.Expr)):
        yield arg


def _operands_of(call: Call, graph: Graph, leaves: list[int | None]) -> dict[Value, list[int]]:
    """For each input of ``graph``, the operands that it may be: its own, or all tensors when they cannot be matched."""
    if len(leaves) != len(graph.inputs):
        return {value: list(call.tensors()) for value in graph.inputs}
    return {value: [] if leaf is None else [leaf] for value, leaf in zip(graph.inputs, leaves, strict=True)}


def _written(call: Call, graph: Graph, leaves: list[int | None]) -> Iterator[int]:
    written = [node.inputs[p] for node in graph.nodes for p in node.effects.writes]
    if not written:
        return
    roots, operands = memory_roots(graph), _operands_of(call, graph, leaves)
    for value in written:
        yield from operands.get(roots[value], ())


def _shared(call: Call, graph: Graph, leaves: list[int | None]) -> Iterator[tuple[int, int]]:
    """(result, operand) pairs that share memory because the subgraph returns what it was given, or a view of it."""
    roots, operands = memory_roots(graph), _operands_of(call, graph, leaves)
    for index, path in enumerate(call.paths):
        if not isinstance(call.results[index], TensorType):
            continue
        place = path[0] if path and isinstance(path[0], int) else 0
        returned = graph.outputs[place] if place < len(graph.outputs) else None
        if isinstance(returned, Value):
            yield from ((index, operand) for operand in operands.get(roots[returned], ()))
        if call.op.startswith(f"{HOP}while_loop") and place < len(leaves) and leaves[place] is not None:
            # A loop that never runs returns what it was given.
            yield (index, leaves[place] or 0)
