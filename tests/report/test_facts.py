"""Sums, shares, units and membership that all renderers build on, and the JSON document."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from pygraph.ir import DETAIL, SELECTED, parse_graph
from pygraph.report import facts
from pygraph.report.facts import (
    SCHEMA_VERSION,
    Quantity,
    clean,
    cost_rows,
    folded,
    json_text,
    membership,
    percent,
    unselected,
    why,
)
from pygraph.report.model import RegionReport, Uncaptured
from pygraph.runtime.ledger import Ledger
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.region import RegionRecord
from pygraph.runtime.variants import State
from tests.report.samples import DECISION, cut_graph, failed_report, full_report


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (percent(None), "unknown"),
        (percent(0.0), "0 %"),
        (percent(1.0), "100 %"),
        (percent(0.857), "85.7 %"),
        (percent(0.99999), "99.9 %"),
        (Quantity(999_999).text("flops"), "1.00 M"),
        (Quantity(5e18).text("flops"), "5000 P"),
        (Quantity(1536).text("bytes"), "1.50 KiB"),
        (Quantity(12.34).text("time_us"), "12.3 µs"),
        (Quantity(2500).text("time_us"), "2.50 ms"),
        (Quantity(0, 2).text("flops"), "unknown"),
        (Quantity(2000, 1).text("flops"), "≥ 2.00 k"),
        (clean(" a\n\tb\x1b[31m\u202e "), "a  b�[31m�"),
    ],
)
def test_numbers_have_units_and_only_a_whole_is_a_hundred_percent(text: str, wanted: str) -> None:
    assert text == wanted


def test_costs_are_summed_by_region_and_unknown_stays_unknown() -> None:
    first, second, outside = cost_rows(full_report())
    assert (first.region, second.region, outside.region) == (0, 1, None)
    assert (first.flops, first.bytes) == (Quantity(1088), Quantity(1280))
    assert outside.operators == 1, "the scalar launches nothing and is not counted"
    unknown = cost_rows(full_report(known=False))[0].flops
    assert unknown == Quantity(1024, 1)
    assert unknown.share_of(first.flops) is None


def test_membership_is_that_of_the_emitted_program_then_of_the_plan() -> None:
    report = full_report()
    assert membership(report) == {"mm": 0, "relu": 0, "add": 1, "view": 1}
    report.regions[0] = RegionReport(5, (0,), ("mm",), (), True, "")
    assert membership(report)["relu"] == 5, "folded away by Inductor, it belongs where the rest of its region is"
    report.regions.clear()
    assert membership(report) == {"mm": 0, "relu": 0, "add": 1, "view": 1}
    assert membership(failed_report()) == {}


def test_equal_rows_are_folded_in_order_of_first_occurrence() -> None:
    rows = [Uncaptured(f"n{i}", op, "r", "d", None, "") for i, op in enumerate(("a.default", "b", "a.default"))]
    assert [(row.op, row.detail) for row in folded(rows)] == [("a ×2", "d"), ("b", "d")]
    layers = [Uncaptured(f"n{i}", "a", "r", "d", None, "", f"layers.{i}.attn") for i in range(3)]
    assert [row.module for row in folded(layers)] == ["layers.*.attn"]
    assert [row.module for row in folded([*layers, Uncaptured("n", "a", "r", "d", None, "", "head")])] == ["*"]
    differing = [Uncaptured(f"n{i}", "a", "r", f'reads %n{i}.0, %"x y{i}".', "net.py:1", "") for i in range(3)]
    assert [(row.op, row.detail) for row in folded(differing)] == [("a ×3", "reads %…, %….")]
    assert next(folded(differing[:1])).detail == 'reads %n0.0, %"x y0".'


def test_a_region_says_why_once() -> None:
    record = RegionRecord(
        "r", State.UNCAPTURED, "host-read: x.item()", ledger=Ledger(2, 1234.0, 600.0, -56.0, declined=7)
    )
    record.python_runs = Counter({"lib.b.default": 1})
    record.refusals = {"host-read": Refusal("host-read", "x.item()"), "opaque": Refusal("opaque", "y")}
    assert list(why(full_report(), RegionReport(0, (0,), (), (), True, "", record))) == [
        "host-read: x.item()",
        "captures took 1.2 ms, replays saved -56 µs; at least 7 calls uncaptured, since a further capture did not pay",
        "lib.b.default is written in Python: its body ran 1 time to be captured and compared",
        "opaque: y",
    ]


def test_a_region_says_what_order_it_is_replayed_in() -> None:
    record = RegionRecord("r", State.REPLAY, launches=122, longest_path=48, orders=[DECISION])
    assert list(why(full_report(), RegionReport(0, (0,), (), (), True, "", record))) == [
        "measured: dependences; µs of the device per call: program 30.0, dependences 20.0 (90 calls)",
        "order: the longest path of dependences has 48 of 122 launches",
    ]
    record.timeline = (("mm", 0, 0), ("relu", 0, 1), ("mm", 1, 0), ("add", 0, 2), ("sin", 1, 1))
    *_, said = why(full_report(), RegionReport(0, (0,), (), (), True, "", record))
    assert said == "side by side: 2 lanes, 3 launches one after the other, 1.7 at once on average"


def test_a_region_that_selection_left_off_says_what_selection_said() -> None:
    report = full_report()
    assert report.graph is not None
    region = RegionReport(0, (0,), ("mm",), ("mm",), False, "not selected by the model")
    report.graph.regions[0].meta.set(SELECTED, False)
    report.graph.regions[0].meta.set(DETAIL, "a replay takes longer")
    assert unselected(report, region)
    assert list(why(report, region)) == ["not selected by the model", "a replay takes longer"]
    assert not unselected(report, report.regions[1])


def test_the_document_says_what_the_report_says() -> None:
    report = full_report()
    assert report.regions[0].record is not None
    report.regions[0].record.orders = [DECISION]
    report.regions[0].record.ledger = Ledger(2, 1234.0, 600.0, 56.0)
    text = json_text([report, failed_report()])
    assert not re.search(r"0x[0-9a-f]{6,}", text)
    document = json.loads(text)
    assert (document["schema"], document["summary"]["launches"]) == (SCHEMA_VERSION, 4)
    graph, failed = document["graphs"]
    assert (graph["coverage"]["replayed_launches"], graph["coverage"]["outside"]) == (2, ["item"])
    replayed, refused = graph["regions"]
    assert (replayed["state"], refused["state"], refused["selected"]) == ("replay", "uncaptured", True)
    assert (replayed["record"]["workspace_bytes"], replayed["record"]["replays"]) == (4096, 1234)
    assert (replayed["record"]["held_bytes"], document["summary"]["held_bytes"]) == (3 << 20, 3 << 20)
    assert replayed["record"]["orders"][0]["dependences_us"] == DECISION.dependences_us
    ledger = {"attempts": 2, "spent_us": 1234.0, "cost_us": 600.0, "saved_us": 56.0, "replays": 0, "declined": 0}
    assert replayed["record"]["ledger"] == ledger
    assert (document["summary"]["spent_us"], document["summary"]["saved_us"]) == (1234.0, 56.0)
    assert refused["record"]["refusals"]["host-read"]["loc"] == "model.py:14"
    assert refused["why"][0] == "address-escapes: a word is nobody's"
    (left,) = graph["uncaptured"]
    assert (left["node"], left["reason"], left["loc"]) == ("item", "host-read", "model.py:12")
    assert graph["cost"][0]["flops"] == {"known": 1088.0, "unknown": 0}
    assert graph["graph_breaks"][0]["reason"] == "Unsupported Tensor.item() call"
    assert parse_graph(graph["pgir"]) == cut_graph()
    assert failed["error"] == "LiftError: <unknown> operand & more"
    assert (failed["coverage"], failed["pgir"]) == (None, None)


def test_every_key_is_there_and_documented() -> None:
    documented = set(re.findall(r"``(\w+)``", facts.__doc__ or ""))
    for report in (full_report(known=False), failed_report()):
        (graph,) = json.loads(json_text([report]))["graphs"]
        assert set(graph) <= documented
        assert set(graph) == set(json.loads(json_text([full_report()]))["graphs"][0])
