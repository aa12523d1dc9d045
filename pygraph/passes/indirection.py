"""Indirection: how each region gets the address of each value that it reads from outside, and at which cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import Graph, OpaqueType, Parameter, ScalarType, Stage, Value
from pygraph.passes.analysis import region_views
from pygraph.passes.base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class Indirection(Pass):
    """Decide ``static`` or ``patched`` for every parameter of every region.

    before:  region 0 reads %x (any address), %w (a parameter), %s0 (a size)
    after:   %x patched (0.24 µs), %w static, %s0 static: it is part of the region's key

    static   the captured address stays right: the value promises a fixed address (guarded), is a constant, is opaque
             and held, or is a scalar, whose value selects among captures
    patched  launches that use the address are patched before a replay where it has moved; cost: patches of them all
    """

    name: ClassVar[str] = "indirection"
    requires: ClassVar[Stage] = Stage.PARTITIONED
    ensures: ClassVar[Stage] = Stage.INDIRECTED

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Fill ``parameters`` of each region, in order of first use."""
        modified = False
        decisions: list[str] = []
        for index, view in region_views(graph).items():
            chosen = {value: _fixed(value) or _patched(view.uses[value], ctx.model.patch_us) for value in view.reads}
            region = graph.regions[index]
            modified |= list(region.parameters.items()) != list(chosen.items())
            region.parameters = chosen
            decisions += [parameter.decision for parameter in chosen.values()]
        counts = (f"{decisions.count(kind)} {kind}" for kind in ("static", "patched"))
        return PassResult(modified, (f"region parameters: {', '.join(counts)}",))


def _fixed(value: Value) -> Parameter | None:
    if isinstance(value.type, ScalarType):
        return Parameter("static", "scalar: part of the region's key", 0.0)
    if isinstance(value.type, OpaqueType):
        return Parameter("static", "opaque: held, and compared by identity", 0.0)
    if value.role == "constant":
        return Parameter("static", "constant of the compiled program", 0.0)
    if value.static:
        return Parameter("static", "its address stays: guarded", 0.0)
    return None


def _patched(uses: float | None, patch_us: float) -> Parameter:
    if uses is None:
        return Parameter("patched", "the number of launches is unknown")
    return Parameter("patched", f"patching {uses:g} × {patch_us:g} µs", patch_us * uses)
