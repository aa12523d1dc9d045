"""Random programs that are cut, over memory that holds NaN: results and inputs written in place are those of eager.

Inductor lays operands of a concatenation in its result, reuses memory, and returns views: whatever it does has to hold
where one part of a program is a region and the next is not. Where a pass draws regions at random, they are also the
partitions of the program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from torch._inductor import config

import pygraph
from pygraph.errors import VerifyError
from pygraph.ir import CAPTURABLE, REASON, REGION, SELECTED, Graph, Region, Stage, verify
from pygraph.passes import Pass, PassContext, PassResult
from pygraph.passes.analysis import dependence_lists
from pygraph.report.model import GraphReport

SIZE, LARGEST, CALLS = 6, 40, 4
OUTSIDE = "legality{forbid=[aten.sort.default,aten.copy_]},placement,partitioning"
"""Sorting, and what writes inputs, is outside of every region."""

EXAMPLES: dict[str, Any] = {
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


class Program:
    """A function that is made up line by line. ``shapes`` are those of its values by name."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.lines = ["def f(a, b, c):"]
        self.shapes: dict[str, tuple[int, ...]] = dict.fromkeys("abc", (SIZE, SIZE))

    def add(self, text: str, *shapes: tuple[int, ...]) -> list[str]:
        """A line that makes values of these shapes."""
        names = [f"t{len(self.shapes) + more}" for more in range(len(shapes))]
        self.lines.append(f"    {', '.join(names)} = {text}")
        self.shapes.update(zip(names, shapes, strict=True))
        return names

    def one_of(self, *shapes: tuple[int, ...]) -> str:
        """A value of one of these shapes, or any; a late one more often."""
        found = [name for name, shape in self.shapes.items() if shape in shapes or not shapes]
        return self.draw(st.sampled_from([*found, *found[-4:], *found[-4:]]))

    def step(self) -> None:
        kinds = (
            "one",
            "one",
            "two",
            "product",
            "product",
            "join",
            "join",
            "sort",
            "sort",
            "cut",
            "fold",
            "fill",
            "write",
        )
        kind, x = self.draw(st.sampled_from(kinds)), self.one_of()
        shape = self.shapes[x]
        match kind:
            case "one":
                self.add(f"{x}.{self.draw(st.sampled_from(['sin', 'cos', 'tanh', 'relu']))}()", shape)
            case "two":
                self.add(f"{x} {self.draw(st.sampled_from('+-*'))} {self.one_of(shape)}", shape)
            case "product":
                square = (SIZE, SIZE)
                self.add(f"({self.one_of(square)} @ {self.one_of(square)}).tanh()", square)
            case "join":
                self._join(x)
            case "sort":
                self.add(f"torch.sort({x}, -1)[0]", shape)
            case "cut" if shape[0] > 1:
                rows = self.draw(st.integers(1, shape[0] - 1))
                self.add(f"{x}[:{rows}]", (rows, *shape[1:]))
            case "fold":
                self.add(f"{x}.reshape(-1)", (shape[0] * (shape[1] if len(shape) > 1 else 1),))
            case "fill" if len(shape) > 1:
                (made,) = self.add(f"{x}.clone()", shape)
                rows = self.draw(st.integers(1, shape[0]))
                self.lines.append(f"    {made}[:{rows}] = {x}[:{rows}].sin()")
            case "write":
                written = self.draw(st.sampled_from("ab"))
                self.lines.append(f"    {written}.add_({self.one_of((SIZE, SIZE))}.tanh())")

    def _join(self, x: str) -> None:
        shape = self.shapes[x]
        axis = self.draw(st.integers(0, len(shape) - 1))
        fits = [s for s in self.shapes.values() if len(s) == len(shape) and s[1 - axis :][:1] == shape[1 - axis :][:1]]
        if len(shape) == 1:
            fits = [s for s in self.shapes.values() if len(s) == 1]
        parts = [x, *(self.one_of(*fits) for _ in range(self.draw(st.integers(1, 2))))]
        whole = list(shape)
        whole[axis] = sum(self.shapes[part][axis] for part in parts)
        if whole[axis] <= LARGEST:
            texts = [part + self.draw(st.sampled_from(["", ".sin()", ".tanh()"])) for part in parts]
            self.add(f"torch.cat([{', '.join(texts)}], {axis})", tuple(whole))

    def text(self) -> str:
        made = [name for name in self.shapes if name.startswith("t")] or ["a"]
        returned = self.draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        return "\n".join([*self.lines, f"    return {', '.join(dict.fromkeys([*returned, made[-1]]))},"])


@st.composite
def programs(draw: st.DrawFn) -> str:
    program = Program(draw)
    for _ in range(draw(st.integers(6, 16))):
        program.step()
    return program.text()


def poison() -> None:
    """Leave NaN in memory that is free now, of all sizes that a program uses."""
    held = [torch.full((count,), float("nan")) for count in range(SIZE, SIZE * LARGEST, SIZE) for _ in range(4)]
    del held


def results(function: Callable[..., Any], aliased: bool) -> list[torch.Tensor]:
    """The results of all calls, and the inputs after each. ``aliased``: two inputs share memory."""
    found: list[torch.Tensor] = []
    with config.patch(fx_graph_cache=False), torch.no_grad():
        for call in range(CALLS):
            generator = torch.Generator().manual_seed(call)
            given = [torch.randn(SIZE, SIZE, generator=generator) for _ in range(3)]
            if aliased:
                given[2] = given[0].view(SIZE, SIZE)
            poison()
            found += [x.clone() for x in (*function(*given), *given)]
    return found


def same_as_eager(text: str, fallbacks: bool, aliased: bool, passes: Sequence[Any] = (OUTSIDE,)) -> GraphReport:
    """With ``fallbacks``, Inductor calls operators, of which some return views. Programs do not count that it compiles
    wrongly by itself."""
    note(text)
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    function, patches = names["f"], {"fallback_by_default": fallbacks}
    torch._dynamo.reset()
    pygraph.reset()
    options = {"passes": passes, "ledger": False, "inductor": patches}
    expected, found = (
        results(function, aliased),
        results(torch.compile(function, backend="pygraph", options=options), aliased),
    )
    (report,) = pygraph.reports()
    assert report.error is None
    if not close(found, expected):
        torch._dynamo.reset()
        if not close(results(torch.compile(function, options=patches), aliased), expected):
            reject()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    return report


def close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in zip(found, expected, strict=True))


@settings(max_examples=2, **EXAMPLES)
@given(programs())
def test_a_cut_changes_no_result(text: str) -> None:
    same_as_eager(text, fallbacks=False, aliased=False)


@settings(max_examples=4, **EXAMPLES)
@given(programs(), st.booleans())
def test_a_cut_between_operators_that_inductor_calls_changes_no_result(text: str, aliased: bool) -> None:
    same_as_eager(text, fallbacks=True, aliased=aliased)


@pytest.mark.sweep
@settings(max_examples=400, **EXAMPLES)
@given(programs(), st.booleans(), st.booleans())
def test_cuts_change_no_result(text: str, fallbacks: bool, aliased: bool) -> None:
    same_as_eager(text, fallbacks, aliased)


# -- regions that a pass draws -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawRegions(Pass):
    """Any regions that the verifier accepts: runs of capturable nodes in any order, of which some are left outside,
    some joined, and some not selected."""

    name: ClassVar[str] = "draw-regions"
    requires: ClassVar[Stage] = Stage.PLACED
    ensures: ClassVar[Stage] = Stage.PARTITIONED

    seed: int = 0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        source = random.Random(self.seed)
        graph.reorder(graph.nodes[v] for v in any_order(dependence_lists(graph)[0], source))
        region, count = None, 0
        for node in graph.nodes:
            if source.random() < 0.4:
                region = None if source.random() < 0.2 else count
                count += region is not None
            if node.meta.get(CAPTURABLE) and region is not None:
                node.meta.set(REGION, region)
            else:
                region = None
                node.meta.set(REASON, node.meta.get(REASON) or "left-out")
        for _ in range(3):
            join(graph, source.randrange(count + 1), source.randrange(count + 1))
        for index in sorted({node.meta.get(REGION) for node in graph.nodes} - {None}):
            graph.regions[index] = Region()
            graph.regions[index].meta.set(SELECTED, source.random() < 0.8)
        return PassResult(True)


def any_order(before: Sequence[Sequence[int]], source: random.Random) -> list[int]:
    order: list[int] = []
    while len(order) < len(before):
        ready = [v for v in range(len(before)) if v not in order and all(p in order for p in before[v])]
        order.append(source.choice(ready[:3]))
    return order


def join(graph: Graph, one: int, other: int) -> None:
    """Make two regions one, where their union is a region."""
    moved = [node for node in graph.nodes if node.meta.get(REGION) == other]
    for node in moved:
        node.meta.set(REGION, one)
    trial = graph.clone()
    trial.regions.update({node.meta.get(REGION): Region() for node in graph.nodes if REGION in node.meta})
    try:
        verify(trial, Stage.PARTITIONED)
    except VerifyError:
        for node in moved:
            node.meta.set(REGION, other)


def partitions_are_regions(text: str, fallbacks: bool, aliased: bool, seed: int) -> None:
    report = same_as_eager(text, fallbacks, aliased, ["legality", "placement", DrawRegions(seed)])
    note(str(report.graph))
    regions = {node.name: node.meta.get(REGION) for node in report.graph.nodes if node.cost.launches != 0}
    made = [one for run in report.record.runs for step in run for one in step.made]
    across = [one for one in made if len({regions[name] for name in one.sources if name in regions}) > 1]
    several = {name for one in across for name in one.sources}  # Inductor computes nodes of several regions at once
    writes = any(node.op == "aten.copy_.default" for node in report.graph.nodes)  # behind all that reads an input there
    may_be_cut = writes or bool(several)
    differences = [one for one in report.record.differences if not (may_be_cut and one.startswith("region"))]
    assert {one.partition(" ")[0] for one in differences} <= several
    for region in report.regions:
        (planned,) = region.planned
        assert {regions[name] for name in region.nodes if name in regions} <= {planned}
        assert region.wrapped == (report.graph.regions[planned].meta.get(SELECTED) and bool(region.kernels))
    outside = {name for step in report.record.outside for name in step.origins}
    assert not any(regions.get(name) is not None for name in outside - several)
    planned = [region.planned for region in report.regions]
    assert may_be_cut or len(set(planned)) == len(planned)


@settings(max_examples=2, **EXAMPLES)
@given(programs(), st.booleans(), st.integers(0, 1000))
def test_regions_that_a_pass_draws_are_the_partitions(text: str, fallbacks: bool, seed: int) -> None:
    partitions_are_regions(text, fallbacks, False, seed)


@pytest.mark.sweep
@settings(max_examples=400, **EXAMPLES)
@given(programs(), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_any_regions_that_a_pass_draws_are_the_partitions(text: str, fallbacks: bool, aliased: bool, seed: int) -> None:
    partitions_are_regions(text, fallbacks, aliased, seed)
