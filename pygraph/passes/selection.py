"""Selection: which regions are worth a graph, by the device model, before anything has run.

Where ``measure`` is on, the runtime measures afterwards and has the last word; here only what cannot pay is left off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import DETAIL, REASON, SELECTED, DeviceModel, Graph, Region, Stage
from pygraph.passes.analysis import RegionView, known_sum, region_views
from pygraph.passes.base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class Selection(Pass):
    """Select the regions whose replay is expected to save host time.

    before:  region 0 with 40 launches, region 1 with a single one
    after:   region 0 selected (gain), region 1 left off (too-small)

        gain = launches × launch_us − (segments × replay_us + launches × node_us + patches)      µs of the host per call

    where segments lie between the nodes that the region calls, which cost the same in any case, and patches are the
    modelled costs of the parameters (every address moving) and of the results, which are allocated afresh for each
    call. A region with less than ``min_gain_us`` is ``too-small``. One of ``unknown-cost`` is selected: only measuring,
    where it is on, could decide.

    Args:
        min_gain_us: select only what saves more than this, µs per call
    """

    name: ClassVar[str] = "selection"
    requires: ClassVar[Stage] = Stage.INDIRECTED
    ensures: ClassVar[Stage] = Stage.SELECTED

    min_gain_us: float = 0.0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Set SELECTED, REASON and DETAIL of each region."""
        modified = False
        for index, view in region_views(graph).items():
            meta = graph.regions[index].meta
            before = meta.copy()
            selected, reason, detail = self._decide(graph.regions[index], view, ctx.model)
            meta.set(SELECTED, selected)
            meta.set(REASON, reason)
            meta.set(DETAIL, detail)
            modified |= before != meta
        count = sum(1 for region in graph.regions.values() if region.meta.get(SELECTED))
        return PassResult(modified, (f"regions selected: {count} of {len(graph.regions)}",))

    def _decide(self, region: Region, view: RegionView, model: DeviceModel) -> tuple[bool, str, str]:
        """Whether to select the region, with reason and detail."""
        used, outside = (owner for result in view.results for owner in view.owners[result]), frozenset(view.reads)
        made = known_sum(view.uses[owner] for owner in dict.fromkeys(used) if owner not in outside)
        read = known_sum(parameter.cost_us for parameter in region.parameters.values())
        if view.launches is None or made is None or read is None:
            unknown = "the number of launches" if view.launches is None else "the cost of patching"
            return True, "unknown-cost", f"{unknown} is unknown: to be measured"
        plain = view.launches * model.launch_us
        replay = view.segments * model.replay_us + view.launches * model.node_us + made * model.patch_us + read
        detail = f"launches before fusion: {view.launches:g}, uncaptured {plain:.2f} µs, replayed {replay:.2f} µs"
        pays = plain - replay > self.min_gain_us
        return pays, "gain" if pays else "too-small", detail
