"""The part of the judgement that is about devices: copies between them, CPU operands, foreign devices and generators.

Other rules live in ``judge``.
"""

from __future__ import annotations

from pygraph.ir import CONSTANT, UPLOAD, Device, KernelNode, TensorType, Value, base_name
from pygraph.passes.verdict import Target, Verdict, device_of, devices_of

__all__ = ["copy_source", "device_copies", "device_operands", "device_random", "is_on_host"]

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


def device_copies(node: KernelNode, _: Target) -> Verdict | None:
    """A copy between the host and another device."""
    source = copy_source(node)
    if source is None or _is_folded(node):
        return None
    touched = list(dict.fromkeys((*devices_of((source,)), *devices_of(node.inputs), *devices_of(node.outputs))))
    if len({device.is_host for device in touched}) < 2:
        return None
    origin = touched[0]
    goal = next(device for device in touched if device.is_host != origin.is_host)
    return Verdict(False, "device-copy", f"{node.op} copies %{source.name} from {origin} to {goal}")


def _is_folded(node: KernelNode) -> bool:
    """A constant put on a device: Inductor (``DeviceCopy.create``) makes it a constant there, and nothing is copied."""
    source = node.inputs[0] if base_name(node.op) == "prims.device_put" else None
    if source is None or source.producer is None or source.producer.op != CONSTANT:
        return False
    touching = (user for user in source.users if user.effects.writes or user.effects.aliases)
    return not any(source in user.inputs for user in touching)


def device_operands(node: KernelNode, target: Target) -> Verdict | None:
    """Operands and results on anything but the captured device. Without tensors nothing is launched: no objection."""
    values = (*node.inputs, *node.outputs)
    foreign = next((v for v in values if _on_other_kind(v, target)), None)
    if foreign is not None:
        return Verdict(False, "unsupported-device", f"{node.op} has %{foreign.name} on {device_of(foreign)}")
    elsewhere = next((v for v in values if _on_other_index(v, target)), None)
    if elsewhere is not None:
        text = f"{node.op} has %{elsewhere.name} on {device_of(elsewhere)}, and the graph computes on {target.device}"
        return Verdict(False, "multi-device", text)
    if target.device.is_host or _is_folded(node):
        return None
    return _host_operands(node)


def _host_operands(node: KernelNode) -> Verdict | None:
    on_host = [value for value in dict.fromkeys((*node.inputs, *node.outputs)) if is_on_host(value)]
    if not on_host:
        return None
    if all(device.is_host for device in devices_of((*node.inputs, *node.outputs))):
        return Verdict(False, "cpu-operator", f"{node.op} runs on the CPU: %{on_host[0].name} is there")
    returned = next((value for value in on_host if value in node.outputs), None)
    if returned is not None:
        return Verdict(False, "device-copy", f"{node.op} returns %{returned.name} on the CPU")
    array = next((v for v in on_host if isinstance(v.type, TensorType) and v.type.shape), None)
    if array is not None:
        return Verdict(False, "cpu-operand", f"{node.op} takes %{array.name}, a tensor on the CPU")
    return Verdict(False, "cpu-scalar", f"{node.op} takes %{on_host[0].name}, a CPU tensor of no dimensions")


def device_random(node: KernelNode, target: Target) -> Verdict | None:
    """A draw from another device's generator, in a node that works on the captured device."""
    rng = node.effects.rng
    if rng is None or target.includes(Device.parse(rng)):
        return None
    if not any(target.includes(device) for device in devices_of((*node.inputs, *node.outputs))):
        return None
    return Verdict(False, "stochastic", f"{node.op} draws from the generator of {rng}")


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
