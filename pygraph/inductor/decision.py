"""What the passes decided, in the form that steers Inductor: per FX node, inside a region or outside and why.

Taken from a graph once it is partitioned; knows nothing of Inductor itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pygraph.ir import CAPTURABLE, EAGER, REASON, REGION, SELECTED, Graph

BARRIER = "barrier"
RNG = "rng"


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one node goes: captured in a region, called by a region between two segments (``eager``, for this reason),
    or outside. ``region`` is None outside of every region; then ``reason`` says why.

    ``chains`` names the orders besides data that the node is part of: nodes of one chain keep their order among
    themselves, and one of the chain BARRIER keeps its place among all nodes.
    """

    op: str
    region: int | None
    reason: str | None
    capturable: bool
    loc: str | None = None
    chains: tuple[str, ...] = ()
    eager: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a whole graph: nodes by FX name, and which regions are selected."""

    device: str
    nodes: dict[str, Placed]
    selected: frozenset[int]
    pipeline: str

    def digest(self) -> str:
        """A hash of everything that decides where Inductor's program is cut, for cache keys."""
        rows = [self.device, self.pipeline]
        rows += [
            f"{name} {p.op} {p.region} {p.reason} {p.capturable} {p.chains} {p.eager}" for name, p in self.nodes.items()
        ]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def decide(graph: Graph, device: str, pipeline: str) -> Decision:
    """Read the decision off a partitioned ``graph``. A region that was never judged by selection counts as selected."""
    nodes = {}
    for node in graph.nodes:
        region, effects = node.meta.get(REGION), node.effects
        chains = {RNG: effects.rng is not None, "collective": effects.collective is not None, BARRIER: effects.barrier}
        nodes[node.name] = Placed(
            op=node.op,
            region=region,
            reason=None if region is not None else node.meta.get(REASON) or "not-partitioned",
            capturable=node.meta.get(CAPTURABLE) is True,
            loc=str(node.loc) if node.loc else None,
            chains=tuple(chain for chain, member in chains.items() if member),
            eager=node.meta.get(REASON) if region is not None and node.meta.get(EAGER) else None,
        )
    selected = (index for index, region in graph.regions.items() if region.meta.get(SELECTED) is not False)
    return Decision(device, nodes, frozenset(selected), pipeline)
