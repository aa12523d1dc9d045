"""Legality: which nodes a captured region may hold.

A captured region launches the same kernels again without running the host's code. A node that waits for the device,
whose sizes depend on data, or that works on another device cannot be part of one. The verdict is data on the node: a
code (``reasons`` explains each) and a sentence for the report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import sympy

from pygraph.ir import CAPTURABLE, REASON, Graph, KernelNode, ScalarType, Stage, TensorType, Value, leaves
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.legality.rules import Target, annotate, target_of

__all__ = ["Legality"]


@dataclass(frozen=True)
class Legality(Pass):
    """Mark each node as capturable or not, with a reason code and a sentence.

    before:  mm ─ item ─ mul ─ mm
    after:   mm✓ ─ item✗ host-read ─ mul✓ ─ mm✓

    A node that computes with a number read from data is capturable: the number is part of the key of its region, so
    replays need the same number.

    Args:
        forbid: other operators to leave uncaptured, such as ``aten.mm`` or ``mylib.op.default``; default: none
    """

    name: ClassVar[str] = "legality"
    requires: ClassVar[Stage] = Stage.LIFTED
    ensures: ClassVar[Stage] = Stage.JUDGED

    forbid: tuple[str, ...] = ()

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Annotate all nodes, also those of subgraphs."""
        modified = _judge_all(graph, target_of(graph, ctx.device, self.forbid))
        return PassResult(modified, tuple(_notes(graph)))


def _judge_all(graph: Graph, target: Target) -> bool:
    changed = [annotate(node, target) for node in graph.nodes]
    changed += [_judge_all(inner, target.within(inner)) for inner in graph.subgraphs.values()]
    return any(changed)


def _notes(graph: Graph) -> Iterator[str]:
    refused = Counter(node.meta.get(REASON) for node in graph.nodes if not node.meta.get(CAPTURABLE))
    yield f"nodes that can be captured: {len(graph) - refused.total()} of {len(graph)}"
    for code, count in sorted(refused.items(), key=lambda entry: (-entry[1], str(entry[0]))):
        yield f"nodes that cannot, for {code}: {count}"
    keyed = [node for node in _keyed_by_data(graph) if node.meta.get(CAPTURABLE)]
    if keyed:
        first, more = keyed[0], len(keyed) - 1
        others = f" and {more} more" if more else ""
        yield f"{first.name}{others} can be captured, but replay only while a number read from data repeats"


_UNBACKED = re.compile(r"(u|zuf)\d+")
"""Names of torch's symbols whose values depend on data."""


def _keyed_by_data(graph: Graph) -> Iterator[KernelNode]:
    """Nodes whose operands or sizes include a number read from data."""
    read: set[Value] = set()
    for node in graph.nodes:
        shapes = [value.type.shape for value in (*node.inputs, *node.outputs) if isinstance(value.type, TensorType)]
        symbols = (s for e in leaves((*node.args, *node.attrs.values(), *shapes), sympy.Expr) for s in e.free_symbols)
        keyed = not read.isdisjoint(node.inputs) or any(_UNBACKED.fullmatch(str(symbol)) for symbol in symbols)
        if keyed or node.effects.sync:
            read.update(value for value in node.outputs if isinstance(value.type, ScalarType))
        if keyed:
            yield node
