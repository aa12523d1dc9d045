"""Passes that do less than those of the default pipeline, so that a benchmark can show what each of them is worth.

They decide correctly, only not as well. Which side of a benchmark uses which is in ``sides``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import CAPTURABLE, DETAIL, REASON, REGION, Graph, KernelNode, Region, Stage
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.partitioning import NO_LAUNCH

__all__ = ["InProgramOrder", "NothingPlaced"]


@dataclass(frozen=True)
class NothingPlaced(Pass):
    """In the place of ``placement``: CPU values stay where they are, and cut the program there."""

    name: ClassVar[str] = "nothing-placed"
    requires: ClassVar[Stage] = Stage.JUDGED
    ensures: ClassVar[Stage] = Stage.PLACED

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:  # noqa: ARG002 - every pass is run with both
        """Leave the graph as it is."""
        return PassResult(False, ("nothing is placed",))


@dataclass(frozen=True)
class InProgramOrder(Pass):
    """In the place of ``partitioning``: a region is what is capturable in a row; nothing is reordered.

    before:  mm ─ item* ─ relu ─ item* ─ mm          (* not capturable)
    after:  [mm]₀ ─ item* ─ [relu]₁ ─ item* ─ [mm]₂
    """

    name: ClassVar[str] = "in-program-order"
    requires: ClassVar[Stage] = Stage.PLACED
    ensures: ClassVar[Stage] = Stage.PARTITIONED

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:  # noqa: ARG002 - every pass is run with both
        """Set REGION on nodes, and fill ``graph.regions``."""
        graph.regions.clear()
        open_region: int | None = None
        for node in graph.nodes:
            if not node.meta.get(CAPTURABLE):
                node.meta.drop(REGION)  # its reason is legality's
                open_region = None
                continue
            if open_region is None and node.cost.launches != 0:
                open_region = len(graph.regions)
                graph.regions[open_region] = Region(open_region)
            _join(node, open_region)
        return PassResult(True, (f"regions: {len(graph.regions)}, in program order",))


def _join(node: KernelNode, region: int | None) -> None:
    node.meta.drop(REGION)
    node.meta.drop(REASON)
    node.meta.drop(DETAIL)
    if region is not None:
        node.meta.set(REGION, region)
        return
    node.meta.set(REASON, NO_LAUNCH)
    node.meta.set(DETAIL, "launches nothing itself, and no region is open where it stands")
