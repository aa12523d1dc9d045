"""Regions under measured selection: the faster candidate is used in the end, and every call is right on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pygraph
from pygraph.report.as_json import json_text
from pygraph.report.html import render_html
from pygraph.report.text import render_text
from pygraph.report.trials import trial_text
from pygraph.runtime import measuring
from pygraph.runtime.measuring import Site
from pygraph.runtime.selection.queue import TrialQueue
from tests.runtime.measured import ENOUGH, FAST, SLOW, Case, set_clock
from tests.runtime.simulation import Cost

pytestmark = pytest.mark.usefixtures("own_queue")


@pytest.mark.parametrize("fast", ["patched", "uncaptured"])
def test_the_faster_candidate_is_used_in_the_end(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    case = Case(monkeypatch, **{"patched": SLOW, "uncaptured": SLOW, fast: FAST})
    case.calls(ENOUGH)
    (trial,) = case.trials
    assert (trial["capture"], trial["decision"], trial["reason"]) == (1, fast, "faster")
    case.ran.clear()
    before = case.region.record.replays, case.region.record.uncaptured
    case.calls(600)
    assert set(case.ran) == {fast}
    replays, uncaptured = case.region.record.replays - before[0], case.region.record.uncaptured - before[1]
    assert (replays, uncaptured) == ((600, 0) if fast == "patched" else (0, 600))
    assert case.region.record.captures == 1


@pytest.mark.parametrize("fast", ["patched", "uncaptured"])
def test_what_uncaptured_calls_left_is_given_back_unless_there_are_more_of_them(
    monkeypatch: pytest.MonkeyPatch, fast: str
) -> None:
    case = Case(monkeypatch, **{"patched": SLOW, "uncaptured": SLOW, fast: FAST})
    case.calls(ENOUGH + 600)
    assert len(case.trials) == 1
    assert case.driver.trimmed == (1 if fast == "patched" else 0)


def test_nothing_is_given_back_after_a_trial_without_uncaptured_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, uncaptured=Cost(3000, 20, 4))
    case.calls(ENOUGH)
    assert not any(block["candidate"] == "uncaptured" for block in case.trials[0]["blocks"])
    assert case.driver.trimmed == 0


def test_every_call_is_counted_as_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(2)
    assert case.ran == ["uncaptured", "patched", "uncaptured"], "the second call also compares"
    case.ran.clear()
    before = case.region.record.uncaptured
    case.calls(ENOUGH)
    assert case.region.record.replays == case.ran.count("patched")
    assert case.region.record.uncaptured - before == case.ran.count("uncaptured") > 10
    (trial,) = case.trials
    asked = sum(block["calls"] + block["dropped"] for block in trial["blocks"] if block["candidate"] == "uncaptured")
    assert asked == case.ran.count("uncaptured")


def test_what_the_comparison_took_says_whether_an_uncaptured_call_is_worth_a_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch, uncaptured=Cost(3000, 20, 4))
    case.calls(ENOUGH)
    (trial,) = case.trials
    assert (trial["decision"], trial["reason"], trial["dropped"]) == ("patched", "faster", ())
    assert trial["detail"].endswith("by the run before the trial")
    assert trial["samples"]["uncaptured"] == {"blocks": 0, "median": None}
    assert trial["lost"] <= 0.1 * trial["budget"]
    assert case.ran.count("uncaptured") == 2, "before the capture, and compared with"


@pytest.mark.parametrize("prepares", [False, True])
def test_a_call_through_the_shortcut_counts_once(monkeypatch: pytest.MonkeyPatch, prepares: bool) -> None:
    """There a call first tries a replay, and then runs the whole program, which calls the region. Where values are
    prepared for a replay, it is asked before whether there will be one: what is asked is what then happens."""
    expected: list[bool] = []
    case, direct = Case(monkeypatch, SLOW, FAST), Case(monkeypatch, SLOW, FAST)
    direct_call = direct.region

    def shortcut(args: list[Any]) -> Sequence[Any]:
        expected.append(not prepares or direct_call.expects_replay())
        outputs = direct_call.try_replay(args) if expected[-1] else None
        return direct_call(args) if outputs is None else outputs

    monkeypatch.setattr(direct, "region", shortcut)
    set_clock(monkeypatch, case.machine.clock)
    case.calls(ENOUGH)
    set_clock(monkeypatch, direct.machine.clock)
    monkeypatch.setattr(measuring, "TRIALS", TrialQueue())
    direct.calls(ENOUGH)
    assert case.ran == direct.ran
    ran = [name for i, name in enumerate(direct.ran) if i != 1]  # the second call also compares
    assert not prepares or expected == [name == "patched" for name in ran]
    assert direct_call.record.trials[0]["decision"] == "uncaptured"


def test_nothing_is_measured_unless_asked_for_or_where_every_replay_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for options in ({"measure": False}, {"verify_always": True}):
        case = Case(monkeypatch, **options)
        case.calls(60)
        assert case.trials == []
        assert not isinstance(case.region._measured, measuring.Measured)
        assert case.region.record.replays == 58
        assert case.region.record.uncaptured == 2


def test_the_same_region_is_tried_in_the_same_order_and_another_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Case(monkeypatch), Case(monkeypatch)
    set_clock(monkeypatch, one.machine.clock)
    one.calls(ENOUGH)
    seeds = [Site(one.driver, [torch.ones(2), *rest], frozenset()).seed(name, ()) for name, rest in _SITES]
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == 2945409274, "the same in every process"
    monkeypatch.setattr(measuring, "TRIALS", TrialQueue())
    fresh = Case(monkeypatch)
    fresh.calls(ENOUGH)
    assert fresh.trials == one.trials
    assert two.trials == []


_SITES: list[tuple[str, list[Any]]] = [("toy", []), ("other", []), ("toy", [1]), ("toy", [torch.ones(3)])]


def test_the_record_is_plain_and_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, SLOW, FAST)
    case.calls(ENOUGH)
    (trial,) = case.trials
    assert json.loads(json.dumps(trial))["decision"] == "uncaptured"
    truth = {"patched": 75e-6, "uncaptured": 60e-6}
    for name, sample in trial["samples"].items():
        assert sample["blocks"] >= 2
        assert sample["median"] == pytest.approx(truth[name], rel=0.05)
        assert trial["per_call"][name] == pytest.approx(truth[name], rel=0.05)
    assert 0 < trial["lost"] <= trial["budget"] == pytest.approx(20 * truth["patched"], rel=0.05)
    assert "runs uncaptured (faster: patched takes" in trial_text(trial)


# -- from the outside --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fast", ["patched", "uncaptured"])
@pytest.mark.parametrize("programs", [1, 2], ids=["one-region", "two-regions"])
def test_a_compiled_model_is_measured_and_reported(monkeypatch: pytest.MonkeyPatch, fast: str, programs: int) -> None:
    """On the host driver, in virtual time: a call of the candidate that is not ``fast`` takes twice as long."""
    ms = {"replays": 2.0, "uncaptured": 2.0, "replays" if fast == "patched" else "uncaptured": 1.0}

    def clock() -> float:
        found = pygraph.counters()
        return sum(found.get(name, 0) * each * 1e-3 for name, each in ms.items())

    set_clock(monkeypatch, clock)

    def model(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ x)
        if programs == 2:
            torch._dynamo.graph_break()
        total.add_(1)
        return hidden.softmax(-1) + total

    plain = torch.compile(model)
    ours = torch.compile(model, backend="pygraph", options={"measure": True})
    totals = torch.zeros(4, 4), torch.zeros(4, 4)
    with torch.no_grad():
        for call in range(600):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(call))
            assert torch.equal(ours(x, totals[0]), plain(x, totals[1]))
            assert torch.equal(totals[0], totals[1])
    reports = pygraph.reports()
    regions = [region for report in reports for region in report.regions if region.record and region.record.captures]
    decided = [[trial["decision"] for trial in region.record.trials] for region in regions if region.record]
    assert decided == [[fast]] * programs
    expected = "replays with patched addresses" if fast == "patched" else "runs uncaptured"
    for text in (render_text(reports, width=2000), render_html(reports), json_text(reports)):
        assert f"measured: capture 1 {expected} (faster: " in text
    assert {region.state for region in regions} == {"replay" if fast == "patched" else "uncaptured"}
