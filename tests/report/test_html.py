"""The HTML report: well formed, self-contained, escaped, and its picture complete."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from pygraph.report.html import render_html
from pygraph.report.model import GraphReport
from pygraph.report.text import NOTHING
from tests.report.samples import EVIL, failed_report, full_report

VOID = {"meta", "input", "br", "rect", "path"}


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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def having(self, name: str) -> list[str]:
        """Every value of the attribute ``name``."""
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


def test_it_is_well_formed_and_needs_nothing_from_outside() -> None:
    text = render_html([full_report(), failed_report()])
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text.replace("<!doctype html>", ""))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "base"})
    assert page.having("src") == []
    assert all(href.startswith("#") for href in page.having("href"))
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert (
        "meta",
        {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"},
    ) in page.tags


def test_ids_are_unique_and_links_lead_somewhere() -> None:
    page = Page(render_html([full_report(0), full_report(1), failed_report(2)]))
    ids = page.having("id")
    assert len(ids) == len(set(ids))
    assert {href.removeprefix("#") for href in page.having("href")} <= set(ids)


def test_what_users_write_is_shown_and_not_run() -> None:
    report = full_report()
    report.notes.append("<img src=x onerror=alert(1)>")
    report.error = "</style><script>alert(2)</script>"
    text = render_html([report])
    page = Page(text)
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    shown = "".join(page.text)
    assert EVIL.split("\x1b")[0].strip() in shown
    assert "<img src=x onerror=alert(1)>" in shown


def test_it_says_what_the_report_says() -> None:
    shown = " ".join(" ".join(Page(render_html([full_report(), failed_report()])).text).split())
    assert "unknown plain Inductor runs 1 graph 2 replayed 1 only selected 1 outside" in shown
    assert "75.0 %: 3 of 4 launches selected, 2 replayed, 1 outside" in shown
    assert "aten.item host-read the host reads a device value model.py:12" in shown
    assert "address-escapes: a word is nobody's" in shown
    assert "partitioning{max-regions=4} 2.50 yes" in shown
    assert "Given up to plain Inductor. LiftError: <unknown> operand & more" in shown
    assert "%mm = aten.mm(%x, %w)" in shown
    assert "return ('<b>',)" in shown


def test_the_picture_has_a_box_for_every_operator_and_red_ones_for_those_outside() -> None:
    page = Page(render_html([full_report()]))
    boxes = [attrs for tag, attrs in page.tags if tag == "g"]
    assert len(boxes) == 7
    assert [attrs["id"] for attrs in boxes if attrs["class"] == "outside"] == ["graph0_inference-3"]
    assert [attrs["class"] for attrs in boxes].count("region r0") == 2
    assert "#graph0_inference-3" in page.having("href"), "the table leads to the box"


def test_a_large_graph_is_collapsed_and_says_so() -> None:
    page = Page(render_html([full_report()], max_boxes=3))
    assert sum(tag == "g" for tag, _ in page.tags) == 3
    assert "whole regions are drawn instead" in "".join(page.text)
    assert "#graph0_inference-1" in page.having("href"), "the table leads to the collapsed box"


def test_bars_show_what_is_known_and_hatch_the_rest() -> None:
    known, unknown = render_html([full_report()]), render_html([full_report(known=False)])
    assert known.count('class="bar"') == 3
    assert 'class="bar unknown"' not in known
    assert unknown.count('class="bar unknown"') == 3
    assert 'title="region 0: 1.09 k"' in known
    assert 'title="region 0: ≥ 1.02 k"' in unknown
    widths = re.findall(r'<i class="(?:r\d+|out)" style="width: ([0-9.]+)%"', known)
    assert abs(sum(map(float, widths)) - 300) < 0.1


def test_nothing_compiled_is_a_page_too() -> None:
    assert NOTHING in "".join(Page(render_html([])).text)


def test_a_graph_without_regions_or_program() -> None:
    report = full_report()
    bare = GraphReport(3, "forward", "cpu", graph=report.graph)
    shown = " ".join("".join(Page(render_html([bare])).text).split())
    assert "unknown coverage: no program was emitted" in shown
    assert "Coverage unknown: no program was emitted" in shown


def test_the_same_report_gives_the_same_page() -> None:
    assert render_html([full_report()]) == render_html([full_report()])
