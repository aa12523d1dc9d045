"""What a picture of a graph shows: boxes for operators and inputs, or for whole regions where there are too many.

Where boxes go is ``layout``'s business; how they look is the template's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import networkx as nx

from pygraph.ir import Graph, KernelNode, Value, dependences
from pygraph.ir.text.print import type_text
from pygraph.report.facts import clean, membership, plural
from pygraph.report.model import GraphReport

__all__ = ["MAX_BOXES", "Box", "Link", "Scene", "scene"]

MAX_BOXES = 2500
"""Above this many operators the picture shows regions instead."""

_WEIGHTS = ("parameter", "buffer", "constant")
_WORDS = 26


@dataclass(frozen=True, slots=True)
class Box:
    """One box: ``kind`` is region, outside, host or input; ``title`` is shown on hover.

    ``names`` are the operators that it stands for, ``note`` a second line, ``region`` the region that colours it,
    ``free`` whether it is known to launch nothing (a view, say).
    """

    kind: str
    label: str
    title: str
    note: str = ""
    region: int | None = None
    names: tuple[str, ...] = ()
    free: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """An edge between two boxes, by position; ``order`` when no data flows and effects alone demand it."""

    source: int
    target: int
    order: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """Boxes in a topological order, links between them, and what is to be said of the picture as a whole."""

    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    note: str = ""


def scene(report: GraphReport, limit: int = MAX_BOXES) -> Scene:
    """The picture of ``report``'s graph, of at most ``limit`` boxes; empty when there is no graph."""
    if report.graph is None or not len(report.graph):
        return Scene((), ())
    if len(report.graph) <= limit:
        return _operators(report, report.graph)
    return _collapsed(report, report.graph, limit)


# -- operators ---------------------------------------------------------------------------------------------------------


def _operators(report: GraphReport, graph: Graph) -> Scene:
    inside, reasons = membership(report), _reasons(report)
    inputs = [value for value in graph.inputs if value.users and value.role not in _WEIGHTS]
    boxes = [_input(value) for value in inputs] + [_box(node, inside, reasons) for node in graph.nodes]
    place: dict[object, int] = {key: i for i, key in enumerate([*inputs, *graph.nodes])}
    flows = [(value, node) for value in inputs for node in value.users]
    links = [Link(place[value], place[node]) for value, node in flows]
    before = ((a, b) for a, b in dependences(graph) if place[a] < place[b])
    links += [Link(place[a], place[b], not _feeds(a, b)) for a, b in before]
    return Scene(tuple(boxes), tuple(links), "Parameters, buffers and constants are not drawn.")


def _reasons(report: GraphReport) -> dict[str, tuple[str, str]]:
    return {row.node: (row.reason, row.detail) for row in report.uncaptured()}


def _feeds(before: KernelNode, node: KernelNode) -> bool:
    return any(value.producer is before for value in node.inputs)


def _input(value: Value) -> Box:
    return Box("input", _short(value.name), f"%{value.name} : {type_text(value.type)}\n{value.role}")


def _box(node: KernelNode, inside: dict[str, int], reasons: dict[str, tuple[str, str]]) -> Box:
    region = inside.get(node.name)
    reason, detail = reasons.get(node.name, ("", ""))
    kind = "region" if region is not None else "outside" if reason else "host"
    title = "\n".join(_title(node, region, reason, detail))
    return Box(kind, _short(_op(node.op)), title, _short(reason), region, (node.name,), node.cost.launches == 0)


def _title(node: KernelNode, region: int | None, reason: str, detail: str) -> Iterator[str]:
    yield node.op
    types = ", ".join(type_text(out.type) for out in node.outputs)
    yield f"%{node.name}" + (f" : {types}" if types else "")
    if region is not None:
        yield f"region {region}"
    if reason:
        yield "not captured: " + ": ".join(filter(None, (reason, detail)))
    if node.loc is not None:
        yield f"{node.loc}  {clean(node.loc.code)}".rstrip()


def _op(op: str) -> str:
    """``aten.mm.default`` as ``mm``; other namespaces and overloads that say something stay."""
    return op.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")


def _short(text: str) -> str:
    return text if len(text) <= _WORDS else f"{text[: _WORDS - 1]}…"


# -- regions -----------------------------------------------------------------------------------------------------------


def _collapsed(report: GraphReport, graph: Graph, limit: int) -> Scene:
    """One box per region, and one per run of operators between them: the quotient graph of the regions."""
    inside = membership(report)
    group = _groups(graph, inside)
    quotient = _quotient(graph, group)
    order = _topological(quotient)
    shown = {key: i for i, key in enumerate(order[:limit])}
    members: dict[object, list[KernelNode]] = {}
    for node in graph.nodes:
        members.setdefault(group[node], []).append(node)
    reasons = _reasons(report)
    boxes = tuple(_group_box(key, members[key], reasons) for key in shown)
    links = (Link(shown[a], shown[b]) for a, b in quotient.edges if a in shown and b in shown)
    forward = tuple(link for link in links if link.source < link.target)
    note = f"The graph has {len(graph)} operators: whole regions are drawn instead."
    left = len(order) - len(shown)
    return Scene(boxes, forward, f"{note} {left} of them are left out." if left else note)


def _groups(graph: Graph, inside: dict[str, int]) -> dict[KernelNode, object]:
    """The box that each node falls into: its region, or the layers of the quotient graph between two regions.

    Within a run of layers that hold no region, everything may share a box without closing a cycle, because edges
    lead from lower layers to higher ones only.
    """
    single: dict[KernelNode, object] = {node: inside.get(node.name, node.name) for node in graph.nodes}
    layer = _layer_of(_quotient(graph, single))
    with_region = {layer[key] for key in single.values() if isinstance(key, int)}
    run: dict[int, int] = {}
    for number in range(max(layer.values(), default=0) + 1):
        kind = number in with_region
        run[number] = number if kind or number == 0 or number - 1 in with_region else run[number - 1]
    return {node: key if isinstance(key, int) else ("run", run[layer[key]]) for node, key in single.items()}


def _quotient(graph: Graph, group: dict[KernelNode, object]) -> nx.DiGraph[object]:
    quotient: nx.DiGraph[object] = nx.DiGraph()
    quotient.add_nodes_from(group[node] for node in graph.nodes)
    edges = ((group[a], group[b]) for a, b in dependences(graph))
    quotient.add_edges_from((a, b) for a, b in edges if a != b)
    return quotient


def _topological(quotient: nx.DiGraph[object]) -> list[object]:
    """A topological order; program order when regions that depend on each other leave none."""
    if nx.is_directed_acyclic_graph(quotient):
        place = {key: i for i, key in enumerate(quotient.nodes)}
        return list(nx.lexicographical_topological_sort(quotient, key=place.__getitem__))
    return list(quotient.nodes)


def _layer_of(quotient: nx.DiGraph[object]) -> dict[object, int]:
    order = _topological(quotient)
    layer: dict[object, int] = {}
    for key in order:
        layer[key] = max((layer[before] + 1 for before in quotient.predecessors(key) if before in layer), default=0)
    return layer


def _group_box(key: object, nodes: list[KernelNode], reasons: dict[str, tuple[str, str]]) -> Box:
    names = tuple(node.name for node in nodes)
    size = plural(len(nodes), "operator")
    if isinstance(key, int):
        return Box("region", f"region {key}", f"region {key}: {size}", size, key, names)
    told = [f"{node.op}: {': '.join(reasons[node.name])}{_at(node)}" for node in nodes if node.name in reasons]
    if not told:
        return Box("host", size, f"{size} that launch nothing", "launch nothing", None, names)
    title = "\n".join([f"{size} outside", *_first(told, 12)])
    return Box("outside", f"{len(told)} not captured", title, f"of {size}", None, names)


def _at(node: KernelNode) -> str:
    return f" at {node.loc}" if node.loc is not None else ""


def _first(rows: list[str], limit: int) -> Iterable[str]:
    return rows if len(rows) <= limit else [*rows[:limit], f"… and {len(rows) - limit} more"]
