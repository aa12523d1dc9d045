"""What captures failed for: operators that a graph is compiled again without, in its regions.

A plain record that grows; which calls fail is found by the runtime, and what becomes of them is legality's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pygraph.ir import Graph, KernelNode
from pygraph.lowering.decision import Decision, operator_run
from pygraph.lowering.record import ProgramRecord
from pygraph.passes.verdict import FAILED

__all__ = ["Failed"]

Call = tuple[str, str | None]
"""An operator, and the user's line that it is called in."""


@dataclass(frozen=True)
class Failed:
    """``nodes``: names of a graph's operators ▸ what was met. ``calls`` are those that Inductor's own passes made, of
    which the graph holds only what they were made from: the same operator, perhaps inside of a higher-order one, that
    the same line of the user's calls."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[Call, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.calls)

    def with_nodes(self, names: Iterable[str], met: str, decision: Decision, record: ProgramRecord) -> Failed:
        """These and the operators ``names`` of a program. Those that were known before keep what was met then."""
        made = {one.name: one for run in record.runs for step in run for one in step.made}
        chosen = list(names)
        sources = [(made[name].op, source) for name in chosen if name in made for source in made[name].sources]
        nodes = {name: met for name in (*chosen, *(source for _, source in sources)) if name in decision.nodes}
        calls = {(op, decision.nodes[source].loc): met for op, source in sources}
        return Failed({**nodes, **self.nodes}, {**calls, **self.calls})

    def mark(self, graph: Graph) -> None:
        """Note on every node of ``graph`` that is meant what was met."""
        for node in graph.nodes:
            met = self.nodes.get(node.name) or next(filter(None, map(self.calls.get, _calls(node))), None)
            if met:
                node.meta.set(FAILED, met)

    def digest(self) -> str:
        """A hash for cache keys; nothing where nothing failed."""
        rows = [*sorted(self.nodes), *sorted(map(str, self.calls))]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16] if rows else ""


def _calls(node: KernelNode) -> Iterator[Call]:
    """The operator that a node is, and the one that it runs as a higher-order operator."""
    loc = str(node.loc) if node.loc else None
    yield node.op, loc
    yield operator_run(node), loc
