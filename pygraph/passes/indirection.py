"""Indirection: how each region gets the address of each value that it reads from outside.

Finding the words to patch in a captured graph is the runtime's work; here it is decided what may move at all, and
what a move is expected to cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pygraph.analysis.regions import Addresses, RegionView, region_addresses, region_views
from pygraph.ir import Graph, OpaqueType, Parameter, ScalarType, Stage, Value
from pygraph.ir.cost import evaluate
from pygraph.ir.order import memory_roots
from pygraph.passes.base import Pass, PassContext, PassResult

__all__ = ["Indirection"]


@dataclass(frozen=True)
class Indirection(Pass):
    """Decide ``static``, ``patched`` or ``copied`` for every parameter of every region.

    before:  region 0 reads %x (any address), %w (a parameter), %s0 (a size)
    after:   %x patched (0.24 µs), %w static, %s0 static: it is part of the region's key

    static   the captured address stays right: the value promises a fixed address (guarded), is a constant, is opaque
             and held, or is a scalar, whose value selects among captures
    patched  launches that use the address are patched before a replay where it has moved; cost: patches of them all
    copied   the value is copied to a captured address where it moves: fewer patches where many launches use it, but
             time of the device at each replay. Inputs of the program only, and never memory that the region writes or
             that one of its results shares, since the caller would see the copy

    copies   ``never`` (trials of measured selection may still find that copying pays), where it is ``cheaper`` by the
             model, which knows of the host's time alone, or ``always`` where it is possible
    """

    name: ClassVar[str] = "indirection"
    requires: ClassVar[Stage] = Stage.PARTITIONED
    ensures: ClassVar[Stage] = Stage.INDIRECTED

    copies: Literal["never", "cheaper", "always"] = "never"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Fill ``parameters`` of each region, in order of first use."""
        values = ctx.values_for(graph)
        roots = memory_roots(graph)
        modified = False
        decisions: list[str] = []
        for index, view in region_views(graph).items():
            chosen = _Chooser(self.copies, ctx, values, roots, view).choose()
            region = graph.regions[index]
            modified |= list(region.parameters.items()) != list(chosen.items())
            region.parameters = chosen
            decisions += [parameter.decision for parameter in chosen.values()]
        counts = (f"{decisions.count(kind)} {kind}" for kind in ("static", "patched", "copied"))
        return PassResult(modified, (f"region parameters: {', '.join(counts)}",))


class _Chooser:
    """The decisions for one region."""

    def __init__(
        self,
        copies: str,
        ctx: PassContext,
        values: Mapping[str, int],
        roots: Mapping[Value, Value],
        view: RegionView,
    ) -> None:
        self.copies = copies
        self.ctx = ctx
        self.values = values
        self.roots = roots
        self.view = view
        self.addresses: Addresses = region_addresses(view, values)
        # two parameters may share memory outside the region, so what it writes is compared by root
        self.written = frozenset(roots[value] for value in self.addresses.written)
        self.shared = frozenset(owner for result in view.results for owner in self.addresses.owners[result])

    def choose(self) -> dict[Value, Parameter]:
        return {value: self._fixed(value) or self._moving(value) for value in self.view.reads}

    def _fixed(self, value: Value) -> Parameter | None:
        if isinstance(value.type, ScalarType):
            return Parameter("static", "scalar: part of the region's key", 0.0)
        if isinstance(value.type, OpaqueType):
            return Parameter("static", "opaque: held, and compared by identity", 0.0)
        if value.role == "constant":
            return Parameter("static", "constant of the compiled program", 0.0)
        if value.static:
            return Parameter("static", "its address stays: guarded", 0.0)
        return None

    def _moving(self, value: Value) -> Parameter:
        uses = self.addresses.uses[value]
        patch_us = None if uses is None else self.ctx.model.patch_us * uses
        if self.roots[value] in self.written:
            return Parameter("patched", "the region writes its memory", patch_us)
        if value in self.shared:
            return Parameter("patched", "a result shares its memory", patch_us)
        if value.producer is not None:
            return Parameter("patched", "the program itself makes it", patch_us)
        copy_us = self._copy_us(value)
        if self.copies == "always":
            return Parameter("copied", "asked for", copy_us)
        if patch_us is None or copy_us is None:
            return Parameter("patched", "launches or bytes are unknown", patch_us)
        figures = f"patching {uses:g} × {self.ctx.model.patch_us:g} µs, copying {copy_us:.2f} µs"
        copied = self.copies == "cheaper" and copy_us < patch_us
        return Parameter("copied", figures, copy_us) if copied else Parameter("patched", figures, patch_us)

    def _copy_us(self, value: Value) -> float | None:
        if isinstance(value.type, ScalarType | OpaqueType):
            return None
        nbytes = evaluate(value.type.nbytes, self.values)
        return None if nbytes is None else self.ctx.model.copy_time_us(nbytes)
