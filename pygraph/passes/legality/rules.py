"""The judgement of one node: capturable or not, with a reason code and a sentence. Data, never an exception."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from pygraph.ir import (
    CAPTURABLE,
    CONSTANT,
    DETAIL,
    EAGER,
    REASON,
    TAGS,
    UPLOAD,
    Arg,
    Device,
    Graph,
    GraphRef,
    KernelNode,
    OpaqueType,
    TensorType,
    Token,
    Value,
    base_name,
    leaves,
    sources,
)
from pygraph.passes.legality.known import dropout_place, is_custom, known_unsafe


class Objection(NamedTuple):
    """Reason why a node cannot be captured: its code, and a sentence that names the operand. If ``eager``, a region may
    still call the node between two segments."""

    code: str
    detail: str
    eager: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """The target of captures: work on ``device``, where an index of None means any device of the kind.

    ``forbid`` names operators (with or without overload) to refuse; ``subgraphs`` are the subgraphs that nodes name.
    """

    device: Device
    forbid: tuple[str, ...] = ()
    subgraphs: Mapping[str, Graph] = field(default_factory=dict)

    def within(self, graph: Graph) -> Target:
        """This target for the nodes of a subgraph, which may refer to subgraphs of its own."""
        return replace(self, subgraphs={**self.subgraphs, **graph.subgraphs})

    def includes(self, device: Device) -> bool:
        """True if ``device`` is the captured one. A device without an index is assumed to be the captured one."""
        same_kind = device.kind == self.device.kind
        return same_kind and (device.index == self.device.index or None in (device.index, self.device.index))


def captured_device(graph: Graph) -> str:
    """The kind of device whose work is captured: ``cuda`` if a value of the graph is on one, else ``cpu``."""
    kinds = {value.type.device.kind for value in graph.values() if isinstance(value.type, TensorType)}
    return "cuda" if "cuda" in kinds else "cpu"


def target_of(graph: Graph, kind: str, forbid: tuple[str, ...] = ()) -> Target:
    """The target for a whole graph: the device of that ``kind`` with most results of nodes; on a tie, the first."""
    used = Counter(device for node in graph.nodes for device in devices_of(node.outputs) if device.kind == kind)
    used = used or Counter(device for device in devices_of(graph.inputs) if device.kind == kind)
    home = next((device for device, _ in used.most_common() if device.index is not None), Device(kind))
    return Target(home, forbid, dict(graph.subgraphs))


def annotate(node: KernelNode, target: Target) -> bool:
    """Judge ``node`` and annotate it with the verdict; return true if its annotations changed.

    A node is judged by itself: operator, operands, effects and tags. The first objection counts. Devices come last: if
    the reason is a CPU operand, no other objection is left once placement has moved that operand.
    """
    before = node.meta.copy()
    objections = list(_objections(node, target))
    node.meta.set(CAPTURABLE, not objections)
    node.meta.drop(REASON, DETAIL, EAGER)
    if objections:
        node.meta.set(REASON, objections[0].code)
        node.meta.set(DETAIL, objections[0].detail)
        if all(objection.eager for objection in objections) and _returns_tensors(node):
            node.meta.set(EAGER, True)
    return node.meta != before


def _returns_tensors(node: KernelNode) -> bool:
    return all(isinstance(value.type, TensorType) for value in node.outputs)


def _objections(node: KernelNode, target: Target) -> Iterator[Objection]:
    for op, *_ in sources(node):
        yield from _forbidden(op, target)
    yield from _known(node, node.op, target)
    if node.op.startswith("hop."):
        yield from _inner(node, target)
        yield from _decided(node, target)
    if "cudagraph_unsafe" in (node.meta.get(TAGS) or "").split(","):
        yield Objection("cudagraph-unsafe-tag", f"{node.op} has the tag cudagraph_unsafe", eager=True)
    yield from _device_copies(node)
    if not target.device.is_host:
        yield from _by_arguments(node)
    yield from _affected(node)
    yield from _opaque(node, target)
    yield from _custom(node.op, target)
    yield from _device_random(node, target)
    yield from _device_operands(node, target)


# -- operators -------------------------------------------------------------------------------------------------------


def _forbidden(op: str, target: Target) -> Iterator[Objection]:
    if op in target.forbid or base_name(op) in target.forbid:
        named = f"{op} is named by the option 'forbid'"
        yield Objection("forbidden", named, eager=is_custom(op))  # Inductor computes its own in kernels of any names


def _known(node: KernelNode, op: str, target: Target) -> Iterator[Objection]:
    entry = known_unsafe(op)
    if entry is not None and not (entry.accelerator and target.device.is_host):
        yield Objection(entry.code, f"{op} {entry.why}: {_names(node.inputs)}", entry.eager)


def _custom(op: str, target: Target) -> Iterator[Objection]:
    """Custom operators on the CPU: a replay would call them, which gains nothing, and a comparison once more."""
    if target.device.is_host and is_custom(op):
        yield Objection("opaque-operator", f"{op} may do more than its schema says", eager=True)


def _inner(node: KernelNode, target: Target) -> Iterator[Objection]:
    """The operator in the first argument of a higher-order operator (``auto_functionalized``), and its subgraphs."""
    if node.args and isinstance(node.args[0], Token):
        op = node.args[0].name
        for found in chain(_forbidden(op, target), _known(node, op, target), _custom(op, target)):
            yield Objection(found.code, f"{node.op} runs an operator: {found.detail}", found.eager)
    for reference in leaves((*node.args, *node.attrs.values()), GraphRef):
        graph = target.subgraphs.get(reference.name)
        if graph is None:
            yield Objection("subgraph", f"{node.op} runs the subgraph @{reference.name}, which is not there")
            continue
        for inner in graph.nodes:
            for found in _objections(inner, target.within(graph)):
                yield Objection("subgraph", f"{node.op} runs %{inner.name} of @{reference.name}: {found.detail}")


def _decided(node: KernelNode, target: Target) -> Iterator[Objection]:
    """Bodies that the device selects. The host must know how far generators advance, so bodies must not draw. Before a
    capture, bodies run on zeros, which could make an assertion fail."""
    if node.op not in ("hop.cond", "hop.while_loop"):
        return
    if node.effects.rng is not None:
        yield Objection("control-flow", f"{node.op} draws random numbers, as often as the data says")
    for reference in leaves((*node.args, *node.attrs.values()), GraphRef):
        graph = target.subgraphs.get(reference.name)
        if graph is not None and any("assert" in inner.op for inner in graph.nodes):
            yield Objection("control-flow", f"{node.op} asserts something of data")


def _by_arguments(node: KernelNode) -> Iterator[Objection]:
    """Operators that some arguments keep from being captured. The CPU can replay them with any arguments."""
    base, dropout, state = base_name(node.op), dropout_place(node.op), _argument(node, 15, "dropout_state")
    if base == "aten.histc" and (_argument(node, 2, "min") or 0) == (_argument(node, 3, "max") or 0):
        yield Objection("host-read", f"{node.op} reads the range of {_names(node.inputs[:1])} on the host")
    if base == "aten.segment_reduce" and node.attrs.get("unsafe") is not True:
        yield Objection("host-read", f"{node.op} checks lengths on the host")
    if base == "aten._cudnn_rnn" and isinstance(state, Value):
        yield Objection("rng-state", f"{node.op} keeps random state of its own in %{state.name}")
    if dropout is None:
        return
    dropped = _argument(node, dropout, "dropout_p")
    is_number = isinstance(dropped, (int, float))
    if dropped is not None and not (is_number and dropped == 0):
        shown = f"drops out {dropped:g} of its weights" if is_number else "may drop out weights"
        where = "its random state lies on the CPU outside of a capture and on the device inside one"
        yield Objection("attention-dropout", f"{node.op} {shown}: {where}")


def _argument(node: KernelNode, index: int, name: str) -> Arg:
    return node.attrs.get(name, node.args[index] if index < len(node.args) else None)


def _names(values: tuple[Value, ...]) -> str:
    shown = [f"%{value.name}" for value in dict.fromkeys(values)]
    return ", ".join(shown[:3]) + (" …" if len(shown) > 3 else "") if shown else "no operand"


# -- effects, operands that are no tensors -----------------------------------------------------------------------------


def _affected(node: KernelNode) -> Iterator[Objection]:
    effects = node.effects
    if effects.collective is not None:
        known = known_unsafe(node.op)
        told = f"{node.op} is a collective of group {effects.collective}"
        yield Objection("collective", told, eager=known is not None and known.eager)
    if effects.dynamic:
        yield Objection("dynamic-shape", f"the shape of {_names(node.outputs)} depends on {_names(node.inputs)}")
    if effects.sync:
        yield Objection("host-read", f"{node.op} makes the host wait for {_names(node.inputs)}")
    if effects.barrier:
        yield Objection("barrier", f"{node.op} keeps its place among all other nodes")


def _opaque(node: KernelNode, target: Target) -> Iterator[Objection]:
    for value in (*node.inputs, *node.outputs):
        if not isinstance(value.type, OpaqueType):
            continue
        if target.device.is_host and value.type.name.startswith("tensor._mkldnn"):
            continue  # weights that oneDNN has packed: the host driver keeps them as they are
        if "Generator" in value.type.name:
            yield Objection("generator-argument", f"{node.op} draws from the generator %{value.name}")
        verb = "returns" if value in node.outputs else "takes"
        yield Objection("opaque-operand", f"{node.op} {verb} %{value.name}, a {value.type.name}")


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
"""Operators that copy between devices if their operands and results are on several, with the index of the source."""


def device_of(value: Value) -> Device | None:
    """The device of ``value``, or None if it has no memory: attention returns its random state on ``meta``, since it
    does not know yet whether it will be captured."""
    type = value.type
    return type.device if isinstance(type, TensorType) and type.device.kind != "meta" else None


def devices_of(values: Iterable[Value]) -> Iterator[Device]:
    """The device of each value that has memory, in order, with repetitions."""
    return (device for device in map(device_of, values) if device is not None)


def is_on_host(value: Value) -> bool:
    """True if ``value`` is memory that the CPU can read without a copy."""
    device = device_of(value)
    return device is not None and device.is_host


def copy_source(node: KernelNode) -> Value | None:
    """The source of a copy operator (the first of several), or None for any other operator."""
    place = _COPIES.get(base_name(node.op))
    return None if place is None or place >= len(node.inputs) else node.inputs[place]


def _device_copies(node: KernelNode) -> Iterator[Objection]:
    """A copy between the host and another device."""
    source = copy_source(node)
    if source is None or _is_folded(node):
        return
    touched = list(devices_of((source, *node.inputs, *node.outputs)))
    goal = next((device for device in touched if device.is_host != touched[0].is_host), None)
    if goal is not None:
        yield Objection("device-copy", f"{node.op} copies %{source.name} from {touched[0]} to {goal}")


def _is_folded(node: KernelNode) -> bool:
    """True for a constant put on a device: Inductor (``DeviceCopy.create``) makes a constant there, copying nothing."""
    source = node.inputs[0] if base_name(node.op) == "prims.device_put" else None
    if source is None or source.producer is None or source.producer.op != CONSTANT:
        return False
    return not any(user.effects.writes or user.effects.aliases for user in source.users)


def _device_operands(node: KernelNode, target: Target) -> Iterator[Objection]:
    """Operands and results outside the captured device. A node without tensors launches nothing: no objection."""
    values = {value: device for value in (*node.inputs, *node.outputs) if (device := device_of(value)) is not None}
    for value, device in values.items():
        if device.kind not in ("cpu", target.device.kind):
            yield Objection("unsupported-device", f"{node.op} has %{value.name} on {device}")
    for value, device in values.items():
        if not device.is_host and not target.includes(device):
            text = f"{node.op} has %{value.name} on {device}, and the graph computes on {target.device}"
            yield Objection("multi-device", text)
    on_host = [value for value, device in values.items() if device.is_host]
    if not on_host or target.device.is_host or _is_folded(node):
        return
    if len(on_host) == len(values):
        yield Objection("cpu-operator", f"{node.op} runs on the CPU: %{on_host[0].name} is there")
    for value in on_host:
        if value in node.outputs:
            yield Objection("device-copy", f"{node.op} returns %{value.name} on the CPU")
    for value in on_host:
        if isinstance(value.type, TensorType) and value.type.shape:
            yield Objection("cpu-operand", f"{node.op} takes %{value.name}, a tensor on the CPU")
    yield Objection("cpu-scalar", f"{node.op} takes %{on_host[0].name}, a CPU tensor of no dimensions")


def _device_random(node: KernelNode, target: Target) -> Iterator[Objection]:
    """A draw from the generator of another device, in a node that works on the captured device."""
    rng = node.effects.rng
    if rng is None or target.includes(Device.parse(rng)):
        return
    if any(target.includes(device) for device in devices_of((*node.inputs, *node.outputs))):
        yield Objection("stochastic", f"{node.op} draws from the generator of {rng}")
