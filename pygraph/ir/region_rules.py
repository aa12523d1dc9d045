"""Rules of judged, partitioned, indirected and selected graphs. Rules that hold at every stage are in ``rules``.

Each rule yields ``(node, reason)`` for whatever breaks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pygraph.ir.annotations import CAPTURABLE, REASON, REGION, SELECTED, Unit, unit_of
from pygraph.ir.graph import Graph
from pygraph.ir.node import KernelNode, Value
from pygraph.ir.order import dependences
from pygraph.ir.rules import Violation

__all__ = ["DECISIONS", "judged", "membership", "parameters", "quotient", "selected", "table"]

DECISIONS = ("static", "patched")
"""What may become of a region's parameter."""


def judged(graph: Graph) -> Iterator[Violation]:
    """Every node is judged; one that cannot be captured says why."""
    for node in graph.nodes:
        capturable = node.meta.get(CAPTURABLE)
        if capturable is None:
            yield node, "it is not judged: annotation 'capturable' is missing"
        elif not capturable and not node.meta.get(REASON):
            yield node, "it is not capturable but gives no 'reason'"


def membership(graph: Graph) -> Iterator[Violation]:
    """Capturable nodes are in a region, or say why not; no other node is in one."""
    for node in graph.nodes:
        capturable = node.meta.get(CAPTURABLE)
        region = node.meta.get(REGION)
        reason: str | None = node.meta.get(REASON)
        if region is not None and not capturable:
            yield node, f"it is in region {region} but cannot be captured: {reason}"
        if region is None and capturable and not reason:
            yield node, "it is capturable, in no region, and gives no 'reason'"


def table(graph: Graph) -> Iterator[Violation]:
    """The table of regions lists exactly the regions that nodes are in."""
    used: dict[int, KernelNode] = {}
    for node in graph.nodes:
        region = node.meta.get(REGION)
        if region is not None:
            used.setdefault(region, node)
    for index, node in used.items():
        if index not in graph.regions:
            yield node, f"its region {index} is not in the table of regions"
    for index, entry in graph.regions.items():
        if index not in used:
            yield None, f"region {index} has no nodes"
        if entry.index != index:
            yield None, f"region {entry.index} is in the table as {index}"


def quotient(graph: Graph) -> Iterator[Violation]:
    """With each region contracted to one node, the dependences have no cycle. So each region is convex, too."""
    following: dict[Unit, dict[Unit, None]] = {unit_of(node): {} for node in graph.nodes}
    for before, node in dependences(graph):
        if unit_of(before) != unit_of(node):
            following[unit_of(before)][unit_of(node)] = None
    cycle = _cycle(following)
    if cycle:
        yield _first_node(cycle, graph), "regions and nodes need each other: " + " → ".join(map(_name, cycle))


def parameters(graph: Graph) -> Iterator[Violation]:
    """Every value that a region takes from outside is a parameter, with a known decision, and nothing else is."""
    outside: dict[int, dict[Value, KernelNode]] = {index: {} for index in graph.regions}
    for node in graph.nodes:
        region = node.meta.get(REGION)
        if region is None:
            continue
        for value in node.inputs:
            if value.producer is None or value.producer.meta.get(REGION) != region:
                outside[region].setdefault(value, node)
    for index, region_entry in graph.regions.items():
        for value, node in outside[index].items():
            if value not in region_entry.parameters:
                yield node, f"region {index} takes {value!r} from outside, but that is no parameter of it"
        for value, parameter in region_entry.parameters.items():
            if value not in outside[index]:
                yield None, f"region {index} does not take its parameter {value!r} from outside"
            if parameter.decision not in DECISIONS:
                yield None, f"parameter {value!r} of region {index}: unknown decision '{parameter.decision}'"


def selected(graph: Graph) -> Iterator[Violation]:
    """Every region is selected or not, and says why."""
    for index, region in graph.regions.items():
        if region.meta.get(SELECTED) is None or not region.meta.get(REASON):
            yield None, f"region {index} lacks 'selected' or 'reason'"


# -- the quotient graph ------------------------------------------------------------------------------------------------


def _name(part: Unit) -> str:
    return f"region {part}" if isinstance(part, int) else part.name


def _first_node(cycle: list[Unit], graph: Graph) -> KernelNode | None:
    return next((node for node in graph.nodes if unit_of(node) in cycle), None)


def _cycle(following: dict[Unit, dict[Unit, None]]) -> list[Unit]:
    """One cycle, closed by its first part, or nothing. Parts that a topological sort leaves over contain one."""
    needed = dict.fromkeys(following, 0)
    for parts in following.values():
        for part in parts:
            needed[part] += 1
    ready = deque(part for part, count in needed.items() if not count)
    while ready:
        for part in following[ready.popleft()]:
            needed[part] -= 1
            if not needed[part]:
                ready.append(part)
    left = {part for part, count in needed.items() if count}
    return _walk_back(following, left)


def _walk_back(following: dict[Unit, dict[Unit, None]], left: set[Unit]) -> list[Unit]:
    """Each part left over has a predecessor left over: walk back until one comes again."""
    start = next((part for part in following if part in left), None)
    if start is None:
        return []
    preceding = {after: part for part in reversed(following) if part in left for after in following[part]}
    path: dict[Unit, int] = {}
    part = start
    while part not in path:
        path[part] = len(path)
        part = preceding[part]
    cycle = list(path)[path[part] :]
    return [part, *reversed(cycle)]
