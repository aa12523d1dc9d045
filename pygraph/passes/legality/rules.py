"""The judgement of one node: capturable or not, with a reason code and a sentence. Data, never an exception.

A table of rules, each a function of a node and of the target that is captured; the first that objects wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pygraph.ir import (
    CAPTURABLE,
    CONSTANT,
    DETAIL,
    REASON,
    TAGS,
    UPLOAD,
    Arg,
    Device,
    Graph,
    KernelNode,
    MetaKey,
    OpaqueType,
    TensorType,
    Token,
    Value,
    base_name,
    graph_refs_in,
    sources,
)
from pygraph.passes.legality.operators import dropout_place, higher_order, is_custom, known_unsafe

__all__ = [
    "FAILED",
    "Objection",
    "Target",
    "annotate",
    "captured_device",
    "copy_source",
    "devices_of",
    "is_on_host",
    "judge",
    "target_of",
]

FAILED = MetaKey("failed", str)
"""Node: what was met when its region was captured; set before the passes run, where a capture failed for the node."""

META = "meta"
"""Tensors without memory: attention returns its random state so, as it cannot know yet whether it is captured."""


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a node cannot be captured: the code of the reason, and the sentence that names the operand."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Target:
    """What is captured: work on ``device``, where an index of None means any device of the kind.

    ``forbid`` names operators (with or without overload) that stay out; ``subgraphs`` are those that nodes refer to.
    """

    device: Device
    forbid: tuple[str, ...] = ()
    subgraphs: Mapping[str, Graph] = field(default_factory=dict)

    def within(self, graph: Graph) -> Target:
        """The same target for the nodes of a subgraph, which may refer to subgraphs of its own."""
        return replace(self, subgraphs={**self.subgraphs, **graph.subgraphs})

    def includes(self, device: Device) -> bool:
        """Whether ``device`` is the captured one. No index means the current device, which is taken to be it."""
        same_kind = device.kind == self.device.kind
        return same_kind and (device.index == self.device.index or None in (device.index, self.device.index))


def captured_device(graph: Graph) -> str:
    """The kind of device whose work is captured: ``cuda`` when the graph touches one, else ``cpu``."""
    kinds = {value.type.device.kind for value in graph.values() if isinstance(value.type, TensorType)}
    return "cuda" if "cuda" in kinds else "cpu"


def target_of(graph: Graph, kind: str, forbid: tuple[str, ...] = ()) -> Target:
    """The target for a whole graph: the device of that ``kind`` that most nodes compute on, the first one of equals."""
    used = Counter(device for node in graph.nodes for device in devices_of(node.outputs) if device.kind == kind)
    used = used or Counter(device for device in devices_of(graph.inputs) if device.kind == kind)
    home = next((device for device, _ in used.most_common() if device.index is not None), Device(kind))
    return Target(home, forbid, dict(graph.subgraphs))


def device_of(value: Value) -> Device | None:
    """The device of ``value``, or None when it has no memory."""
    type = value.type
    return type.device if isinstance(type, TensorType) and type.device.kind != META else None


def devices_of(values: Iterable[Value]) -> Iterator[Device]:
    """The device of each value that has memory, in order, with repetitions."""
    for value in values:
        device = device_of(value)
        if device is not None:
            yield device


Rule = Callable[[KernelNode, Target], "Objection | None"]


def judge(node: KernelNode, target: Target) -> Objection | None:
    """Why ``node`` cannot be part of a captured region of ``target``; None where it can.

    A node is judged by itself: operator, operands, effects and tags.
    """
    return next(filter(None, (rule(node, target) for rule in _RULES)), None)


def annotate(node: KernelNode, target: Target) -> bool:
    """Judge ``node`` and write what was found on it; return whether that differs from what stood there."""
    before = node.meta.copy()
    objection = judge(node, target)
    node.meta.set(CAPTURABLE, objection is None)
    node.meta.drop(REASON)
    node.meta.drop(DETAIL)
    if objection is not None:
        node.meta.set(REASON, objection.code)
        node.meta.set(DETAIL, objection.detail)
    return node.meta != before


# -- the rules -------------------------------------------------------------------------------------------------------


def _failed(node: KernelNode, _: Target) -> Objection | None:
    """What was tried already."""
    met = node.meta.get(FAILED)
    return None if met is None else Objection("failed-capture", f"{node.op} was tried: {met}")


# -- names -----------------------------------------------------------------------------------------------------------


def _by_name(node: KernelNode, target: Target) -> Objection | None:
    forbidden = (_forbidden(op, target) for op, _ in sources(node))
    return next(filter(None, forbidden), None) or _named(node, node.op, target)


def _forbidden(op: str, target: Target) -> Objection | None:
    if op in target.forbid or base_name(op) in target.forbid:
        return Objection("forbidden", f"{op} is named by the option 'forbid'")
    return None


def _named(node: KernelNode, op: str, target: Target) -> Objection | None:
    entry = known_unsafe(op)
    if entry is None or (entry.accelerator and target.device.is_host):
        return None
    return Objection(entry.code, f"{op} {entry.why}: {_names(node.inputs)}")


def _higher_order(node: KernelNode, target: Target) -> Objection | None:
    if not node.op.startswith("hop."):
        return None
    entry = higher_order(node.op)
    if entry is not None:
        return Objection(entry.code, f"{node.op} {entry.why}: {_names(node.inputs)}")
    return _inner_operator(node, target) or _inner_nodes(node, target)


def _inner_operator(node: KernelNode, target: Target) -> Objection | None:
    """The operator that a higher-order one is handed as its first argument, as ``auto_functionalized`` is."""
    first = node.args[0] if node.args else None
    if not isinstance(first, Token):
        return None
    inner = _forbidden(first.name, target) or _named(node, first.name, target) or _custom(first.name, target)
    return inner and replace(inner, detail=f"{node.op} runs an operator: {inner.detail}")


def _inner_nodes(node: KernelNode, target: Target) -> Objection | None:
    for name in (reference.name for reference in graph_refs_in((*node.args, *node.attrs.values()))):
        graph = target.subgraphs.get(name)
        if graph is None:
            return Objection("subgraph", f"{node.op} runs the subgraph @{name}, which is not there")
        for inner in graph.nodes:
            objection = judge(inner, target.within(graph))
            if objection is not None:
                return Objection("subgraph", f"{node.op} runs %{inner.name} of @{name}: {objection.detail}")
    return None


def _custom_operator(node: KernelNode, target: Target) -> Objection | None:
    return _custom(node.op, target)


def _custom(op: str, target: Target) -> Objection | None:
    """The host driver replays an operator by calling it: nothing is gained, and the comparison calls it once more."""
    if not target.device.is_host or not is_custom(op):
        return None
    return Objection("opaque-operator", f"{op} may do more than its schema says")


# -- tags, effects, operands that are no tensors -------------------------------------------------------------------


def _tagged(node: KernelNode, _: Target) -> Objection | None:
    if "cudagraph_unsafe" not in (node.meta.get(TAGS) or "").split(","):
        return None
    return Objection("cudagraph-unsafe-tag", f"{node.op} has the tag cudagraph_unsafe")


def _affected(node: KernelNode, _: Target) -> Objection | None:
    effects = node.effects
    if effects.collective is not None:
        return Objection("collective", f"{node.op} is a collective of group {effects.collective}")
    if effects.dynamic:
        return Objection("dynamic-shape", f"the shape of {_names(node.outputs)} depends on {_names(node.inputs)}")
    if effects.sync:
        return Objection("host-read", f"{node.op} makes the host wait for {_names(node.inputs)}")
    if effects.barrier:
        return Objection("barrier", f"{node.op} keeps its place among all other nodes")
    return None


def _opaque(node: KernelNode, target: Target) -> Objection | None:
    for value in (*node.inputs, *node.outputs):
        if not isinstance(value.type, OpaqueType) or _is_packed(value.type, target):
            continue
        if "Generator" in value.type.name:
            return Objection("generator-argument", f"{node.op} draws from the generator %{value.name}")
        verb = "returns" if value in node.outputs else "takes"
        return Objection("opaque-operand", f"{node.op} {verb} %{value.name}, a {value.type.name}")
    return None


def _is_packed(type: OpaqueType, target: Target) -> bool:
    """Weights that oneDNN has packed: the host driver keeps them as they are."""
    return target.device.is_host and type.name.startswith("tensor._mkldnn")


def _names(values: tuple[Value, ...]) -> str:
    shown = [f"%{value.name}" for value in dict.fromkeys(values)]
    return ", ".join(shown[:3]) + (" …" if len(shown) > 3 else "") if shown else "no operand"


# -- operators that depend on their arguments ------------------------------------------------------------------------


def _by_arguments(node: KernelNode, target: Target) -> Objection | None:
    rule = _ARGUMENT_RULES.get(base_name(node.op))
    return rule(node, target) if rule else None


def _argument(node: KernelNode, index: int, name: str) -> Arg:
    return node.attrs.get(name, node.args[index] if index < len(node.args) else None)


def _measured_range(node: KernelNode, target: Target) -> Objection | None:
    low, high = _argument(node, 2, "min") or 0, _argument(node, 3, "max") or 0
    if target.device.is_host or low != high:
        return None
    return Objection("host-read", f"{node.op} reads the range of {_names(node.inputs[:1])} on the host")


def _checked_lengths(node: KernelNode, target: Target) -> Objection | None:
    if target.device.is_host or node.attrs.get("unsafe") is True:
        return None
    return Objection("host-read", f"{node.op} checks lengths on the host")


def _own_random_state(node: KernelNode, _: Target) -> Objection | None:
    state = _argument(node, 15, "dropout_state")
    if not isinstance(state, Value):
        return None
    return Objection("rng-state", f"{node.op} keeps random state of its own in %{state.name}")


def _attention_dropout(node: KernelNode, target: Target) -> Objection | None:
    """Fused attention that drops something gives its seed and offset back for its backward."""
    place = dropout_place(node.op)
    if place is None or target.device.is_host:
        return None
    dropped = _argument(node, place, "dropout_p")
    if dropped is None or (isinstance(dropped, (int, float)) and dropped == 0):
        return None
    shown = f"drops out {dropped:g} of its weights" if isinstance(dropped, (int, float)) else "may drop out weights"
    where = "its random state lies on the CPU outside of a capture and on the device inside one"
    return Objection("attention-dropout", f"{node.op} {shown}: {where}")


# -- devices ---------------------------------------------------------------------------------------------------------

_COPIES = {
    "aten._copy_from": 0,
    "aten._to_copy": 0,
    "aten.copy": 1,
    "aten.copy_": 1,
    "aten.to": 0,
    "prims.copy_to": 1,
    "prims.device_put": 0,
    base_name(UPLOAD): 0,
}
"""Operators that copy between devices when their operands or results say so, with the place of the source."""


def copy_source(node: KernelNode) -> Value | None:
    """What a copying operator copies (the first of several), or None for any other operator."""
    place = _COPIES.get(base_name(node.op))
    return None if place is None or place >= len(node.inputs) else node.inputs[place]


def _device_copies(node: KernelNode, _: Target) -> Objection | None:
    """A copy between the host and another device."""
    source = copy_source(node)
    if source is None or _is_folded(node):
        return None
    touched = list(dict.fromkeys((*devices_of((source,)), *devices_of(node.inputs), *devices_of(node.outputs))))
    if len({device.is_host for device in touched}) < 2:
        return None
    origin = touched[0]
    goal = next(device for device in touched if device.is_host != origin.is_host)
    return Objection("device-copy", f"{node.op} copies %{source.name} from {origin} to {goal}")


def _is_folded(node: KernelNode) -> bool:
    """A constant put on a device: Inductor (``DeviceCopy.create``) makes it a constant there, and nothing is copied."""
    source = node.inputs[0] if base_name(node.op) == "prims.device_put" else None
    if source is None or source.producer is None or source.producer.op != CONSTANT:
        return False
    touching = (user for user in source.users if user.effects.writes or user.effects.aliases)
    return not any(source in user.inputs for user in touching)


def _device_operands(node: KernelNode, target: Target) -> Objection | None:
    """Operands and results on anything but the captured device. Without tensors nothing is launched: no objection."""
    values = (*node.inputs, *node.outputs)
    foreign = next((v for v in values if _on_other_kind(v, target)), None)
    if foreign is not None:
        return Objection("unsupported-device", f"{node.op} has %{foreign.name} on {device_of(foreign)}")
    elsewhere = next((v for v in values if _on_other_index(v, target)), None)
    if elsewhere is not None:
        text = f"{node.op} has %{elsewhere.name} on {device_of(elsewhere)}, and the graph computes on {target.device}"
        return Objection("multi-device", text)
    if target.device.is_host or _is_folded(node):
        return None
    return _host_operands(node)


def _host_operands(node: KernelNode) -> Objection | None:
    on_host = [value for value in dict.fromkeys((*node.inputs, *node.outputs)) if is_on_host(value)]
    if not on_host:
        return None
    if all(device.is_host for device in devices_of((*node.inputs, *node.outputs))):
        return Objection("cpu-operator", f"{node.op} runs on the CPU: %{on_host[0].name} is there")
    returned = next((value for value in on_host if value in node.outputs), None)
    if returned is not None:
        return Objection("device-copy", f"{node.op} returns %{returned.name} on the CPU")
    array = next((v for v in on_host if isinstance(v.type, TensorType) and v.type.shape), None)
    if array is not None:
        return Objection("cpu-operand", f"{node.op} takes %{array.name}, a tensor on the CPU")
    return Objection("cpu-scalar", f"{node.op} takes %{on_host[0].name}, a CPU tensor of no dimensions")


def _device_random(node: KernelNode, target: Target) -> Objection | None:
    """A draw from another device's generator, in a node that works on the captured device."""
    rng = node.effects.rng
    if rng is None or target.includes(Device.parse(rng)):
        return None
    if not any(target.includes(device) for device in devices_of((*node.inputs, *node.outputs))):
        return None
    return Objection("stochastic", f"{node.op} draws from the generator of {rng}")


def is_on_host(value: Value) -> bool:
    """Whether ``value`` is memory that the CPU reads without a copy."""
    device = device_of(value)
    return device is not None and device.is_host


def _on_other_kind(value: Value, target: Target) -> bool:
    device = device_of(value)
    return device is not None and device.kind not in ("cpu", target.device.kind)


def _on_other_index(value: Value, target: Target) -> bool:
    device = device_of(value)
    return device is not None and not device.is_host and not target.includes(device)


# -- the rules, in order ---------------------------------------------------------------------------------------------

_ARGUMENT_RULES: dict[str, Rule] = {
    "aten.histc": _measured_range,
    "aten.segment_reduce": _checked_lengths,
    "aten._cudnn_rnn": _own_random_state,
}

_RULES: tuple[Rule, ...] = (
    _failed,
    _by_name,
    _higher_order,
    _tagged,
    _device_copies,
    _by_arguments,
    _attention_dropout,
    _affected,
    _opaque,
    _custom_operator,
    _device_random,
    _device_operands,
)
"""In order. Devices come last: who objects to a CPU operand has no other objection, once placement has moved that."""
