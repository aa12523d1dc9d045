"""Effects of higher-order operators: control flow, subgraphs, wrapped operators, Triton kernels.

The effects of a subgraph are those of its nodes together; its writes and views are mapped to the operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import sympy
from torch import fx

from pygraph import compat
from pygraph.frontend.effects import Call, effects_of
from pygraph.frontend.names import HOP, FrontendError, op_name, resolve_op
from pygraph.ir import (
    PURE,
    Effects,
    Graph,
    GraphRef,
    ScalarType,
    TensorType,
    Token,
    Value,
    leaves,
    values_in,
)
from pygraph.ir.effects import FLAGS, NAMED
from pygraph.ir.order import memory_roots
from pygraph.runtime.cuda.bindings import has_conditionals

_PURE = frozenset(
    {"flex_attention", "flex_attention_backward", "inline_asm_elementwise", "triton_kernel_wrapper_functional"}
)
_WRAPPERS = frozenset({"auto_functionalized", "auto_functionalized_v2"})
_RANDOM = frozenset(
    {"graphsafe_run_with_rng_state", "run_and_save_rng_state", "run_dtensor_rng_op", "run_with_rng_state"}
)
_SELECTING = frozenset({"cond", "switch"})
_LOOPS = frozenset({"while_loop", "while_loop_stack_output"})
_DECIDED = frozenset({"cond", "while_loop"})
"""Higher-order operators whose condition replays read on the device."""


def higher_order_effects(call: Call) -> Effects:
    """The effects of a higher-order ``call``; a barrier if it is unknown."""
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
    graphs = [call.subgraphs[ref.name] for ref in leaves((*call.args, *call.attrs.values()), GraphRef)]
    if not graphs:
        return replace(PURE, barrier=True)
    effects = _of_subgraphs(call, graphs)
    control = call.args[0] if call.args else None
    chosen = isinstance(control, bool) or (isinstance(control, Value) and isinstance(control.type, ScalarType))
    waits = name in _LOOPS or (name in _SELECTING and not chosen)  # the host reads the condition from a tensor
    waits = waits and not (name in _DECIDED and compat.CONTROL_FLOW and _has_conditionals(call))
    return replace(effects, sync=effects.sync or waits)


def _has_conditionals(call: Call) -> bool:
    """True if a replay can evaluate the condition: on the CPU, and on CUDA if the driver has conditional nodes."""
    return call.device is None or call.device.kind != "cuda" or has_conditionals()


def wrapped_operator(call: Call) -> Any | None:
    """The operator that a higher-order one runs for its caller (``auto_functionalized``, ``with_effects``), or None."""
    tokens = [arg for arg in call.args if isinstance(arg, Token)]
    try:
        return resolve_op(tokens[0].name) if tokens else None
    except FrontendError:
        return None


def _wrapped_effects(call: Call) -> Effects:
    """The effects of the wrapped operator, with positions of the wrapper's operands."""
    target = wrapped_operator(call)
    if target is None:
        return replace(PURE, barrier=True)
    index = next(i for i, arg in enumerate(call.args) if isinstance(arg, Token))
    inner = replace(call, op=op_name(target), target=target, args=call.args[index + 1 :])
    found = higher_order_effects(inner) if isinstance(target, compat.HigherOrderOperator) else effects_of(inner)
    before = sum(1 for _ in values_in(call.args[:index]))
    return replace(found, writes=tuple(p + before for p in found.writes), aliases=(), reads=None)


def _triton_writes(call: Call) -> Iterator[int]:
    """Positions of the tensors that a Triton kernel writes, by torch's analysis; if that fails, all tensors."""
    written = None if call.node is None else _analysed_writes(call.node)
    _, *pairs = cast("tuple[Any, ...]", call.attrs["kwargs"])
    for name, value in pairs:
        if isinstance(value, Value) and isinstance(value.type, TensorType) and (written is None or name in written):
            yield call.operands.index(value)


def _analysed_writes(node: fx.Node) -> frozenset[str] | None:
    """The names of the arguments that are written, by torch's analysis; None if torch does not know the kernel."""
    given: dict[str, Any] = node.kwargs
    tensors = {k: v.meta.get("val") if isinstance(v, fx.Node) else v for k, v in given["kwargs"].items()}
    tma = given.get("tma_descriptor_metadata") or {}
    try:
        return frozenset(
            compat.get_mutated_tensors(given.get("kernel_idx"), given.get("constant_args_idx"), tensors, tma)
        )
    except (AssertionError, KeyError, ImportError):
        return None


def _of_subgraphs(call: Call, graphs: list[Graph]) -> Effects:
    nodes = [node.effects for graph in graphs for node in graph.nodes]
    found: dict[str, Any] = {flag: any(getattr(effects, flag) for effects in nodes) for flag in FLAGS}
    found["dynamic"] = call.binds
    for kind in NAMED:
        names = list(dict.fromkeys(getattr(effects, kind) for effects in nodes if getattr(effects, kind) is not None))
        found[kind] = names[0] if names else None
        found["barrier"] |= len(names) > 1
    given = _given(call)
    writes: set[int] = set()
    aliases: set[tuple[int, int]] = set()
    for graph in graphs:
        roots = memory_roots(graph)
        operands: dict[Value, list[int]] = dict.fromkeys(graph.inputs, call.tensors())  # if they cannot be matched
        if len(given) == len(graph.inputs):
            operands = dict(zip(graph.inputs, given, strict=True))
        for node in graph.nodes:
            writes.update(p for written in node.effects.writes for p in operands.get(roots[node.inputs[written]], ()))
        for index, type in enumerate(call.results):
            place = next((step for step in call.paths[index][:1] if isinstance(step, int)), 0)
            returned = graph.outputs[place] if place < len(graph.outputs) else None
            if isinstance(type, TensorType) and isinstance(returned, Value):
                aliases.update((index, operand) for operand in operands.get(roots[returned], ()))
            if isinstance(type, TensorType) and call.op.startswith(f"{HOP}while_loop"):
                # A loop without iterations returns its initial values.
                aliases.update((index, operand) for initial in given[place : place + 1] for operand in initial)
    return Effects(writes=tuple(sorted(writes)), aliases=tuple(sorted(aliases)), **found)


def _given(call: Call) -> list[list[int]]:
    """Inputs of the subgraphs, in order: the position of each operand after the last subgraph; none for a literal."""
    last = max((i for i, arg in enumerate(call.args) if isinstance(arg, GraphRef)), default=-1)
    given = leaves(call.args[last + 1 :], Value, int, float, sympy.Expr)
    position = itertools.count(sum(1 for _ in values_in(call.args[: last + 1])))
    return [[next(position)] if isinstance(leaf, Value) else [] for leaf in given]
