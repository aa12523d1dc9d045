"""The part of the judgement that is about devices: copies between them, CPU operands, foreign devices and generators.

Other rules live in ``judge``.
"""

from __future__ import annotations

from pygraph.ir import Device, KernelNode, TensorType, Value
from pygraph.passes.operators import base_name
from pygraph.passes.verdict import Target, Verdict, devices_of

__all__ = ["COPIES", "UPLOAD", "device_copies", "device_operands", "device_random"]

UPLOAD = "pygraph.upload.default"
"""``upload(Tensor[] xs, Device device) -> Tensor[]``: copies of CPU tensors on a device, each in storage of its own."""

COPIES = frozenset(
    {
        "aten._copy_from",
        "aten._to_copy",
        "aten.copy",
        "aten.copy_",
        "aten.to",
        "prims.copy_to",
        "prims.device_put",
        "pygraph.upload",
    }
)
"""Operators that copy from one device to another when their operands or results say so."""


def device_copies(node: KernelNode, target: Target) -> Verdict | None:
    """A copy between the host and another device."""
    if base_name(node.op) not in COPIES:
        return None
    operands, results = list(devices_of(node.inputs)), list(devices_of(node.outputs))
    kinds = {device.kind for device in (*operands, *results)}
    if "cpu" not in kinds or len(kinds) == 1:
        return None
    source = node.inputs[-1] if base_name(node.op) in ("aten.copy_", "aten.copy", "prims.copy_to") else node.inputs[0]
    origin = next(devices_of((source,)), target.device)
    goal = next((device for device in (*results, *operands) if device != origin), target.device)
    return Verdict(False, "device-copy", f"{node.op} copies %{source.name} from {origin} to {goal}")


def device_operands(node: KernelNode, target: Target) -> Verdict | None:
    """Operands and results on anything but the captured device. Without tensors nothing is launched: no objection."""
    values = (*node.inputs, *node.outputs)
    foreign = next((v for v in values if _on_other_kind(v, target)), None)
    if foreign is not None:
        return Verdict(False, "unsupported-device", f"{node.op} has %{foreign.name} on {_device(foreign)}")
    elsewhere = next((v for v in values if _on_other_index(v, target)), None)
    if elsewhere is not None:
        text = f"{node.op} has %{elsewhere.name} on {_device(elsewhere)}, and the graph computes on {target.device}"
        return Verdict(False, "multi-device", text)
    if target.device.is_host:
        return None
    return _host_operands(node)


def _host_operands(node: KernelNode) -> Verdict | None:
    on_host = [v for v in dict.fromkeys((*node.inputs, *node.outputs)) if _is_on_host(v)]
    if not on_host:
        return None
    if all(device.is_host for device in devices_of((*node.inputs, *node.outputs))):
        return Verdict(False, "cpu-operator", f"{node.op} runs on the CPU: %{on_host[0].name} is there")
    returned = next((v for v in on_host if v in node.outputs), None)
    if returned is not None:
        return Verdict(False, "device-copy", f"{node.op} returns %{returned.name} on the CPU")
    array = next((v for v in on_host if isinstance(v.type, TensorType) and v.type.shape), None)
    if array is not None:
        return Verdict(False, "cpu-operand", f"{node.op} takes %{array.name}, a tensor on the CPU")
    return Verdict(False, "cpu-scalar", f"{node.op} takes %{on_host[0].name}, a CPU tensor of no dimensions")


def device_random(node: KernelNode, target: Target) -> Verdict | None:
    """A draw from another device's generator."""
    rng = node.effects.rng
    if rng is None or target.includes(Device.parse(rng)):
        return None
    return Verdict(False, "stochastic", f"{node.op} draws from the generator of {rng}")


def _device(value: Value) -> Device | None:
    return next(devices_of((value,)), None)


def _on_other_kind(value: Value, target: Target) -> bool:
    device = _device(value)
    return device is not None and device.kind not in ("cpu", target.device.kind)


def _on_other_index(value: Value, target: Target) -> bool:
    device = _device(value)
    return device is not None and not device.is_host and not target.includes(device)


def _is_on_host(value: Value) -> bool:
    device = _device(value)
    return device is not None and device.is_host
