"""Selection: which regions are worth a graph, by the device model, before anything has run.

Where ``measure`` is on, the runtime measures afterwards and has the last word; here only what cannot pay is left off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import DETAIL, REASON, SELECTED, Graph, Region, Stage
from pygraph.ir.cost import evaluate
from pygraph.passes.analysis import RegionView, region_addresses, region_views
from pygraph.passes.base import Pass, PassContext, PassResult

__all__ = ["GAIN", "TOO_SMALL", "UNKNOWN_COST", "Selection"]

GAIN = "gain"
"""REASON of a selected region: the model expects it to pay."""
TOO_SMALL = "too-small"
"""REASON of a region left off: too few launches for what its replay costs."""
UNKNOWN_COST = "unknown-cost"
"""REASON of a region selected because the model cannot tell: only measuring, where it is on, could decide."""


@dataclass(frozen=True)
class Selection(Pass):
    """Select the regions whose replay is expected to save host time.

    before:  region 0 with 40 launches, region 1 with a single one
    after:   region 0 selected (gain), region 1 left off (too-small)

        gain = launches × launch_us − (replay_us + launches × node_us + patches)      µs of host time per call

    where patches are the modelled costs of the parameters (every address moving) and of the results, which are
    allocated afresh for each call.

    min_gain_us   select only what saves more than this, µs per call
    """

    name: ClassVar[str] = "selection"
    requires: ClassVar[Stage] = Stage.INDIRECTED
    ensures: ClassVar[Stage] = Stage.SELECTED

    min_gain_us: float = 0.0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Set SELECTED, REASON and DETAIL of each region."""
        values = ctx.values_for(graph)
        modified = False
        for index, view in region_views(graph).items():
            region = graph.regions[index]
            before = region.meta.copy()
            self._decide(region, view, ctx, values)
            modified |= before != region.meta
        selected = sum(1 for region in graph.regions.values() if region.meta.get(SELECTED))
        return PassResult(modified, (f"regions selected: {selected} of {len(graph.regions)}",))

    def _decide(self, region: Region, view: RegionView, ctx: PassContext, values: Mapping[str, int]) -> None:
        launches = _launches(view, values)
        patches = _patches_us(region, view, ctx, values)
        if launches is None or patches is None:
            unknown = "the number of launches" if launches is None else "the cost of patching"
            _mark(region, True, UNKNOWN_COST, f"{unknown} is unknown: to be measured")
            return
        model = ctx.model
        plain, replay = model.uncaptured_us(launches), model.replayed_us(launches, patches)
        detail = f"launches before fusion: {launches:g}, uncaptured {plain:.2f} µs, replayed {replay:.2f} µs"
        pays = plain - replay > self.min_gain_us
        _mark(region, pays, GAIN if pays else TOO_SMALL, detail)


def _launches(view: RegionView, values: Mapping[str, int]) -> float | None:
    counts = [evaluate(node.cost.launches, values) for node in view.nodes]
    return None if None in counts else sum(count for count in counts if count is not None)


def _patches_us(region: Region, view: RegionView, ctx: PassContext, values: Mapping[str, int]) -> float | None:
    """Host time in µs to provide every address of a region, or None when part of it is unknown."""
    addresses = region_addresses(view, values)
    outside = frozenset(view.reads)
    fresh = dict.fromkeys(
        owner for result in view.results for owner in addresses.owners[result] if owner not in outside
    )
    uses = [addresses.uses[value] for value in fresh]
    costs = [None if count is None else count * ctx.model.patch_us for count in uses]
    costs += [parameter.cost_us for parameter in region.parameters.values()]
    return None if None in costs else sum(cost for cost in costs if cost is not None)


def _mark(region: Region, selected: bool, reason: str, detail: str) -> None:
    region.meta.set(SELECTED, selected)
    region.meta.set(REASON, reason)
    region.meta.set(DETAIL, detail)
