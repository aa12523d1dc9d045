"""Sums, shares, units and membership that all renderers build on."""

from __future__ import annotations

from collections import Counter

import pytest

from pygraph.inductor.decision import decide
from pygraph.ir import DETAIL, H200, HOST, SELECTED
from pygraph.passes.legality.reasons import REASONS
from pygraph.report.facts import (
    Quantity,
    advice,
    bytes_text,
    clean,
    cost_rows,
    count_text,
    device_model,
    folded,
    measured_text,
    membership,
    percent,
    plural,
    summarize,
    unselected,
    us_text,
    why,
)
from pygraph.report.model import RegionReport, Uncaptured
from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.refusal import Refusal
from tests.report.samples import DECISION, cut_graph, failed_report, full_report


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "unknown"), (0.0, "0 %"), (1.0, "100 %"), (0.857, "85.7 %"), (0.99999, "99.9 %"), (0.00001, "0.1 %")],
)
def test_only_a_whole_is_a_hundred_percent(share: float | None, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("known", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (999_999, "1.00 M"), (33.6e6, "33.6 M"), (5e18, "5000 P")],
)
def test_counts_have_si_prefixes(known: float, text: str) -> None:
    assert count_text(Quantity(known)) == text


def test_bytes_and_times_have_units() -> None:
    assert bytes_text(Quantity(1536)) == "1.50 KiB"
    assert us_text(Quantity(12.34)) == "12.3 µs"
    assert us_text(Quantity(2500)) == "2.50 ms"


def test_what_is_unknown_is_said_to_be() -> None:
    assert count_text(Quantity(0, 2)) == "unknown"
    assert count_text(Quantity(2000, 1)) == "≥ 2.00 k"
    assert Quantity(2000, 1).value is None
    assert Quantity(1).share_of(Quantity(2, 1)) is None
    assert Quantity(1).share_of(Quantity(4)) == 0.25


def test_plural_and_clean() -> None:
    assert (plural(1, "launch", "launches"), plural(2, "launch", "launches")) == ("1 launch", "2 launches")
    assert clean(" a\n\tb\x1b[31m\u202e ") == "a  b�[31m�"


def test_costs_are_summed_by_region_and_unknown_stays_unknown() -> None:
    rows = {row.label: row for row in cost_rows(full_report())}
    assert list(rows) == ["region 0", "region 1", "outside"]
    assert rows["region 0"].flops == Quantity(1088)
    assert rows["region 0"].nbytes == Quantity(1280)
    assert rows["outside"].nodes == 1, "the scalar launches nothing and is not counted"
    unknown = {row.label: row for row in cost_rows(full_report(known=False))}
    assert unknown["region 0"].flops == Quantity(1024, 1)
    assert unknown["region 1"].flops.value == 64


def test_membership_is_that_of_the_emitted_program_then_of_the_plan() -> None:
    report = full_report()
    assert membership(report) == {"mm": 0, "relu": 0, "add": 1, "view": 1}
    report.regions[0] = RegionReport(5, (0,), ("mm",), (), True, "")
    assert membership(report)["relu"] == 5, "folded away by Inductor, it belongs where the rest of its region is"
    report.regions.clear()
    assert membership(report) == {"mm": 0, "relu": 0, "add": 1, "view": 1}
    assert membership(failed_report()) == {}


def test_the_device_chooses_the_model() -> None:
    report = full_report()
    assert device_model(report) is HOST
    report.device = "cuda"
    assert device_model(report) is H200


def test_a_summary_adds_graphs_up() -> None:
    summary = summarize([full_report(), failed_report()])
    assert (summary.graphs, summary.programs, summary.errors, summary.regions) == (2, 1, 1, 2)
    assert summarize([failed_report()]).coverage is None
    assert (summary.launches, summary.selected_launches, summary.replayed_launches) == (4, 3, 2)
    assert (summary.replays, summary.captures, summary.uncaptured, summary.breaks) == (1234, 2, 1, 1)
    assert summary.coverage is None, "nobody knows what plain Inductor launches"
    assert summarize([full_report()]).coverage == 0.75


def test_equal_rows_are_folded_in_order_of_first_occurrence() -> None:
    rows = [Uncaptured(f"n{i}", op, "r", "d", None, "") for i, op in enumerate(("a.default", "b", "a.default"))]
    assert [(row.op, row.detail) for row in folded(rows)] == [("a ×2", "d"), ("b", "d")]
    differing = [Uncaptured(f"n{i}", "a", "r", f'reads %n{i}.0, %"x y{i}".', "net.py:1", "") for i in range(3)]
    assert [(row.op, row.detail) for row in folded(differing)] == [("a ×3", "reads %…, %….")]
    assert folded(differing[:1])[0].detail == 'reads %n0.0, %"x y0".'


def test_advice_is_given_once_for_each_known_reason() -> None:
    rows = [Uncaptured("n", "op", reason, "", None, "") for reason in ("host-read", "of-my-own", "host-read")]
    found = advice(rows)
    assert list(found) == ["host-read"]
    for part in (REASONS["host-read"].explanation, REASONS["host-read"].advice):
        assert part[1:] in found["host-read"]
    assert found["host-read"].endswith(".")


def test_a_region_says_why_once() -> None:
    record = RegionRecord("r", "uncaptured", "host-read: x.item()", decisions=[DECISION])
    record.refusals = {"host-read": Refusal("host-read", "x.item()"), "opaque": Refusal("opaque", "y")}
    region = RegionReport(0, (0,), (), (), True, "", record)
    assert list(why(full_report(), region)) == [
        "host-read: x.item()",
        measured_text([DECISION]),
        "opaque: y",
    ]


def test_runs_of_python_bodies_are_said() -> None:
    record = RegionRecord("r", "replay", captures=1, python_runs=Counter({"lib.b.default": 1, "lib.a.default": 5}))
    assert list(why(full_report(), RegionReport(0, (0,), (), (), True, "", record))) == [
        "lib.a.default is written in Python: its body ran 5 times to be captured and compared",
        "lib.b.default is written in Python: its body ran 1 time to be captured and compared",
    ]


def test_a_region_that_is_faster_uncaptured_is_not_replayed() -> None:
    record = RegionRecord("r", "uncaptured", captures=1, decisions=[DECISION])
    report = full_report()
    report.regions[0].record = record
    assert (report.regions[0].state, report.replayed_launches) == ("uncaptured", 0)
    assert list(why(report, report.regions[0])) == [measured_text([DECISION])]


def test_a_region_that_selection_left_off_says_what_selection_said() -> None:
    report = full_report()
    assert report.graph is not None
    region = RegionReport(0, (0,), ("mm",), ("mm",), False, "not selected by the model")
    report.graph.regions[0].meta.set(SELECTED, False)
    report.graph.regions[0].meta.set(DETAIL, "a replay takes longer")
    report.decision = decide(report.graph, "cpu", "")
    assert unselected(report, region)
    assert list(why(report, region)) == ["not selected by the model", "a replay takes longer"]
    assert not unselected(report, report.regions[1])


def test_the_sample_is_a_valid_graph() -> None:
    from pygraph.ir.verify import verify

    verify(cut_graph())
