"""A graph as Graphviz text: one cluster per region, operators outside in red with their reason.

Text only; nothing here runs Graphviz. The picture inside the HTML report is drawn in ``drawing``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pygraph.ir import CAPTURABLE, DETAIL, REASON, Graph, KernelNode, Value, dependences
from pygraph.ir.text.print import type_text
from pygraph.report.facts import clean, membership, planned
from pygraph.report.model import GraphReport

__all__ = ["FILLS", "report_dot", "to_dot"]

FILLS = ("#a6cee3", "#b2df8a", "#fdbf6f", "#cab2d6", "#ffff99", "#8dd3c7", "#fccde5", "#d9d9d9")
"""Fill colours of regions, taken in turn."""

_WEIGHTS = ("parameter", "constant")


def to_dot(graph: Graph, regions: Mapping[str, int] | None = None, name: str | None = None) -> str:
    """Graphviz text of ``graph``. ``regions`` gives nodes' regions by name; as partitioned when it is None.
    ``name`` is the title when it is not to be the graph's own.

    Solid edges are data; dashed ones are order that memory and other effects demand. Parameters and constants are not
    drawn. Names are quoted, so that any text is safe in them.
    """
    inside = planned(graph) if regions is None else regions
    lines = [f"digraph {quote(name or graph.name)} {{", *_style(graph, name or graph.name)]
    lines += [line for value in _drawn_inputs(graph) for line in _input(value)]
    lines += [line for index in sorted(set(inside.values())) for line in _cluster(graph, inside, index)]
    lines += [f"  {_node(node)}" for node in graph.nodes if node.name not in inside]
    lines += _edges(graph)
    return "\n".join([*lines, "}", ""])


def _identity(prefix: str, name: str) -> str:
    """A quoted identifier; prefixes keep inputs and nodes of one name apart."""
    return quote(prefix + "".join(char if char.isprintable() else f"<{ord(char):x}>" for char in name))


def _node_id(node: KernelNode) -> str:
    return _identity("n:", node.name)


def _input_id(value: Value) -> str:
    return _identity("in:", value.name)


def quote(text: str) -> str:
    """``text`` as a quoted DOT string; backslashes are doubled, since Graphviz would expand them in labels."""
    return '"' + r"\n".join(clean(row).replace("\\", r"\\").replace('"', r"\"") for row in text.split("\n")) + '"'


def _style(graph: Graph, name: str) -> Iterator[str]:
    yield f"  label={quote(f'{name} ({graph.kind}, {graph.stage.value})')}; labelloc=t; rankdir=TB; compound=true;"
    yield '  graph [fontname="Helvetica", fontsize=11];'
    yield '  node [shape=box, style="rounded,filled", fillcolor="white", fontname="Helvetica", fontsize=10];'
    yield '  edge [color="#606060", arrowsize=0.6];'


def _drawn_inputs(graph: Graph) -> list[Value]:
    return [value for value in graph.inputs if value.role not in _WEIGHTS]


def _input(value: Value) -> Iterator[str]:
    label = f"%{value.name}\n{type_text(value.type)}"
    yield f"  {_input_id(value)} [label={quote(label)}, shape=ellipse, style=dashed];"


def _cluster(graph: Graph, inside: Mapping[str, int], index: int) -> Iterator[str]:
    yield f"  subgraph {quote(f'cluster_region_{index}')} {{"
    yield f'    label={quote(f"region {index}")}; style="rounded,filled"; color="#909090";'
    yield f"    fillcolor={quote(FILLS[index % len(FILLS)])};"
    yield from (f"    {_node(node)}" for node in graph.nodes if inside.get(node.name) == index)
    yield "  }"


def _node(node: KernelNode) -> str:
    types = [type_text(out.type) for out in node.outputs]
    rows = [node.op, f"%{node.name}", *types[:3], *(["…"] if len(types) > 3 else [])]
    attributes = {"label": "\n".join(rows)}
    if node.loc is not None:
        attributes["tooltip"] = f"{node.loc}  {node.loc.code}"
    if node.meta.get(CAPTURABLE) is False:
        why = ": ".join(filter(None, (node.meta.get(REASON), node.meta.get(DETAIL))))
        attributes |= {"label": "\n".join([*rows, why]), "color": "#d00000", "penwidth": "2"}
    return f"{_node_id(node)} [{', '.join(f'{key}={quote(value)}' for key, value in attributes.items())}];"


def _edges(graph: Graph) -> Iterator[str]:
    data = {(value.producer, node) for node in graph.nodes for value in node.inputs if value.producer is not None}
    for value in _drawn_inputs(graph):
        yield from (f"  {_input_id(value)} -> {_node_id(node)};" for node in value.users)
    for before, node in dependences(graph):
        dashed = "" if (before, node) in data else " [style=dashed, constraint=false]"
        yield f"  {_node_id(before)} -> {_node_id(node)}{dashed};"


def report_dot(report: GraphReport) -> str:
    """The graph of ``report`` under its name, clustered as it was emitted. Empty when the graph was not lifted."""
    return "" if report.graph is None else to_dot(report.graph, membership(report), report.name)
