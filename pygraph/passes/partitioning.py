"""Partitioning: capturable nodes into the fewest convex regions whose quotient graph is acyclic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import CAPTURABLE, DETAIL, EAGER, REASON, REGION, Graph, KernelNode, Region, Stage
from pygraph.ir.cost import evaluate
from pygraph.passes.analysis import dependence_lists, node_time_us
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.region_order import Kind, assign, earliest, unit_order

NO_LAUNCH = "no-launch"
"""REASON of a capturable node outside every region: it launches nothing, and no region is in reach."""

_LEFT_OUT = {
    Kind.FREE: (NO_LAUNCH, "launches nothing itself, and no region lies between its operands and its first user"),
    Kind.LAUNCHES: ("max-regions", "its region was given up: the limit on regions keeps those with the most work"),
}


@dataclass(frozen=True)
class Partitioning(Pass):
    """Group capturable nodes into convex regions whose quotient graph is acyclic, and make regions adjacent.

    before:  mm ─ relu ─ item* ─ mm ─ relu          (* not capturable)
    after:  [mm ─ relu]₀ ─ item* ─ [mm ─ relu]₁

    The number of regions is the smallest that holds every capturable node with launches (proof in ``region_order``).
    Each region launches something: capturable nodes without launches join a region in reach, or stay outside with
    reason ``no-launch``. Nodes that a region may call are inside only between two nodes that launch. Regions are
    numbered in program order, which changes only as far as adjacency needs.

    Args:
        max_regions: number of regions to keep: those with the most modelled device time. Without a known time, launches
            count as smallest kernels; unknown launches count as one. Nodes of other regions join a kept region if
            dependences allow, else stay outside with reason ``max-regions``. None: keep all
    """

    name: ClassVar[str] = "partitioning"
    requires: ClassVar[Stage] = Stage.PLACED
    ensures: ClassVar[Stage] = Stage.PARTITIONED

    max_regions: int | None = None

    def __post_init__(self) -> None:
        if self.max_regions is not None and self.max_regions < 0:
            raise ValueError(f"max-regions cannot be negative: {self.max_regions}")

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Set REGION of nodes, fill ``graph.regions``, and reorder the nodes."""
        before = _state(graph)
        kinds = [_kind(node) for node in graph.nodes]
        sources, followers = dependence_lists(graph)
        early = earliest(kinds, sources)
        levels = sorted({time for time, kind in zip(early, kinds, strict=True) if kind is Kind.LAUNCHES})
        kept = self._kept(graph, ctx, kinds, early, levels)
        times = assign(kinds, followers, early, kept)
        _apply(graph, times, frozenset(kept), kinds, sources)
        return PassResult(before != _state(graph), tuple(_notes(graph, kinds, len(levels))))

    def _kept(
        self, graph: Graph, ctx: PassContext, kinds: Sequence[Kind], early: Sequence[int], levels: list[int]
    ) -> list[int]:
        if self.max_regions is None or len(levels) <= self.max_regions:
            return levels
        values, model = graph.hints, ctx.model
        work = dict.fromkeys(levels, 0.0)
        for node, kind, level in zip(graph.nodes, kinds, early, strict=True):
            if kind is Kind.LAUNCHES:
                time, launches = node_time_us(node, model, values), evaluate(node.cost.launches, values)
                work[level] += model.kernel_us * (1.0 if launches is None else launches) if time is None else time
        heaviest = sorted(levels, key=lambda level: (-work[level], level))
        return sorted(heaviest[: self.max_regions])


def _kind(node: KernelNode) -> Kind:
    if not node.meta.get(CAPTURABLE):
        return Kind.EAGER if node.meta.get(EAGER) else Kind.OUTSIDE
    return Kind.FREE if node.cost.launches == 0 else Kind.LAUNCHES


def _apply(
    graph: Graph, times: Sequence[int], kept: frozenset[int], kinds: Sequence[Kind], before: Sequence[Sequence[int]]
) -> None:
    """Reorder so that regions are adjacent, number them in that order, and annotate every capturable node."""
    nodes = graph.nodes
    first: dict[int, int] = {}
    units = [
        v if kind is Kind.OUTSIDE or time not in kept else first.setdefault(time, v)
        for v, (kind, time) in enumerate(zip(kinds, times, strict=True))
    ]
    units, leaders = _trimmed(units, kinds, first.values())
    order = unit_order(units, before)
    graph.regions.clear()
    index: dict[int, int] = {}
    for v in order:
        meta = nodes[v].meta
        meta.drop(REGION)
        inside = units[v] in leaders
        if inside:
            region = index.setdefault(units[v], len(index))
            graph.regions.setdefault(region, Region())
            meta.set(REGION, region)
        if kinds[v] in (Kind.OUTSIDE, Kind.EAGER):
            continue  # its reason is legality's
        meta.drop(REASON, DETAIL)
        if not inside:
            reason, detail = _LEFT_OUT[kinds[v]]
            meta.set(REASON, reason)
            meta.set(DETAIL, detail)
    if order != list(range(len(order))):
        graph.reorder(nodes[v] for v in order)


def _trimmed(units: Sequence[int], kinds: Sequence[Kind], leaders: Iterable[int]) -> tuple[list[int], frozenset[int]]:
    """Cut EAGER nodes off both ends of each region, with all nodes up to the last EAGER node before the first LAUNCHES
    node, and all from the first EAGER node after the last LAUNCHES node. Returns the new units and the leaders of
    regions. A unit is named by the position of its first member."""
    found, kept = list(units), list[int]()
    for leader in leaders:
        members = [v for v, unit in enumerate(units) if unit == leader]
        launches = [i for i, v in enumerate(members) if kinds[v] is Kind.LAUNCHES]
        calls = [i for i, v in enumerate(members) if kinds[v] is Kind.EAGER]
        begin = max((i + 1 for i in calls if i < launches[0]), default=0)
        end = min((i for i in calls if i > launches[-1]), default=len(members))
        for i, v in enumerate(members):
            found[v] = members[begin] if begin <= i < end else v
        kept.append(members[begin])
    return found, frozenset(kept)


def _state(graph: Graph) -> tuple[object, object]:
    """Everything that this pass can change, for comparison."""
    regions = [(index, region.parameters, region.meta) for index, region in graph.regions.items()]
    return [(node, node.meta.copy()) for node in graph.nodes], regions


def _notes(graph: Graph, kinds: Sequence[Kind], needed: int) -> list[str]:
    capturable = sum(kind in (Kind.FREE, Kind.LAUNCHES) for kind in kinds)
    inside = [kind for kind, node in zip(kinds, graph.nodes, strict=True) if REGION in node.meta]
    called = inside.count(Kind.EAGER)
    notes = [f"regions: {len(graph.regions)}, with {len(inside) - called} of {capturable} capturable nodes"]
    if called:
        notes.append(f"nodes that regions call between segments: {called}")
    if needed > len(graph.regions):
        notes.append(f"regions to cover all that launch: {needed}")
    return notes
