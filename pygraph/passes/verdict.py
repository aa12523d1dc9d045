"""What a judgement says and what it is relative to: the verdict on one node, and the target that is captured.

The rules live in ``judge``; the codes in ``reasons``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pygraph.ir import (
    CAPTURABLE,
    DETAIL,
    REASON,
    Device,
    Graph,
    KernelNode,
    MetaKey,
    TensorType,
    Value,
)

__all__ = [
    "CAPTURED",
    "FAILED",
    "Target",
    "Verdict",
    "annotate",
    "captured_device",
    "device_of",
    "devices_of",
    "target_of",
]

FAILED = MetaKey("failed", str)
"""Node: what was met when its region was captured; set before the passes run, where a capture failed for the node."""

META = "meta"
"""Tensors without memory: attention returns its random state so, as it cannot know yet whether it is captured."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a node may be captured and, if not, the code of the reason and the sentence that names the operand."""

    capturable: bool
    reason: str | None = None
    detail: str | None = None


CAPTURED = Verdict(True)


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


def annotate(node: KernelNode, verdict: Verdict) -> bool:
    """Write ``verdict`` on ``node``; return whether it differs from what stood there."""
    before = node.meta.copy()
    node.meta.set(CAPTURABLE, verdict.capturable)
    for key, text in ((REASON, verdict.reason), (DETAIL, verdict.detail)):
        if text is None:
            node.meta.drop(key)
        else:
            node.meta.set(key, text)
    return node.meta != before
