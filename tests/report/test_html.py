"""The page: well formed, self-contained, escaped; its picture complete, with edges that lead down and no overlaps."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

from hypothesis import given, settings

from pygraph.ir import Graph
from pygraph.passes import PassManager
from pygraph.report.html import render_html
from pygraph.report.model import GraphReport
from pygraph.report.picture import Box, draw
from pygraph.report.text import NOTHING
from pygraph.testing.strategies import operator_graphs
from tests.report.samples import EVIL, failed_report, full_report

VOID = {"meta"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def having(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def test_launches_are_drawn_as_captured_and_side_by_side() -> None:
    report = full_report()
    assert report.regions[0].record is not None
    report.regions[0].record.timeline = (("mm", 0, 0), (EVIL, 0, 1), ("add", 1, 0))
    page = Page(render_html([report]))
    one, other = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "lanes"]
    assert (one["aria-label"], other["aria-label"]) == ("as captured", "side by side")
    rows = [(attrs["x"], attrs["y"]) for tag, attrs in page.tags if tag == "rect" and attrs["height"] == "14"]
    assert rows == [("0", "2"), ("8", "2"), ("16", "2"), ("0", "2"), ("8", "2"), ("0", "20")]
    assert page.words().count(" ".join(EVIL.split())) >= 2
    assert "lanes" not in [attrs.get("class") for tag, attrs in Page(render_html([full_report()])).tags if tag == "svg"]


def test_it_is_well_formed_needs_nothing_from_outside_and_its_links_lead_somewhere() -> None:
    text = render_html([full_report(0), full_report(1), failed_report(2)])
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text.replace("<!doctype html>", ""))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "base"})
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "default-src 'none'; style-src 'unsafe-inline'" in page.having("content")
    ids = page.having("id")
    assert len(ids) == len(set(ids))
    assert {href.removeprefix("#") for href in page.having("href")} <= set(ids)


def test_what_users_write_is_shown_and_not_run() -> None:
    report = full_report()
    report.notes.append("<img src=x onerror=alert(1)>")
    report.error = "</style><script>alert(2)</script>"
    text = render_html([report])
    assert "<script" not in text
    assert "<img" not in text
    shown = "".join(Page(text).text)
    assert EVIL.split("\x1b")[0].strip() in shown
    assert "<img src=x onerror=alert(1)>" in shown


def test_it_says_what_the_report_says() -> None:
    shown = Page(render_html([full_report(), failed_report()])).words()
    assert "1 of 2 graphs given up 3 of 4 launches selected" in shown
    assert "75.0 %: 3 of 4 launches selected, 2 replayed, 1 outside" in shown
    assert "aten.item host-read the host reads a device value model.py:12 in layers.0.gate" in shown
    assert "region 1: address-escapes: a word is nobody's" in shown
    assert "Given up. LiftError: <unknown> operand & more" in shown
    assert "return ('<b>',)" in shown
    assert NOTHING in Page(render_html([])).words()
    bare = GraphReport(3, "forward", "cpu", graph=full_report().graph)
    assert "coverage unknown: no program was emitted" in Page(render_html([bare])).words()


def test_every_operator_is_a_box_in_its_colour() -> None:
    report = full_report()
    boxes = draw(report).boxes
    assert [(box.kind, box.label, box.region) for box in boxes] == [
        ("input", "x", None),
        ("region", "mm", 0),
        ("region", "relu", 0),
        ("outside", "item", None),
        ("host", "neg", None),
        ("region", "add", 1),
        ("region", "view", 1),
    ]
    assert boxes[3].note == "host-read"
    assert "not captured: host-read: the host reads a device value" in boxes[3].title
    assert "in layers.0.gate\nmodel.py:12  x = f('<script>" in boxes[3].title
    assert [box.free for box in boxes] == [False] * 6 + [True]
    page = Page(render_html([report]))
    assert ("g", {"id": "graph0_inference-3", "class": "outside"}) in page.tags
    assert page.having("href") == ["#graph0_inference-3"]


def test_edges_are_data_or_order_that_effects_demand() -> None:
    report = full_report()
    assert report.graph is not None
    report.graph.add_order(report.graph.node("mm"), report.graph.node("view"))
    picture = draw(report)
    assert (picture.flow.count("M"), picture.order.count("M")) == (7, 1)
    assert draw(failed_report()).boxes == ()


def overlap(one: Box, other: Box) -> bool:
    apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
    return not apart_x and one.y < other.y + other.height and other.y < one.y + one.height


@given(operator_graphs(max_nodes=25))
@settings(deadline=None, max_examples=60)
def test_any_graph_can_be_drawn(graph: Graph) -> None:
    PassManager("legality,placement,partitioning").run(graph)
    picture = draw(GraphReport(0, "inference", "cpu", graph))
    assert [box.node for box in picture.boxes if box.node is not None] == [node.name for node in graph.nodes]
    assert not any(overlap(*pair) for pair in itertools.combinations(picture.boxes, 2))
    for box in picture.boxes:
        assert 0 <= box.x <= box.x + box.width <= picture.width + 1
        assert 0 < box.y <= box.y + box.height <= picture.height
    foot, top = {(b.middle, b.y + b.height) for b in picture.boxes}, {(b.middle, b.y) for b in picture.boxes}
    for path in filter(None, f"{picture.flow} {picture.order}".replace("M", "\nM").split("\n")):
        numbers = [float(text) for text in re.findall(r"-?[\d.]+(?:e[+-]?\d+)?", path)]
        if len(numbers) > 3:
            assert any(abs(numbers[0] - x) + abs(numbers[1] - y) < 0.2 for x, y in foot)
            assert any(abs(numbers[-2] - x) + abs(numbers[-1] - y) < 0.2 for x, y in top)
            assert numbers[1] < numbers[-1], "edges lead down"
