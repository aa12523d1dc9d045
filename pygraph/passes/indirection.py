"""Indirection: how each region gets the address of each value that it reads from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import Graph, OpaqueType, Parameter, ScalarType, Stage, Value
from pygraph.passes.analysis import region_views
from pygraph.passes.base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class Indirection(Pass):
    """Decide for each parameter of each region: ``static`` or ``patched``.

    before:  region 0 reads %x (any address), %w (a parameter), %s0 (a size)
    after:   %x patched, %w static, %s0 static: part of the region's key

    static   the captured address stays valid: the value has a fixed, guarded address, is a constant, is a held opaque
             object, or is a scalar, which is part of the region's key
    patched  before a replay, launches that use the address are patched if it has changed
    """

    name: ClassVar[str] = "indirection"
    requires: ClassVar[Stage] = Stage.PARTITIONED
    ensures: ClassVar[Stage] = Stage.INDIRECTED

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:  # noqa: ARG002
        """Fill ``parameters`` of each region, in order of first use."""
        modified = False
        decisions: list[str] = []
        for index, view in region_views(graph).items():
            chosen = {value: _decided(value) for value in view.reads}
            region = graph.regions[index]
            modified |= list(region.parameters.items()) != list(chosen.items())
            region.parameters = chosen
            decisions += [parameter.decision for parameter in chosen.values()]
        counts = (f"{decisions.count(kind)} {kind}" for kind in ("static", "patched"))
        return PassResult(modified, (f"region parameters: {', '.join(counts)}",))


def _decided(value: Value) -> Parameter:
    if isinstance(value.type, ScalarType):
        return Parameter("static", "scalar: part of the region's key")
    if isinstance(value.type, OpaqueType):
        return Parameter("static", "opaque: held, and compared by identity")
    if value.role == "constant":
        return Parameter("static", "constant of the compiled program")
    if value.static:
        return Parameter("static", "its address stays: guarded")
    return Parameter("patched", "its address may move")
