"""Passes that keep or break their contract, a graph to run them on, and shorthands to run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from pygraph.errors import PassError
from pygraph.ir import REASON, REGION, Graph, Stage
from pygraph.passes import Pass, PassContext, PassManager, PassResult
from tests.passes.build import TENSOR, build

PIPELINE = "partitioning,indirection,selection"


@dataclass(frozen=True)
class Idle(Pass):
    """Changes nothing."""

    name: ClassVar[str] = "idle"

    size: int = 0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return PassResult(False, ("idled",))


@dataclass(frozen=True)
class Raising(Idle):
    name: ClassVar[str] = "raising"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        graph.add("half.done", [], [TENSOR])
        raise KeyError("gone")


@dataclass(frozen=True)
class Breaking(Idle):
    """Leaves a capturable node without region or reason."""

    name: ClassVar[str] = "breaking"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        graph.nodes[1].meta.drop(REGION)
        return PassResult(True)


@dataclass(frozen=True)
class Lying(Idle):
    """Annotates and does not say so, or the other way round."""

    name: ClassVar[str] = "lying"

    changes: bool = True

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if self.changes:
            graph.nodes[0].meta.set(REASON, "changed")
        return PassResult(not self.changes)


@dataclass(frozen=True)
class Wordless(Idle):
    name: ClassVar[str] = "wordless"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class Rewriting(Idle):
    """Stands for a pass that rewrites operators, after which all must be judged again."""

    name: ClassVar[str] = "rewriting"
    ensures: ClassVar[Stage | None] = Stage.LIFTED


def sample(stage: Stage = Stage.PLACED) -> Graph:
    return build("a: launch x", "b: launch a w", "u: host b", "c: launch u b", returns="c", stage=stage)


def run(pipeline: str | list[Pass | str], graph: Graph, **options: object) -> None:
    PassManager(pipeline, **options).run(graph)  # type: ignore[arg-type]


def failure(pipeline: str | list[Pass | str], graph: Graph, **options: object) -> PassError:
    with pytest.raises(PassError) as caught:
        run(pipeline, graph, **options)
    return caught.value
