"""Partitioning by example: what is in which region, what stays outside and why, and in which order."""

from __future__ import annotations

import pytest

from pygraph.ir import DETAIL, REASON, REGION, Stage, symbol
from pygraph.ir.cost import Cost
from pygraph.ir.verify import verify
from pygraph.passes.base import PassContext
from pygraph.passes.partitioning import Partitioning
from tests.passes.build import build, order, regions

CTX = PassContext()


@pytest.mark.parametrize(
    ("rows", "found", "program"),
    [
        (("b: launch x", "a: launch x", "c: view a", "d: launch b c"), "b a c d", "b a c d"),
        # independent work on both sides of a cut needs no second region
        (("a: launch x", "u: host y", "b: launch a"), "a b", "a b u"),
        # a mutation keeps its place between reads: u reads what m writes later
        (("a: launch x", "u: host x", "m: write x", "b: launch x"), "a m b", "u a m b"),
        # a view goes with its first user, and one for the host stays with its producer
        (("a: launch x", "v: view a", "u: host a", "b: launch v u"), "a | v b", "a u v b"),
        (("a: launch x", "v: view a", "u: host v"), "a v", "a v u"),
        # {a, d} and {b, c} would each be convex, yet each would wait for the other
        (
            ("a: launch x", "u: host a", "b: launch u", "c: launch y", "v: host c", "d: launch v"),
            "a c | b d",
            "a c u v b d",
        ),
        # a region calls what lies between its launches, and neither begins nor ends so, whatever depends on what
        (("a: launch x", "c: call a", "b: launch c"), "a c b", "a c b"),
        (("c: call x", "a: launch c", "b: launch a", "d: call b"), "a b", "c a b d"),
        (("c: call x", "v: view c", "a: launch y", "b: launch v"), "v a b", "c v a b"),
        (("a: launch x", "c: call y", "b: launch x", "d: call a", "e: launch x"), "a c b d e", "a c b d e"),
        (("c: call x", "d: call c"), "", "c d"),
        (("a: launch x", "c: call a", "u: host c", "d: call u", "b: launch d"), "a | b", "a c u d b"),
        # unknown launches count as launches
        (("a: unknown x",), "a", "a"),
    ],
)
def test_regions_and_order(rows: tuple[str, ...], found: str, program: str) -> None:
    graph = build(*rows)
    Partitioning().run(graph, CTX)
    assert (regions(graph), order(graph)) == (found, program)


@pytest.mark.parametrize("kind", ["view", "size"])
def test_what_launches_nothing_makes_no_region(kind: str) -> None:
    graph = build("a: launch x", "u: host a", f"v: {kind} u", "w1: host v", "b: launch w1", returns="b")
    Partitioning().run(graph, CTX)
    assert regions(graph) == "a | b"
    left = graph.node("v").meta
    assert (left.get(REGION), left.get(REASON)) == (None, "no-launch")
    assert "launches nothing" in (left.get(DETAIL) or "")


def test_the_limit_keeps_the_most_work() -> None:
    rows = ("a: launch x", "u: host a", "b: heavy u", "v: host b", "c: launch v", "d: launch c")
    graph = build(*rows, returns="d")
    notes = Partitioning(max_regions=2).run(graph, CTX).notes
    assert regions(graph) == "b | c d"
    assert graph.node("a").meta.get(REASON) == "max-regions"
    assert notes == ("regions: 2, with 3 of 4 capturable nodes", "regions to cover all that launch: 3")
    Partitioning(max_regions=1).run(graph, CTX)
    assert regions(graph) == "b"
    verify(graph, Stage.PARTITIONED)


def test_nodes_of_a_region_given_up_join_a_kept_one_where_they_can() -> None:
    graph = build("a: launch x", "e: launch x", "u: host a", "b: heavy u e", returns="b")
    Partitioning().run(graph, CTX)
    assert regions(graph) == "a e | b"
    Partitioning(max_regions=1).run(graph, CTX)
    assert regions(graph) == "e b"


def test_work_of_unknown_time_counts_its_launches() -> None:
    graph = build("a: unknown x", "u: host a", "b: unknown u")
    graph.node("b").cost = Cost(None, None, None, symbol("s0"))
    graph.hints["s0"] = 3
    Partitioning(max_regions=1).run(graph, CTX)
    assert regions(graph) == "b"


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max-regions cannot be negative"):
        Partitioning(max_regions=-1)
