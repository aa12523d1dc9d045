"""Selection: decide before the first run which regions are worth a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import DETAIL, REASON, SELECTED, Graph, Stage
from pygraph.passes.analysis import region_views
from pygraph.passes.base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class Selection(Pass):
    """Select regions with more launches than their replay.

    before:  region 0 with 40 launches, region 1 with one
    after:   region 0 selected (gain), region 1 not selected (too-small)

    A replay has one launch for each segment between the nodes that the region calls, so a single kernel gains nothing.
    A region with an unknown number of launches is selected. The ledger decides at run time if captures of more sizes
    pay.
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
