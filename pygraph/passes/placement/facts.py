"""Queries of placement: uses of CPU values on the device, and effects that the caller can observe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pygraph.ir import PURE, REASON, UPLOAD, Graph, KernelNode, Value, base_name, memory_roots
from pygraph.passes.legality.rules import Target, copy_source, device_of, is_on_host

_INDEXING = frozenset(
    {"aten._unsafe_index", "aten._unsafe_index_put", "aten.index", "aten.index_put", "aten.index_put_"}
)
"""Operators that take CPU tensors of any size beside tensors of the device."""

_READS_ON_HOST = frozenset({"aten.index_fill", "aten.index_fill_", "aten.quantize_per_tensor"})
"""Operators that read a scalar tensor on the host, on whichever device it is: on a GPU, the host then waits."""

_CASTS = frozenset({"aten._to_copy", "prims.convert_element_type"})
_COPY_INTO = frozenset({"aten.copy", "aten.copy_", "prims.copy_to"})


class Facts:
    """Memory of a graph in its current state: the root of each value, and the roots that are written or returned.

    ``pinned`` holds the nodes with explicit order edges: they are not erased.
    """

    def __init__(self, graph: Graph) -> None:
        self.roots = memory_roots(graph)
        self._written = {self.roots[node.inputs[place]] for node in graph.nodes for place in node.effects.writes}
        self._returned = {self.roots[value] for value in graph.output_values}
        self.pinned = {one for node in graph.nodes if node.after for one in (node, *node.after)}

    def is_observed(self, value: Value) -> bool:
        """True if somebody could tell this value's memory from a copy of it.

        A cast to the value's own type counts as the value itself: Inductor may leave it out.
        """
        if self.is_written(value) or self.roots[value] in self._returned:
            return True
        casts = [user.output for user in value.users if base_name(user.op) in _CASTS and len(user.outputs) == 1]
        return any(cast.type == value.type and self.is_observed(cast) for cast in casts)

    def is_written(self, value: Value) -> bool:
        """True if the memory of ``value`` is mutated anywhere in the graph."""
        return self.roots[value] in self._written


def computes_only(node: KernelNode) -> bool:
    """True if ``node`` has no effects except aliases."""
    return replace(node.effects, aliases=(), reads=None) == PURE


def is_copy_in(node: KernelNode, target: Target) -> bool:
    """True if ``node`` only copies a CPU tensor to the captured device (and maybe casts it there)."""
    source = _only_copied(node)
    return node.op != UPLOAD and source is not None and is_on_host(source) and _is_on(node.output, target)


def is_copy_out(node: KernelNode) -> bool:
    """True if ``node`` only copies a tensor to the host."""
    return _only_copied(node) is not None and is_on_host(node.output)


def _only_copied(node: KernelNode) -> Value | None:
    """The source of a copy between devices into new memory, or None for any other node."""
    if base_name(node.op) in _COPY_INTO or len(node.outputs) != 1 or node.meta.get(REASON) != "device-copy":
        return None
    return copy_source(node)


def has_own_memory(node: KernelNode, facts: Facts, target: Target) -> bool:
    """True if ``node`` copies a CPU tensor to the device, and somebody could tell its result from another copy's.

    Two such nodes must not copy the same value on the device: Inductor leaves out a copy within a device, and both
    results would be that value.
    """
    filled = base_name(node.op) == "aten.copy" and bool(host_operands(node, target))
    if not filled and not is_copy_in(node, target):
        return False
    return node in facts.pinned or facts.is_observed(node.output)


def host_operands(node: KernelNode, target: Target) -> list[Value]:
    """The CPU operands that keep ``node`` from being captured, if device copies can replace them; else nothing."""
    reason, base = node.meta.get(REASON), base_name(node.op)
    on_host = [value for value in dict.fromkeys(node.inputs) if is_on_host(value)]
    if reason == "device-copy" and base in _COPY_INTO:
        others = [value for value in (*node.inputs, *node.outputs) if value is not copy_source(node)]
        return on_host if all(_is_on(value, target) for value in others) else []
    if not base.startswith(("aten.", "prims.")) or base in _READS_ON_HOST:
        return []
    if reason != "cpu-scalar" and not (reason == "cpu-operand" and base in _INDEXING):
        return []
    return [] if any(is_on_host(node.inputs[place]) for place in node.effects.writes) else on_host


def _is_on(value: Value, target: Target) -> bool:
    device = device_of(value)
    return device is not None and target.includes(device)


def put_after(graph: Graph, behind: Mapping[KernelNode, KernelNode | None]) -> None:
    """Move each key of ``behind`` directly after its value (None: to the start), all in one pass."""
    place: dict[KernelNode | None, int] = {node: i for i, node in enumerate(graph.nodes)}
    place[None] = -1
    order = {node: (place[behind[node]], 1) if node in behind else (place[node], 0) for node in graph.nodes}
    graph.reorder(sorted(graph.nodes, key=order.__getitem__))
