"""A pass of one's own: keep what chosen functions of the model compute out of every captured region.

Run it with ``python examples/custom_pass.py``. The pass registers itself and is named in a pipeline; the report then
gives its reason for the operators that stayed outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import pygraph
from pygraph.ir import CAPTURABLE, DETAIL, REASON, Graph, KernelNode, Stage, sources
from pygraph.passes import Pass, PassContext, PassResult, register


@register
@dataclass(frozen=True)
class KeepOut(Pass):
    """Leave uncaptured what the named functions compute.

    before:  mm✓ ─ relu✓ ─ mm✓             (relu was written in the function 'debug')
    after:   mm✓ ─ relu✗ kept-out ─ mm✓
    """

    name: ClassVar[str] = "keep-out"
    requires: ClassVar[Stage] = Stage.JUDGED
    ensures: ClassVar[Stage] = Stage.JUDGED

    functions: tuple[str, ...] = ()

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        chosen = [node for node in graph.nodes if node.meta.get(CAPTURABLE) and self._written_in(node)]
        for node in chosen:
            node.meta.set(CAPTURABLE, False)
            node.meta.set(REASON, "kept-out")
            node.meta.set(DETAIL, f"it was written in '{self._written_in(node)[0]}'")
        return PassResult(bool(chosen), (f"nodes kept out: {len(chosen)}",))

    def _written_in(self, node: KernelNode) -> list[str]:
        return [source.function for source in sources(node) if source.function in self.functions]


PIPELINE = "legality,keep-out{functions=[debug]},placement,partitioning,indirection,selection"


def debug(x: torch.Tensor) -> torch.Tensor:
    """A cumulative sum, which the pass keeps out of every captured region."""
    return torch.cumsum(x, 0)


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two products around ``debug``."""
    return debug((x @ w).relu()) @ w


def main() -> None:
    """Compile and explain the model with the pass in its pipeline."""
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    print(pygraph.explain(model, x, w, options={"passes": PIPELINE}))


if __name__ == "__main__":
    main()
