"""The page: well formed, self-contained, escaped; its picture complete, with edges that lead down and no overlaps."""

from __future__ import annotations

import itertools
import math
import operator
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from hypothesis import given, settings
from rich.color import ColorSystem
from rich.style import Style

from pygraph.colours import colour, hue
from pygraph.ir import DETAIL, Graph, parse_graph
from pygraph.passes import PassManager
from pygraph.report.html import render_html, render_svg
from pygraph.report.model import GraphReport
from pygraph.report.picture import Box, draw, render_dot
from pygraph.report.text import NOTHING, render_text
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
    assert (picture.path("flow").count("M"), picture.path("order").count("M")) == (7, 1)
    assert draw(failed_report()).boxes == ()


def overlap(one: Box, other: Box) -> bool:
    apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
    return not apart_x and one.y < other.y + other.height and other.y < one.y + one.height


@given(operator_graphs(max_nodes=25))
@settings(max_examples=60)
def test_any_graph_can_be_drawn(graph: Graph) -> None:
    PassManager("legality,placement,partitioning").run(graph)
    picture = draw(GraphReport(0, "inference", "cpu", graph))
    assert [box.node for box in picture.boxes if box.node is not None] == [node.name for node in graph.nodes]
    assert not any(overlap(*pair) for pair in itertools.combinations(picture.boxes, 2))
    for box in picture.boxes:
        assert 0 <= box.x <= box.x + box.width <= picture.width + 1
        assert 0 < box.y <= box.y + box.height <= picture.height
    for edge in picture.edges:
        source, target = picture.boxes[edge.source], picture.boxes[edge.target]
        drawn = points(edge.path)
        assert near(drawn[0], (source.middle, source.y + source.height))
        assert near(drawn[-1], (target.middle, target.y))
        assert all(above[1] < below[1] for above, below in itertools.pairwise(drawn)), "edges lead down"
        for x, y in drawn[1:-1]:
            assert 0 <= x <= picture.width
            assert not any(covers(box, x, y) for box in picture.boxes), "edges pass beside boxes"


def points(path: str) -> list[tuple[float, float]]:
    """Points on a path of lines and curves, from its start to its end."""
    found: list[tuple[float, float]] = []
    for command, text in re.findall(r"([MLC])([^MLC]*)", path):
        numbers = [float(each) for each in text.split()]
        ends = list(zip(numbers[::2], numbers[1::2], strict=True))
        if command == "C":
            (a, b), (c, d), (e, f), (g, h) = found[-1], *ends
            for t in (each / 8 for each in range(1, 9)):
                s = 1 - t
                weights = (s**3, 3 * s * s * t, 3 * s * t * t, t**3)
                found.append(tuple(sum(map(operator.mul, weights, axis)) for axis in ((a, c, e, g), (b, d, f, h))))
        elif command == "L":
            (x, y), (to_x, to_y) = found[-1], ends[0]
            found += [(x + (to_x - x) * t / 8, y + (to_y - y) * t / 8) for t in range(1, 9)]
        else:
            found += ends
    return found


def near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return math.dist(one, other) < 0.2


def covers(box: Box, x: float, y: float) -> bool:
    return box.x < x < box.x + box.width and box.y + 0.2 < y < box.y + box.height - 0.2


def test_a_residual_edge_is_drawn_beside_what_it_passes() -> None:
    graph = parse_graph(
        """graph @main (%x : f32[4]@cpu) {
  %a = aten.a_rather_long_name(%x) : f32[4]@cpu
  %b = aten.a_rather_long_name(%a) : f32[4]@cpu
  %sum = aten.add.Tensor(%b, %x) : f32[4]@cpu
  return (%sum)
}"""
    )
    picture = draw(GraphReport(0, "inference", "cpu", graph))
    (edge,) = [edge for edge in picture.edges if (edge.source, edge.target) == (0, 3)]
    passed = picture.boxes[1:3]
    beside = [x for x, y in points(edge.path) if passed[0].y <= y <= passed[1].y + passed[1].height]
    assert beside
    for x in beside:
        assert 0 <= x < min(box.x for box in passed) or max(box.x + box.width for box in passed) < x <= picture.width


def test_a_region_has_the_colour_of_its_ir_region_in_every_view() -> None:
    report = full_report()
    assert report.graph is not None
    report.regions[0].planned, report.regions[1].planned = (1,), (1, 5)  # the second computes a node of the first again
    first, second = colour(1, soft=True), colour(5, soft=True)
    boxes = {box.node: box.region for box in draw(report).boxes}
    assert (boxes["mm"], boxes["add"]) == (1, 5)
    page = render_html([report])
    shown = Page(page)
    dots = [
        attrs["class"] for tag, attrs in shown.tags if tag == "span" and (attrs.get("class") or "").startswith("dot")
    ]
    assert dots == ["dot r1", "dot r5"] * 2, "of regions, and of their cost"
    assert {f"--hue: {hue(1)};", f"--hue: {hue(5)};"} <= set(re.findall(r"--hue: \d+;", page))
    svg = ElementTree.fromstring(render_svg([report, failed_report()]))
    classes = {box.get("id"): box.get("class") for box in svg.iter("{http://www.w3.org/2000/svg}g")}
    assert (classes["graph0_inference-1"], classes["graph0_inference-5"]) == ("region r1", "region r5")
    sheet = svg.findtext("{http://www.w3.org/2000/svg}style") or ""
    assert f".r1 rect {{ fill: {first};" in sheet
    assert f".r5 rect {{ fill: {second};" in sheet
    dot = render_dot([report, failed_report()])
    assert re.findall(r'label="(?:mm|add)".*fillcolor="(#\w+)"', dot) == [first, second]
    text = render_text([report], color=True)
    for index, region in enumerate((1, 5)):
        style = Style.parse(colour(region))
        for name in (str(index), f"region {index}"):
            assert style.render(name, color_system=ColorSystem.EIGHT_BIT).removesuffix("\x1b[0m") in text
    spans = re.findall(r"background: (#\w+); [^>]*>\s*%(?:mm|add) ", report.graph._repr_html_())
    assert spans == [colour(0, soft=True), colour(1, soft=True)], "the IR's own"


def test_pictures_in_files_have_what_users_write_as_text() -> None:
    report = full_report()
    assert report.graph is not None
    report.graph.node("item").meta.set(DETAIL, 'says "<b>" \\ \x1b[1m')
    titles = [
        title.text or ""
        for title in ElementTree.fromstring(render_svg([report])).iter("{http://www.w3.org/2000/svg}title")
    ]
    assert sum('says "<b>" \\ �[1m' in title for title in titles) == 1
    assert 'says \\"<b>\\" \\\\ �[1m\\n' in render_dot([report])
    assert NOTHING in ElementTree.fromstring(render_svg([])).itertext()
    assert render_dot([failed_report()]) == ""
