"""What captures failed for: operators that a graph is compiled again without, in its regions.

A plain record that grows; which calls fail is found by the runtime, and what becomes of them is legality's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pygraph.inductor.decision import Decision
from pygraph.inductor.record import ProgramRecord
from pygraph.ir import Graph
from pygraph.passes.legality.rules import FAILED

__all__ = ["Failed"]


@dataclass(frozen=True)
class Failed:
    """Names of a graph's operators ▸ what was met. Of an operator that Inductor's own passes made, these are the ones
    that it was made from: it stays outside like them when it is made again."""

    nodes: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nodes)

    def with_nodes(
        self, names: Iterable[str], met: str, decision: Decision, record: ProgramRecord, everywhere: str | None = None
    ) -> Failed:
        """These, the nodes ``names`` of a program, and all that call the operator ``everywhere``. Those that were known
        before keep what was met then."""
        made = [one for run in record.runs for step in run for one in step.made]
        origins = {one.name: one.sources for one in made}
        same = [name for name, placed in decision.nodes.items() if placed.op == everywhere]
        same += [one.name for one in made if one.op == everywhere]
        known = [origins.get(name, (name,)) for name in (*names, *same)]
        sources = [source for group in known for source in group]
        return Failed({**{name: met for name in sources if name in decision.nodes}, **self.nodes})

    def mark(self, graph: Graph) -> None:
        """Note on every node of ``graph`` that is meant what was met."""
        for node in graph.nodes:
            if node.name in self.nodes:
                node.meta.set(FAILED, self.nodes[node.name])

    def digest(self) -> str:
        """A hash for cache keys; nothing where nothing failed."""
        return hashlib.sha256("\n".join(sorted(self.nodes)).encode()).hexdigest()[:16] if self.nodes else ""
