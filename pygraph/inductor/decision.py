"""The decisions of the passes in the form that steers Inductor: the region of each FX node, or why it has none.

They are read from a partitioned graph, and are independent of Inductor itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pygraph.ir import CAPTURABLE, CONSTANT, EAGER, REASON, REGION, SELECTED, Graph, KernelNode
from pygraph.passes.analysis import dependence_lists
from pygraph.passes.region_order import unit_order

BARRIER = "barrier"
RNG = "rng"


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of one node: captured in a region, called by a region between two segments (``eager`` is the reason),
    or outside of every region, where ``region`` is None and ``reason`` says why.

    ``chains`` names the orders, other than data dependence, that bind the node: nodes of one chain keep their relative
    order, and a node of the chain BARRIER keeps its place among all nodes.

    ``turn`` is the time at which the node runs under an exact decision: odd in a region, even on the host between two
    regions; None if it may run at any time. ``launches`` is False for a node that launches nothing: a view, a constant.
    """

    op: str
    region: int | None
    reason: str | None
    capturable: bool
    loc: str | None = None
    module: str = ""
    chains: tuple[str, ...] = ()
    eager: str | None = None
    turn: int | None = None
    launches: bool = True

    @property
    def is_free(self) -> bool:
        """True if the node may be captured and launches nothing: it has no place of its own."""
        return self.capturable and not self.launches


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a whole graph.

    Args:
        device: the kind of device whose work is captured
        nodes: the place of each node, by FX name
        selected: the regions that selection accepted, or never judged
        pipeline: the text of the passes
        exact: a user's pass drew the regions: each becomes one partition of the program, and nothing is fused across
            its bounds. Otherwise Inductor may move nodes across the bounds, and join two regions
    """

    device: str
    nodes: dict[str, Placed]
    selected: frozenset[int]
    pipeline: str
    exact: bool = False

    def digest(self) -> str:
        """Hash of everything that determines where Inductor's program is cut, for cache keys."""
        rows = [self.device, self.pipeline, str(sorted(self.selected))]
        rows += [
            f"{name} {p.op} {p.region} {p.reason} {p.capturable} {p.chains} {p.eager} {p.turn}"
            for name, p in self.nodes.items()
        ]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def decide(graph: Graph, device: str, pipeline: str, *, exact: bool = False) -> Decision:
    """Read the decision off a partitioned ``graph``. A region that selection never judged counts as selected."""
    turns = _turns(graph) if exact else {}
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
            module=node.module,
            chains=tuple(chain for chain, member in chains.items() if member),
            eager=node.meta.get(REASON) if region is not None and node.meta.get(EAGER) else None,
            turn=turns.get(node),
            launches=node.cost.launches != 0 and node.op != CONSTANT,
        )
    selected = (index for index, region in graph.regions.items() if region.meta.get(SELECTED) is not False)
    return Decision(device, nodes, frozenset(selected), pipeline, exact)


def _turns(graph: Graph) -> dict[KernelNode, int]:
    """The turn of each node: regions run one after the other, in an order that dependences allow. Nodes that launch
    nothing and are in no region have no turn."""
    first: dict[int, int] = {}
    regions = [node.meta.get(REGION) for node in graph.nodes]
    units = [v if region is None else first.setdefault(region, v) for v, region in enumerate(regions)]
    turns: dict[KernelNode, int] = {}
    now, last = 0, None
    for v in unit_order(units, dependence_lists(graph)[0]):
        node, region = graph.nodes[v], regions[v]
        if region is None and (node.cost.launches == 0 or node.op == CONSTANT):
            continue
        if region is None:
            now += now % 2
        elif region != last:
            now += 1 + now % 2
        last, turns[node] = region, now
    return turns
