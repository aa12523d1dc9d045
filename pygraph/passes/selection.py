"""Selection: which regions are worth a graph, before anything has run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import DETAIL, REASON, SELECTED, Graph, Stage
from pygraph.passes.analysis import region_views
from pygraph.passes.base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class Selection(Pass):
    """Select the regions of which a replay has fewer launches.

    before:  region 0 with 40 launches, region 1 with a single one
    after:   region 0 selected (gain), region 1 left off (too-small)

    A replay launches each segment between the nodes that the region calls at once: a single kernel gains nothing by it.
    Whether captures pay that are made for more and more sizes, real calls tell. A region of unknown launches is
    selected.
    """

    name: ClassVar[str] = "selection"
    requires: ClassVar[Stage] = Stage.INDIRECTED
    ensures: ClassVar[Stage] = Stage.SELECTED

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:  # noqa: ARG002
        """Set SELECTED, REASON and DETAIL of each region."""
        modified = False
        for index, view in region_views(graph).items():
            meta = graph.regions[index].meta
            before = meta.copy()
            launches, segments = view.launches, view.segments
            pays = launches is None or launches > segments
            known = "an unknown number" if launches is None else f"{launches:g}"
            meta.set(SELECTED, pays)
            meta.set(REASON, "gain" if pays else "too-small")
            meta.set(DETAIL, f"launches before fusion: {known}, replayed as {segments}")
            modified |= before != meta
        count = sum(1 for region in graph.regions.values() if region.meta.get(SELECTED))
        return PassResult(modified, (f"regions selected: {count} of {len(graph.regions)}",))
