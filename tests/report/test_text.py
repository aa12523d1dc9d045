"""The text report: what it says, that it fits, and that nothing a user wrote can steer the terminal."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from pygraph.api import Explanation
from pygraph.graphs import GraphRecord
from pygraph.ir import REASON, Location
from pygraph.report.model import CALLABLE, GraphReport
from pygraph.report.text import MIN_WIDTH, render_text
from tests.report.samples import failed_report, full_report


def words(text: str) -> str:
    return " ".join(text.split())


def test_it_says_what_was_captured_and_what_was_not() -> None:
    text = words(render_text([full_report()], 120))
    assert text.startswith(
        "graph0_inference forward at model.py:9, inference, cpu "
        "coverage ████████████░░░░ 75.0 %: 3 of 4 launches selected, 2 replayed, 1 outside "
        "operators 6, of which 1 not captured graph break model.py:12: Unsupported Tensor.item() call: "
    )
    assert "partitioning{max-regions=4} 2.50 yes" in text
    assert "replayed 2 1234 2 3 4.00 KiB 3.00 MiB selected" in text
    assert " captures hold 3.00 MiB pipeline " in text
    assert "1 uncaptured 1 0 0 0 0 B 0 B selected layers.1" in text
    assert "region 1: address-escapes: a word is nobody's" in text
    assert "region 1: host-read: x.item() [cpp_fused_add_1 at model.py:14]" in text
    assert "aten.item host-read the host reads a device value model.py:12 in layers.0.gate" in text
    assert "host-read: The host waits for the device and reads a value" in text
    assert "region 0 2 1.09 k 94.4 % 1.25 KiB 71.1 % 0.5 µs 53.3 %" in text
    assert "time modelled on host, built-in" in text
    assert "region 1 was split off by Inductor" in text


def test_an_unknown_cost_stays_unknown() -> None:
    text = words(render_text([full_report(known=False)], 120))
    assert "region 0 2 ≥ 1.02 k –" in text
    assert "total 5 ≥ 1.09 k –" in text


def test_several_graphs_are_summed_up_at_the_end() -> None:
    text = words(render_text([full_report(), failed_report()]))
    assert "error: LiftError: <unknown> operand & more coverage none: plain Inductor runs this graph" in text
    assert text.endswith(
        "2 graphs 1 of 2 graphs given up 3 of 4 launches selected, in 2 regions; 2 replayed "
        "2 captures, 1234 replays, 1 operator not captured, 1 graph break captures hold 3.00 MiB"
    )


@pytest.mark.parametrize("width", [10, 72, 100, 200])
@pytest.mark.parametrize("color", [False, True])
def test_every_line_fits(width: int, color: bool) -> None:
    report = full_report()
    report.notes.append("a_word_without_a_blank_" * 12)
    for line in render_text([report, failed_report()], width, color).splitlines():
        assert cell_len(Text.from_ansi(line).plain) <= max(width, MIN_WIDTH)


def test_colours_are_the_only_escapes_and_what_users_write_is_neither_markup_nor_control() -> None:
    plain, coloured = (render_text([full_report()], 200, color) for color in (False, True))
    assert "\x1b" not in plain
    assert "\x1b[32m" in coloured
    assert words(Text.from_ansi(coloured).plain) == words(plain)
    for text in (plain, coloured):
        assert "<script>alert(1)</script>" in text
        assert "[bold]�[31m" in text


def test_long_lists_are_cut_and_say_so() -> None:
    report = full_report()
    report.notes = [f"note {i}" for i in range(30)]
    text = render_text([report])
    assert ("note 11" in text, "note 12" in text, "… and 18 more" in text) == (True, False, True)


def test_a_line_below_the_working_directory_is_shown_relative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    report = full_report()
    assert report.graph is not None
    item = report.graph.node("item")
    item.loc = Location(f"{tmp_path}/net.py", 3)
    item.meta.set(REASON, "of-my-own")
    text = render_text([report], 120)
    assert " net.py:3" in text
    assert "of-my-own" in text, "a reason of a user's pass has no advice"


def test_what_is_shown_of_a_report_without_asking_is_one_short_line() -> None:
    report, failed = full_report(), failed_report()
    captured = GraphReport(2, CALLABLE, "cpu", regions=report.regions)
    assert repr(report) == (
        "<GraphReport graph0_inference: forward at model.py:9; cpu; selected 3 of 4 launches, replayed 2; "
        "operators not captured: 1; graph breaks: 1>"
    )
    assert repr(failed) == "<GraphReport graph1_backward: cpu; given up: LiftError: <unknown> operand & more>"
    assert repr(captured) == "<GraphReport graph2_callable: cpu; replays: 1234>"
    assert repr(report.regions) == (
        "[<RegionReport 0: replay; launches: 2, operators: 2>, <RegionReport 1 layers.1: uncaptured; launches: 1, "
        "operators: 2; address-escapes: a word is nobody's>]"
    )
    assert (
        repr(report.regions[0].record) == "<RegionRecord r0: replay; captures: 2, replays: 1234, uncaptured calls: 0>"
    )
    assert repr(Explanation([report, failed])) == (
        "<Explanation of 2 graphs: 1 of 2 graphs given up; 3 of 4 launches selected, in 2 regions; 2 replayed; "
        "2 captures, 1234 replays, 1 operator not captured, 1 graph break; captures hold 3.00 MiB>"
    )
    record = GraphRecord("train", uncaptured=3, reason=f"host-read: {'x' * 300}\n{'y' * 300}")
    assert repr(record).startswith(
        "<GraphRecord train: uncaptured; captures: 0, replays: 0, uncaptured calls: 3; host-read: x"
    )
    for shown in (report, captured, *report.regions, record, Explanation([report])):
        assert len(repr(shown)) < 250
        assert "\n" not in repr(shown)


@pytest.mark.parametrize("alone", [True, False])
def test_a_notebook_shows_the_page_in_a_frame_of_its_own(alone: bool) -> None:
    """Of an explanation, and of one report."""
    report = full_report()
    explanation = Explanation([report])
    shown: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: shown.append((tag, dict(attrs)))  # type: ignore[method-assign]
    parser.feed((report if alone else explanation)._repr_html_())
    ((tag, attributes),) = shown
    assert tag == "iframe"
    assert attributes["srcdoc"] == explanation.html(), "nothing of it is outside of the frame"
    assert "sandbox" in attributes
