"""What the picture shows: operators one by one, or regions where there are too many, with no cycle between boxes."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.inductor.decision import decide
from pygraph.ir import REGION, Graph, dependences
from pygraph.passes import PassManager
from pygraph.report.model import GraphReport
from pygraph.report.picture import draw
from pygraph.report.scene import Scene, scene
from tests.report.samples import MATRIX, failed_report, full_report
from tests.strategies import operator_graphs


def box_of(shown: Scene, name: str) -> int:
    return next(i for i, box in enumerate(shown.boxes) if name in box.names)


def test_every_operator_is_a_box_in_its_colour() -> None:
    shown = scene(full_report())
    assert [(box.kind, box.label, box.region) for box in shown.boxes] == [
        ("input", "x", None),
        ("region", "mm", 0),
        ("region", "relu", 0),
        ("outside", "item", None),
        ("host", "neg", None),
        ("region", "add", 1),
        ("region", "view", 1),
    ]
    item = shown.boxes[3]
    assert item.note == "host-read"
    assert "not captured: host-read: the host reads a device value" in item.title
    assert "model.py:12  x = f('<script>" in item.title
    assert [box.free for box in shown.boxes] == [False] * 6 + [True]


def test_links_are_data_or_order() -> None:
    report = full_report()
    assert report.graph is not None
    report.graph.add_order(report.graph.node("mm"), report.graph.node("view"))
    links = {(link.source, link.target): link.order for link in scene(report).links}
    assert links == {
        (0, 1): False,
        (1, 2): False,
        (2, 3): False,
        (3, 4): False,
        (2, 5): False,
        (4, 5): False,
        (5, 6): False,
        (1, 6): True,
    }


def test_many_operators_are_drawn_region_by_region() -> None:
    shown = scene(full_report(), limit=5)
    assert [(box.kind, box.label) for box in shown.boxes] == [
        ("region", "region 0"),
        ("outside", "1 not captured"),
        ("region", "region 1"),
    ]
    assert "6 operators: whole regions are drawn" in shown.note
    assert [(link.source, link.target) for link in shown.links] == [(0, 1), (0, 2), (1, 2)]
    assert "aten.item: host-read: the host reads a device value at model.py:12" in shown.boxes[1].title


def test_a_limit_below_the_number_of_regions_leaves_boxes_out_and_says_so() -> None:
    shown = scene(full_report(), limit=2)
    assert len(shown.boxes) == 2
    assert "1 of them are left out" in shown.note


def test_no_graph_no_picture() -> None:
    assert scene(failed_report()).boxes == ()
    picture = draw(scene(failed_report()))
    assert (picture.width, picture.height, picture.drawn) == (0, 0, ())


def test_regions_that_depend_on_each_other_are_still_drawn() -> None:
    graph = Graph()
    value = graph.add_input(MATRIX, "x")
    for i in range(4):
        node = graph.add("aten.relu", (value,), (MATRIX,))
        node.meta.set(REGION, i % 2)
        value = node.output
    graph.set_outputs((value,))
    shown = scene(GraphReport(0, "inference", "cpu", graph), limit=1)
    assert len(shown.boxes) == 1
    shown = scene(GraphReport(0, "inference", "cpu", graph), limit=3)
    assert [box.label for box in shown.boxes] == ["region 0", "region 1"]


@given(operator_graphs(), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_collapsed_boxes_hold_every_operator_once_and_links_lead_forward(graph: Graph, limit: int) -> None:
    PassManager("legality,placement,partitioning").run(graph)
    report = GraphReport(0, "inference", "cpu", graph, decision=decide(graph, "cpu", ""))
    shown = scene(report, limit)
    assert len(shown.boxes) <= max(limit, len(graph) + len(graph.inputs))
    assert all(link.source < link.target for link in shown.links)
    held = [name for box in shown.boxes for name in box.names]
    assert len(held) == len(set(held))
    if "left out" in shown.note:
        return
    assert set(held) == {node.name for node in graph.nodes}
    linked = {(link.source, link.target) for link in shown.links}
    crossing = {(box_of(shown, a.name), box_of(shown, b.name)) for a, b in dependences(graph)}
    assert {pair for pair in crossing if pair[0] != pair[1]} == {
        pair for pair in linked if shown.boxes[pair[0]].kind != "input"
    }
    assert nx.is_directed_acyclic_graph(nx.DiGraph(linked))


@given(operator_graphs(max_nodes=25))
@settings(deadline=None, max_examples=40)
def test_any_graph_can_be_drawn(graph: Graph) -> None:
    picture = draw(scene(GraphReport(0, "inference", "cpu", graph)))
    for item in picture.drawn:
        assert item.x >= 0
        assert item.x + item.width <= picture.width + 1
        assert item.y > 0
        assert item.y + item.height <= picture.height
