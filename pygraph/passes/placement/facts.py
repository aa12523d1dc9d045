"""What placement asks of a graph: who uses CPU values on the device, and what the caller can observe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from pygraph.ir import REASON, UPLOAD, Graph, KernelNode, Value, base_name, memory_roots
from pygraph.passes.legality.rules import Target, copy_source, is_on_host

__all__ = [
    "Facts",
    "Names",
    "facts_of",
    "has_own_memory",
    "host_operands",
    "is_copy_in",
    "is_copy_out",
    "note_of_move",
    "put_after",
]

_INDEXING = frozenset(
    {"aten._unsafe_index", "aten._unsafe_index_put", "aten.index", "aten.index_put", "aten.index_put_"}
)
"""Operators that take CPU tensors of any size beside tensors of the device."""

_READS_ON_HOST = frozenset({"aten.index_fill", "aten.index_fill_", "aten.quantize_per_tensor"})
"""Operators that read a scalar tensor on the host wherever it lives: on the device this makes the host wait."""

_CASTS = frozenset({"aten._to_copy", "prims.convert_element_type"})
_COPY_INTO = frozenset({"aten.copy", "aten.copy_", "prims.copy_to"})


@dataclass(frozen=True, slots=True)
class Facts:
    """Memory of a graph: the root of each value, the roots that are written, and those that are returned.

    ``pinned`` holds the nodes that explicit order edges touch: they are not erased.
    """

    roots: dict[Value, Value]
    written: frozenset[Value]
    returned: frozenset[Value]
    pinned: frozenset[KernelNode]

    def is_observed(self, value: Value) -> bool:
        """Whether somebody could tell this value's memory from a copy of it.

        A cast to the type that a value has already is taken to be the value itself: Inductor may leave it out.
        """
        root = self.roots[value]
        if root in self.written or root in self.returned:
            return True
        casts = [user.output for user in value.users if base_name(user.op) in _CASTS and len(user.outputs) == 1]
        return any(cast.type == value.type and self.is_observed(cast) for cast in casts)

    def is_written(self, value: Value) -> bool:
        """Whether the memory of ``value`` is mutated anywhere in the graph."""
        return self.roots[value] in self.written


def facts_of(graph: Graph) -> Facts:
    """The facts of ``graph`` as it stands."""
    roots = memory_roots(graph)
    written = [roots[node.inputs[position]] for node in graph.nodes for position in node.effects.writes]
    returned = [roots[value] for value in graph.output_values]
    pinned = [one for node in graph.nodes if node.after for one in (node, *node.after)]
    return Facts(roots, frozenset(written), frozenset(returned), frozenset(pinned))


def is_copy_in(node: KernelNode, target: Target) -> bool:
    """Whether ``node`` only copies a CPU tensor to the captured device (and maybe casts it there)."""
    source = copy_source(node)
    if node.op == UPLOAD or source is None or base_name(node.op) in _COPY_INTO or len(node.outputs) != 1:
        return False
    return node.meta.get(REASON) == "device-copy" and is_on_host(source) and _is_on(node.output, target)


def is_copy_out(node: KernelNode) -> bool:
    """Whether ``node`` only copies a tensor to the host."""
    source = copy_source(node)
    if source is None or base_name(node.op) in _COPY_INTO or len(node.outputs) != 1:
        return False
    return node.meta.get(REASON) == "device-copy" and is_on_host(node.output)


def has_own_memory(node: KernelNode, facts: Facts, target: Target) -> bool:
    """Whether ``node`` copies a CPU tensor to the device, and somebody could tell its result from another copy's.

    Two such nodes must not copy the same value on the device: Inductor leaves out a copy within a device, and both
    results would be that value.
    """
    filled = base_name(node.op) == "aten.copy" and bool(host_operands(node, target))
    if not filled and not is_copy_in(node, target):
        return False
    return node in facts.pinned or facts.is_observed(node.output)


def host_operands(node: KernelNode, target: Target) -> list[Value]:
    """The CPU operands that keep ``node`` from being captured, if a copy on the device does as well; else nothing."""
    reason, base = node.meta.get(REASON), base_name(node.op)
    if reason == "device-copy" and base in _COPY_INTO:
        return _copied_into(node, target)
    if not base.startswith(("aten.", "prims.")) or base in _READS_ON_HOST:
        return []
    if reason != "cpu-scalar" and not (reason == "cpu-operand" and base in _INDEXING):
        return []
    if any(is_on_host(node.inputs[position]) for position in node.effects.writes):
        return []
    return [value for value in dict.fromkeys(node.inputs) if is_on_host(value)]


def _copied_into(node: KernelNode, target: Target) -> list[Value]:
    source = copy_source(node)
    others = [value for value in (*node.inputs, *node.outputs) if value is not source]
    if source is None or not is_on_host(source) or not all(_is_on(value, target) for value in others):
        return []
    return [source]


def _is_on(value: Value, target: Target) -> bool:
    device = getattr(value.type, "device", None)
    return device is not None and target.includes(device)


class Names:
    """The names of a graph that are taken, with those given out since."""

    def __init__(self, graph: Graph) -> None:
        self._taken = {value.name for value in graph.inputs} | {node.name for node in graph.nodes}

    def numbered(self, base: str) -> str:
        """``base`` followed by the first number that makes a free name."""
        return self._claim(next(n for n in (f"{base}{i}" for i in count()) if n not in self._taken))

    def suffixed(self, name: str) -> str:
        """``name`` with as many underscores behind it as make a free name."""
        return self._claim(next(n for n in (name + "_" * i for i in count()) if n not in self._taken))

    def _claim(self, name: str) -> str:
        self._taken.add(name)
        return name


def put_after(graph: Graph, places: Sequence[tuple[KernelNode, KernelNode | None]]) -> None:
    """Bring each first node of ``places`` to right behind the second one (None: to the start), all in one pass."""
    moved = frozenset(node for node, _ in places)
    behind: dict[KernelNode | None, list[KernelNode]] = {}
    for node, before in places:
        behind.setdefault(before, []).append(node)
    order = behind.get(None, [])
    for node in graph.nodes:
        order += [] if node in moved else [node, *behind.get(node, [])]
    graph.reorder(order)


def note_of_move(target: Target) -> str:
    """The annotation of a node that was on the CPU."""
    return f"moved from cpu to {target.device}"
