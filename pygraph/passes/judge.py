"""The judgement of one node: capturable or not, with a reason code and a sentence. Data, never an exception.

A list of rules, the first of which to object wins. ``legality`` applies them to a graph, ``placement`` again to nodes
that it changed. Codes are explained in ``reasons``, names listed in ``operators``, devices judged in ``judge_devices``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pygraph.ir import (
    TAGS,
    Arg,
    DType,
    KernelNode,
    OpaqueType,
    TensorType,
    Token,
    Value,
    base_name,
    graph_refs_in,
    sources,
    values_in,
)
from pygraph.passes.judge_devices import device_copies, device_operands, device_random
from pygraph.passes.operators import dropout_place, higher_order, is_custom, known_unsafe
from pygraph.passes.verdict import CAPTURED, FAILED, Target, Verdict

__all__ = ["judge"]

Rule = Callable[[KernelNode, Target], "Verdict | None"]


def judge(node: KernelNode, target: Target) -> Verdict:
    """Whether ``node`` may be part of a captured region of ``target``.

    Judged by itself: operator, operands, effects and tags. What the rest of the graph needs is partitioning's business.
    """
    for rule in _RULES:
        objection = rule(node, target)
        if objection is not None:
            return objection
    return CAPTURED


def _failed(node: KernelNode, _: Target) -> Verdict | None:
    """What was tried already."""
    met = node.meta.get(FAILED)
    return None if met is None else Verdict(False, "failed-capture", f"{node.op} was tried: {met}")


# -- names -----------------------------------------------------------------------------------------------------------


def _by_name(node: KernelNode, target: Target) -> Verdict | None:
    forbidden = (_forbidden(op, target) for op, _ in sources(node))
    return next(filter(None, forbidden), None) or _named(node, node.op, target)


def _forbidden(op: str, target: Target) -> Verdict | None:
    if op in target.forbid or base_name(op) in target.forbid:
        return Verdict(False, "forbidden", f"{op} is named by the option 'forbid'")
    return None


def _named(node: KernelNode, op: str, target: Target) -> Verdict | None:
    entry = known_unsafe(op)
    if entry is None or (entry.accelerator and target.device.is_host):
        return None
    return Verdict(False, entry.code, f"{op} {entry.why}: {_names(node.inputs)}")


def _higher_order(node: KernelNode, target: Target) -> Verdict | None:
    if not node.op.startswith("hop."):
        return None
    entry = higher_order(node.op)
    if entry is not None:
        return Verdict(False, entry.code, f"{node.op} {entry.why}: {_names(node.inputs)}")
    return _inner_operator(node, target) or _inner_nodes(node, target)


def _inner_operator(node: KernelNode, target: Target) -> Verdict | None:
    """The operator that a higher-order one is handed as its first argument, as ``auto_functionalized`` is."""
    first = node.args[0] if node.args else None
    if not isinstance(first, Token):
        return None
    inner = _forbidden(first.name, target) or _named(node, first.name, target) or _custom(first.name, target)
    return inner and replace(inner, detail=f"{node.op} runs an operator: {inner.detail}")


def _inner_nodes(node: KernelNode, target: Target) -> Verdict | None:
    for name in (reference.name for reference in graph_refs_in((*node.args, *node.attrs.values()))):
        graph = target.subgraphs.get(name)
        if graph is None:
            return Verdict(False, "subgraph", f"{node.op} runs the subgraph @{name}, which is not there")
        for inner in graph.nodes:
            verdict = judge(inner, target.within(graph))
            if not verdict.capturable:
                return Verdict(False, "subgraph", f"{node.op} runs %{inner.name} of @{name}: {verdict.detail}")
    return None


def _custom_operator(node: KernelNode, target: Target) -> Verdict | None:
    return _custom(node.op, target)


def _custom(op: str, target: Target) -> Verdict | None:
    """The host driver replays an operator by calling it: nothing is gained, and the comparison calls it once more."""
    if not target.device.is_host or not is_custom(op):
        return None
    return Verdict(False, "opaque-operator", f"{op} may do more than its schema says")


# -- tags, effects, operands that are no tensors -------------------------------------------------------------------


def _tagged(node: KernelNode, _: Target) -> Verdict | None:
    tags = (node.meta.get(TAGS) or "").split(",")
    if "cudagraph_unsafe" in tags:
        return Verdict(False, "cudagraph-unsafe-tag", f"{node.op} has the tag cudagraph_unsafe")
    if "data_dependent_output" in tags:
        return Verdict(False, "host-read", f"{node.op} reads {_names(node.inputs)} on the host")
    return None


def _affected(node: KernelNode, _: Target) -> Verdict | None:
    effects = node.effects
    if effects.collective is not None:
        return Verdict(False, "collective", f"{node.op} is a collective of group {effects.collective}")
    if effects.dynamic:
        return Verdict(False, "dynamic-shape", f"the shape of {_names(node.outputs)} depends on {_names(node.inputs)}")
    if effects.sync:
        return Verdict(False, "host-read", f"{node.op} makes the host wait for {_names(node.inputs)}")
    if effects.barrier:
        return Verdict(False, "barrier", f"{node.op} keeps its place among all other nodes")
    return None


def _opaque(node: KernelNode, target: Target) -> Verdict | None:
    for value in (*node.inputs, *node.outputs):
        if not isinstance(value.type, OpaqueType) or _is_packed(value.type, target):
            continue
        if "Generator" in value.type.name:
            return Verdict(False, "generator-argument", f"{node.op} draws from the generator %{value.name}")
        verb = "returns" if value in node.outputs else "takes"
        return Verdict(False, "opaque-operand", f"{node.op} {verb} %{value.name}, a {value.type.name}")
    return None


def _is_packed(type: OpaqueType, target: Target) -> bool:
    """Weights that oneDNN has packed: the host driver keeps them as they are."""
    return target.device.is_host and type.name.startswith("tensor._mkldnn")


def _names(values: tuple[Value, ...]) -> str:
    shown = [f"%{value.name}" for value in dict.fromkeys(values)]
    return ", ".join(shown[:3]) + (" …" if len(shown) > 3 else "") if shown else "no operand"


# -- operators that depend on their arguments ------------------------------------------------------------------------


def _by_arguments(node: KernelNode, target: Target) -> Verdict | None:
    rule = _ARGUMENT_RULES.get(base_name(node.op))
    return rule(node, target) if rule else None


def _argument(node: KernelNode, index: int, name: str) -> Arg:
    return node.attrs.get(name, node.args[index] if index < len(node.args) else None)


def _mask_read(node: KernelNode, _: Target) -> Verdict | None:
    """Reading by a mask gives as many elements as the mask has ones."""
    mask = next(_masks(node), None)
    if mask is None:
        return None
    return Verdict(False, "dynamic-shape", f"the shape of {_names(node.outputs)} depends on the mask %{mask.name}")


def _mask_written(node: KernelNode, target: Target) -> Verdict | None:
    """Writing by a mask looks for its ones first; Inductor turns one mask and one value into a ``where``."""
    mask = next(_masks(node), None)
    if mask is None or target.device.is_host or _is_masked_fill(node):
        return None
    return Verdict(False, "host-read", f"{node.op} makes the host wait for the mask %{mask.name}")


def _is_masked_fill(node: KernelNode) -> bool:
    values = _argument(node, 2, "values")
    single = isinstance(values, Value) and isinstance(values.type, TensorType) and values.type.numel == 1
    indices = _argument(node, 1, "indices")
    return single and isinstance(indices, tuple) and len(indices) == 1


def _masks(node: KernelNode) -> Iterator[Value]:
    for value in values_in(_argument(node, 1, "indices")):
        if isinstance(value.type, TensorType) and value.type.dtype in (DType.B8, DType.U8):
            yield value


def _counted(node: KernelNode, _: Target) -> Verdict | None:
    if "self" in node.op or _argument(node, 1, "output_size") is not None:
        return None
    return Verdict(False, "dynamic-shape", f"the shape of {_names(node.outputs)} depends on {_names(node.inputs)}")


def _measured_range(node: KernelNode, target: Target) -> Verdict | None:
    low, high = _argument(node, 2, "min") or 0, _argument(node, 3, "max") or 0
    if target.device.is_host or low != high:
        return None
    return Verdict(False, "host-read", f"{node.op} reads the range of {_names(node.inputs[:1])} on the host")


def _checked_lengths(node: KernelNode, target: Target) -> Verdict | None:
    if target.device.is_host or node.attrs.get("unsafe") is True:
        return None
    return Verdict(False, "host-read", f"{node.op} checks lengths on the host")


def _own_random_state(node: KernelNode, _: Target) -> Verdict | None:
    state = _argument(node, 15, "dropout_state")
    if not isinstance(state, Value):
        return None
    return Verdict(False, "rng-state", f"{node.op} keeps random state of its own in %{state.name}")


def _attention_dropout(node: KernelNode, target: Target) -> Verdict | None:
    """Fused attention that drops something gives its seed and offset back for its backward."""
    place = dropout_place(node.op)
    if place is None or target.device.is_host:
        return None
    dropped = _argument(node, place, "dropout_p")
    if dropped is None or (isinstance(dropped, (int, float)) and dropped == 0):
        return None
    shown = f"drops out {dropped:g} of its weights" if isinstance(dropped, (int, float)) else "may drop out weights"
    where = "its random state lies on the CPU outside of a capture and on the device inside one"
    return Verdict(False, "attention-dropout", f"{node.op} {shown}: {where}")


_ARGUMENT_RULES: dict[str, Rule] = {
    "aten.index": _mask_read,
    "aten._unsafe_index": _mask_read,
    "aten.index_put": _mask_written,
    "aten.index_put_": _mask_written,
    "aten._unsafe_index_put": _mask_written,
    "aten.repeat_interleave": _counted,
    "aten.histc": _measured_range,
    "aten.segment_reduce": _checked_lengths,
    "aten._cudnn_rnn": _own_random_state,
}

_RULES: tuple[Rule, ...] = (
    _failed,
    _by_name,
    _higher_order,
    _tagged,
    device_copies,
    _by_arguments,
    _attention_dropout,
    _affected,
    _opaque,
    _custom_operator,
    device_random,
    device_operands,
)
"""In order. Devices come last: who objects to a CPU operand has no other objection, once placement has moved that."""
