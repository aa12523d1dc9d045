"""Rewrites by pattern: nested calls of operators that match a pattern are replaced until none matches.

rewrite(graph, "aten.relu.default(%x)", lambda found: found.add("aten.clamp_min.default", (found["x"], 0)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pygraph.errors import PygraphError
from pygraph.ir import MADE_FROM, PURE, TAGS, UNKNOWN, Arg, Cost, Effects, Graph, KernelNode, Type, Value, sources
from pygraph.ir.order import memory_roots
from pygraph.ir.text.parse import Call, Reference, parse_call

__all__ = ["Found", "rewrite"]


@dataclass(frozen=True, slots=True)
class Found:
    """One match of a pattern. ``found["x"]`` is the operand ``%x``.

    Args:
        graph: the graph
        node: node of the outermost call, which is replaced
        nodes: nodes of all calls, the outermost first
        operands: matched operands, values or literals, by name in the pattern
    """

    graph: Graph
    node: KernelNode
    nodes: tuple[KernelNode, ...]
    operands: Mapping[str, Arg]

    def __getitem__(self, name: str) -> Arg:
        return self.operands[name]

    def add(
        self,
        op: str,
        args: Iterable[Arg],
        types: Iterable[Type] | None = None,
        *,
        attrs: Mapping[str, Arg] | None = None,
        effects: Effects = PURE,
        cost: Cost = UNKNOWN,
    ) -> KernelNode:
        """Add an operator before the replaced node, with the source line, module and annotations of that node.

        ``types`` default to the types of the replaced node's results. Raises GraphError as ``Graph.add`` does.
        """
        node = self.node
        types = [value.type for value in node.outputs] if types is None else types
        made = self.graph.add(
            op, args, types, attrs=attrs, effects=effects, cost=cost, loc=node.loc, module=node.module, before=node
        )
        made.meta = node.meta.copy()
        made.meta.drop(TAGS)
        made.meta.set(MADE_FROM, tuple(dict.fromkeys(tuple(one) for node in self.nodes for one in sources(node))))
        return made


def rewrite(graph: Graph, pattern: str, replace: Callable[[Found], KernelNode | Value | None]) -> int:
    """Replace calls that match ``pattern`` until none is left. Returns the number of replacements.

    Nodes that write, draw, communicate or are a barrier, and nodes in an explicit order, do not match. Nor do nested
    calls if memory that an inner call reads is written between it and the outermost. Unused matched nodes are removed.

    Raises ParseError for a malformed pattern, and PygraphError if replacements match again and again.

    Args:
        graph: graph to change in place
        pattern: call in ``.pgir`` text, whose operands may be calls: ``aten.relu.default(aten.add.Tensor(%x, %y))``.
            ``%x`` matches any operand; a name that is repeated matches the same operand
        replace: adds nodes at a match; returns the node or value that replaces the outermost node, or None to keep it
    """
    wanted = parse_call(pattern)
    limit, done, before = 10 * len(graph) + 100, 0, -1
    while before != done:
        before, scan = done, _Scan(graph)
        for node in graph.nodes:
            found = scan.match(node, wanted)
            made = None if found is None else replace(found)
            if found is None or made is None:
                continue
            if done == limit:
                raise PygraphError(
                    f"after {limit} replacements, '{pattern}' still matches: it matches what replaces it"
                )
            _put(graph, found, made)
            done += 1
    return done


def _put(graph: Graph, found: Found, made: KernelNode | Value) -> None:
    results = made.outputs if isinstance(made, KernelNode) else (made,)
    if len(results) != len(found.node.outputs):
        raise PygraphError(f"{found.node.op} returns {len(found.node.outputs)} results, its replacement {len(results)}")
    for old, new in zip(found.node.outputs, results, strict=True):
        graph.replace_uses(old, new)
    for node in found.nodes:
        if not any(value.users or value in graph.output_values for value in node.outputs):
            graph.erase(node)


class _Scan:
    """A graph at the beginning of a round of matching."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.roots = memory_roots(graph)
        self.writes = [
            (i, self.roots[node.inputs[p]]) for i, node in enumerate(graph.nodes) for p in node.effects.writes
        ]
        self.ordered = {one for node in graph.nodes for one in (*node.after, *([node] if node.after else ()))}

    def match(self, node: KernelNode, wanted: Call) -> Found | None:
        nodes: list[KernelNode] = []
        operands: dict[str, Arg] = {}
        if self.graph.owner(node.name) is not node or not self._calls(node, wanted, nodes, operands):
            return None
        if any(self._is_overwritten(inner, node) for inner in nodes[1:]):
            return None
        return Found(self.graph, node, tuple(dict.fromkeys(nodes)), operands)

    def _calls(self, node: KernelNode, wanted: Call, nodes: list[KernelNode], operands: dict[str, Arg]) -> bool:
        effects = node.effects
        if node not in self.place:  # made in this round: matched in the next
            return False
        fixed = effects.writes or effects.barrier or effects.rng is not None or effects.collective is not None
        if node.op != wanted.op or fixed or node in self.ordered or len(node.args) != len(wanted.args):
            return False
        nodes.append(node)
        pairs = [*zip(node.args, wanted.args, strict=True), *((node.attrs.get(k), v) for k, v in wanted.attrs.items())]
        return node.attrs.keys() == wanted.attrs.keys() and all(self._is(*pair, nodes, operands) for pair in pairs)

    def _is(self, arg: Arg, wanted: object, nodes: list[KernelNode], operands: dict[str, Arg]) -> bool:
        if isinstance(wanted, Reference):
            known = operands.setdefault(wanted.name, arg)
            return type(known) is type(arg) and known == arg
        if isinstance(wanted, Call):
            producer = arg.producer if isinstance(arg, Value) else None
            single = producer is not None and len(producer.outputs) == 1
            return single and self._calls(producer, wanted, nodes, operands)  # type: ignore[arg-type]
        if isinstance(wanted, tuple) and isinstance(arg, tuple):
            return len(arg) == len(wanted) and all(
                self._is(*pair, nodes, operands) for pair in zip(arg, wanted, strict=True)
            )
        return type(arg) is type(wanted) and arg == wanted

    def _is_overwritten(self, inner: KernelNode, outer: KernelNode) -> bool:
        """True if memory of an input of ``inner`` is written between ``inner`` and ``outer``."""
        first, last = self.place[inner], self.place[outer]
        read = {self.roots.get(value, value) for value in inner.inputs}
        return any(first < i < last and root in read for i, root in self.writes)
