"""Partitioning: capturable nodes into the fewest convex regions whose quotient graph is acyclic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import CAPTURABLE, DETAIL, REASON, REGION, Graph, KernelNode, Region, Stage
from pygraph.ir.cost import evaluate
from pygraph.passes.analysis import dependence_lists, node_time_us
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.region_order import Kind, assign, earliest, unit_order

__all__ = ["NO_LAUNCH", "Partitioning"]

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

    The number of regions is the least with which every capturable node that launches is in one (``region_order`` has
    the proof). A region always launches something: capturable nodes that launch nothing join a region in reach, or
    stay outside with reason ``no-launch``. Regions are numbered in program order, which is changed as little as
    adjacency asks.

    max_regions   keep only so many regions: those with the most modelled device time (unknown time counts its
                  launches, unknown launches count one each). Nodes of the others join a kept region where their
                  dependences allow, else they stay outside with reason ``max-regions``.
    """

    name: ClassVar[str] = "partitioning"
    requires: ClassVar[Stage] = Stage.PLACED
    ensures: ClassVar[Stage] = Stage.PARTITIONED

    max_regions: int | None = None

    def __post_init__(self) -> None:
        if self.max_regions is not None and self.max_regions < 0:
            raise ValueError(f"max-regions cannot be negative: {self.max_regions}")

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Set REGION on nodes, fill ``graph.regions``, reorder the nodes."""
        before = _state(graph)
        kinds = [_kind(node) for node in graph.nodes]
        lists = graph.cached(dependence_lists)
        early = earliest(kinds, lists.before)
        levels = sorted({time for time, kind in zip(early, kinds, strict=True) if kind is Kind.LAUNCHES})
        kept = self._kept(graph, ctx, kinds, early, levels)
        times = assign(kinds, lists.after, early, kept)
        _apply(graph, times, frozenset(kept), kinds, lists.before)
        return PassResult(before != _state(graph), tuple(_notes(graph, kinds, len(levels))))

    def _kept(
        self, graph: Graph, ctx: PassContext, kinds: Sequence[Kind], early: Sequence[int], levels: list[int]
    ) -> list[int]:
        if self.max_regions is None or len(levels) <= self.max_regions:
            return levels
        values, model = ctx.values_for(graph), ctx.model
        work = dict.fromkeys(levels, 0.0)
        for node, kind, level in zip(graph.nodes, kinds, early, strict=True):
            if kind is Kind.LAUNCHES:
                time, launches = node_time_us(node, model, values), evaluate(node.cost.launches, values)
                work[level] += model.kernel_us * (1.0 if launches is None else launches) if time is None else time
        heaviest = sorted(levels, key=lambda level: (-work[level], level))
        return sorted(heaviest[: self.max_regions])


def _kind(node: KernelNode) -> Kind:
    if not node.meta.get(CAPTURABLE):
        return Kind.OUTSIDE
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
    leaders = frozenset(first.values())
    order = unit_order(units, before)
    graph.regions.clear()
    index: dict[int, int] = {}
    for v in order:
        meta = nodes[v].meta
        meta.drop(REGION)
        if kinds[v] is Kind.OUTSIDE:
            continue  # its reason is legality's
        meta.drop(REASON, DETAIL)
        if units[v] in leaders:
            region = index.setdefault(units[v], len(index))
            graph.regions.setdefault(region, Region())
            meta.set(REGION, region)
        else:
            reason, detail = _LEFT_OUT[kinds[v]]
            meta.set(REASON, reason)
            meta.set(DETAIL, detail)
    if order != list(range(len(order))):
        graph.reorder(nodes[v] for v in order)


def _state(graph: Graph) -> tuple[object, object]:
    """What this pass can change, to compare."""
    regions = [(index, region.parameters, region.meta) for index, region in graph.regions.items()]
    return [(node, node.meta.copy()) for node in graph.nodes], regions


def _notes(graph: Graph, kinds: Sequence[Kind], needed: int) -> list[str]:
    capturable = sum(kind is not Kind.OUTSIDE for kind in kinds)
    inside = sum(REGION in node.meta for node in graph.nodes)
    notes = [f"regions: {len(graph.regions)}, with {inside} of {capturable} capturable nodes"]
    if needed > len(graph.regions):
        notes.append(f"regions to cover all that launch: {needed}")
    return notes
