"""What regions consist of, and which addresses their launches are given."""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.ir import REGION, Graph, Value
from pygraph.passes.analysis import RegionView, region_views
from tests.passes.build import build


def views(graph: Graph, **members: int) -> dict[int, RegionView]:
    for name, region in members.items():
        graph.node(name).meta.set(REGION, region)
    return region_views(graph, {})


def names(values: Sequence[Value]) -> str:
    return " ".join(value.name for value in values)


def test_members_reads_and_results() -> None:
    graph = build("a: launch y x", "b: launch a w", "u: host b", "c: launch a u x", "d: launch c", returns="d b")
    found = views(graph, a=0, b=0, c=1, d=1)
    assert [node.name for node in found[0].nodes] == ["a", "b"]
    assert (names(found[0].reads), names(found[0].results)) == ("y x w", "a b")
    assert (names(found[1].reads), names(found[1].results)) == ("a u x", "d")


def test_regions_come_in_order_of_their_first_node() -> None:
    graph = build("a: launch x", "b: launch x")
    assert list(views(graph, a=7, b=2)) == [7, 2]


def test_no_regions() -> None:
    assert region_views(build("a: launch x"), {}) == {}


def test_addresses_follow_aliases() -> None:
    graph = build("v: view x", "a: launch v y", "m: write a", "b: launch m")
    (view,) = views(graph, v=0, a=0, m=0, b=0).values()
    x, y, a, b = (graph.value(name) for name in "xyab")
    assert view.owners[graph.value("v")] == (x,)
    assert view.owners[graph.value("m")] == (a,)
    assert view.uses == {x: 1.0, y: 1.0, a: 3.0, b: 1.0}


def test_an_unknown_launch_count_spoils_what_it_touches_alone() -> None:
    graph = build("a: unknown x", "b: launch y")
    (view,) = views(graph, a=0, b=0).values()
    uses = {value.name: count for value, count in view.uses.items()}
    assert uses == {"x": None, "a": None, "y": 1.0, "b": 1.0}
