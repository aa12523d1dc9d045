"""Regions that start where an earlier process ended. Each Case stands for a process: they share a folder, no more."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pygraph.report.model import RegionReport
from pygraph.report.trials import trial_text
from pygraph.runtime import counters, measuring, remembering
from pygraph.runtime.measuring import CANDIDATES
from pygraph.runtime.remembering import FOLDER
from pygraph.runtime.selection import store as store_module
from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.queue import TrialQueue
from pygraph.runtime.selection.records import TELLING, Decided, TrialReport
from pygraph.runtime.selection.selector import FOREVER, Selector
from pygraph.runtime.selection.store import SCHEMA_VERSION
from pygraph.runtime.staging import WATCHED
from tests.runtime.measured import ENOUGH, FAST, SLOW, Case
from tests.runtime.simulation import Cost

PACED = ENOUGH + 6 * SelectionOptions().period
"""Calls within which a trial ends, and the pace after it is known."""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes Cases of one region; the faster candidate is given by name."""
    monkeypatch.setattr(remembering, "content_digest", lambda fn: "toy")
    monkeypatch.setattr(store_module, "_warned", set())

    def start(fast: str, **options: Any) -> Case:
        monkeypatch.setattr(measuring, "TRIALS", TrialQueue())
        chosen = {"cache_dir": str(tmp_path), **options}
        return Case(monkeypatch, **{"patched": SLOW, "uncaptured": SLOW, fast: FAST}, **chosen)

    return start


def files(folder: Path) -> list[dict[str, Any]]:
    found = folder / FOLDER
    return [json.loads((found / name).read_text()) for name in sorted(os.listdir(found))] if found.exists() else []


def only(folder: Path) -> dict[str, Any]:
    (found,) = files(folder)
    decided: dict[str, Any] = found["decided"]
    return decided


def test_what_is_kept_is_what_was_decided(process: Any, tmp_path: Path) -> None:
    case = process("uncaptured")
    case.calls(ENOUGH)
    (trial,) = case.trials
    (file,) = files(tmp_path)
    assert file["schema"] == SCHEMA_VERSION
    assert file["key"]["device"] == "fake"
    found = file["decided"]
    for name in ("decision", "reason", "detail", "per_call", "samples"):
        assert found[name] == trial[name]
    assert (found["trials"], found["pace"]) == (1, None)
    case.calls(PACED - ENOUGH)
    assert only(tmp_path) == {**found, "pace": pytest.approx(60e-6, rel=0.05)}
    (later,) = files(tmp_path)
    assert later["made"] == file["made"], "it is no new decision"


def test_a_replay_that_paid_is_used_from_the_first_call_on(process: Any, tmp_path: Path) -> None:
    first = process("patched")
    first.calls(ENOUGH)
    second = process("patched")
    drains = []
    second.driver.drains = lambda: drains.append(1) or True
    before = counters.counters().get("recalled", 0)
    second.calls(600)
    assert set(second.ran[3:]) == {"patched"}
    assert second.region.record.captures == 1
    assert second.region.record.replays == 598
    assert drains == []
    (trial,) = second.trials
    assert (trial["capture"], trial["decision"], trial["calls"], trial["lost"]) == (1, "patched", 0, 0.0)
    assert trial["samples"] == first.trials[0]["samples"]
    assert Path(trial["stored"]["path"]).parent == tmp_path / FOLDER
    assert 0 <= trial["stored"]["age"] < 600
    assert json.loads(json.dumps(trial))["stored"]["trials"] == 1
    assert counters.counters()["recalled"] == before + 1
    said = trial_text(trial)
    assert "measured: capture 1 replays with patched addresses, as an earlier trial decided " in said
    assert str(tmp_path) in said


def test_copies_that_paid_are_used_once_it_is_known_what_moves(process: Any) -> None:
    process("copied").calls(2 * ENOUGH)
    second = process("copied")
    second.calls(600)
    (trial,) = second.trials
    assert (trial["candidates"], trial["decision"], trial["calls"]) == (CANDIDATES, "copied", 0)
    assert second.ran[4:] == ["patched"] * WATCHED + ["copied"] * (598 - WATCHED)


def test_a_candidate_that_came_to_nothing_was_one_all_the_same(process: Any) -> None:
    """In the next process it may be another one until it is known what moves."""
    for number in range(2):
        case = process("copied")
        case.driver.moving = frozenset([1])
        case.calls(ENOUGH)
        assert [trial["calls"] > 0 for trial in case.trials] == [number == 0]


def test_what_did_not_pay_is_not_even_captured(process: Any) -> None:
    process("uncaptured").calls(ENOUGH)
    second = process("uncaptured")
    second.calls(600)
    assert second.driver.captures == 0
    assert second.ran == ["uncaptured"] * 600
    assert (second.region.record.captures, second.region.record.uncaptured) == (0, 600)
    (trial,) = second.trials
    assert (trial["capture"], trial["decision"]) == (0, "uncaptured")
    assert "measured: not captured, runs uncaptured, as an earlier trial decided " in trial_text(trial)
    assert RegionReport(0, (), (), (), True, "", second.region.record).state == "uncaptured"
    assert second.region.record.state == "warm", "nothing failed"


def test_it_is_captured_and_tried_once_the_program_has_changed(process: Any, tmp_path: Path) -> None:
    process("uncaptured").calls(PACED)
    second = process("uncaptured")
    second.machine.program = replace(
        second.machine.program, candidates={"patched": FAST, "uncaptured": Cost(100, 20)}, user_host=30
    )
    second.calls(3 * PACED)
    assert second.region.record.captures == 1
    earlier, own = second.trials
    assert (earlier["capture"], earlier["decision"]) == (0, "uncaptured")
    assert (own["capture"], own["decision"], own["reason"]) == (1, "patched", "faster")
    assert own["candidates"][0] == "uncaptured", "what was decided is what it is held against"
    assert own["budget"] / own["per_call"]["uncaptured"] == pytest.approx(10, rel=0.05), "half of the first's 20 calls"
    assert RegionReport(0, (), (), (), True, "", second.region.record).state == "replay"
    assert (only(tmp_path)["decision"], only(tmp_path)["trials"]) == ("patched", 2)
    third = process("patched")
    third.calls(100)
    assert set(third.ran[3:]) == {"patched"}
    assert [trial["calls"] for trial in third.trials] == [0]


def test_a_replay_is_tried_again_once_the_program_has_changed(process: Any, tmp_path: Path) -> None:
    process("patched").calls(PACED)
    second = process("patched")
    second.machine.program = replace(second.machine.program, candidates={"patched": Cost(200, 20), "uncaptured": FAST})
    second.calls(2 * PACED)
    earlier, own = second.trials
    assert (earlier["decision"], own["decision"], own["reason"]) == ("patched", "uncaptured", "faster")
    assert set(second.ran[-100:]) == {"uncaptured"}
    assert (only(tmp_path)["decision"], only(tmp_path)["trials"]) == ("uncaptured", 2)


def test_trials_are_counted_over_all_processes(process: Any, tmp_path: Path) -> None:
    process("uncaptured").calls(ENOUGH)
    (path,) = (tmp_path / FOLDER).iterdir()
    file = json.loads(path.read_text())
    file["decided"].update(trials=SelectionOptions().trials, pace=1.0)
    path.write_text(json.dumps(file))
    second = process("patched")
    second.calls(2 * PACED)
    assert second.driver.captures == 0
    assert len(second.trials) == 1


def test_each_size_has_a_decision_of_its_own(process: Any, tmp_path: Path) -> None:
    process("uncaptured").calls(ENOUGH, 2)
    second = process("patched")
    second.calls(20, 2)
    second.calls(ENOUGH, 3)
    second.calls(ENOUGH, 3)
    assert [(trial["capture"], trial["decision"]) for trial in second.trials] == [(0, "uncaptured"), (1, "patched")]
    second.ran.clear()
    for _ in range(20):
        second.call(2)
        second.call(3)
    assert second.ran == ["uncaptured", "patched"] * 20
    assert RegionReport(0, (), (), (), True, "", second.region.record).state == "replay"
    assert len(files(tmp_path)) == 2


def test_sizes_that_are_not_captured_take_no_place_of_those_that_are(process: Any) -> None:
    process("uncaptured").calls(ENOUGH, 2)
    second = process("patched", max_captures=1)
    second.calls(ENOUGH, 3)
    for _ in range(20):
        second.call(2)
        second.call(3)
    assert second.region.record.captures == 1
    assert second.driver.executables[0].closed is False


def test_sizes_that_are_forgotten_and_met_again_are_reported_once(process: Any) -> None:
    process("uncaptured").calls(ENOUGH, 2)
    second = process("uncaptured", max_tracked=1)
    for _ in range(5):
        second.calls(4, 2)
        second.call(3)
    assert second.driver.captures == 0
    assert len(second.trials) == 1


def test_a_capture_that_had_to_go_and_is_made_again_is_not_tried_again(process: Any) -> None:
    case = process("patched", max_captures=1)
    case.calls(ENOUGH, 2)
    case.calls(ENOUGH, 3)
    case.calls(ENOUGH, 2)
    assert [(trial["capture"], trial["decision"], trial["calls"] > 0) for trial in case.trials] == [
        (1, "patched", True),
        (2, "patched", True),
        (3, "patched", False),
    ]


def test_scalars_are_a_part_of_the_call(process: Any, tmp_path: Path) -> None:
    case = process("uncaptured")
    case.calls(ENOUGH, 2, 1)
    case.calls(ENOUGH, 2, 2)
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("wrong", ["other candidates", "another machine", "damaged"])
def test_what_does_not_fit_is_decided_anew(process: Any, tmp_path: Path, wrong: str) -> None:
    process("patched").calls(ENOUGH)
    (path,) = (tmp_path / FOLDER).iterdir()
    file = json.loads(path.read_text())
    if wrong == "other candidates":
        file["decided"]["candidates"].append("unheard of")
    path.write_text("{" if wrong == "damaged" else json.dumps(file))
    second = process("uncaptured")
    second.driver.machine = "another" if wrong == "another machine" else "fake"
    second.calls(ENOUGH)
    (trial,) = second.trials
    assert (trial["decision"], trial["reason"]) == ("uncaptured", "faster")
    assert trial["calls"] > 0
    assert [found["decided"]["decision"] for found in files(tmp_path)].count("uncaptured") == 1


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_call(
    process: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    caplog.set_level(logging.WARNING, "pygraph")
    case = process("uncaptured", cache_dir=str(tmp_path / "file"))
    case.calls(PACED)
    case.calls(PACED, 3)
    assert [trial["decision"] for trial in case.trials] == ["uncaptured"] * 2
    (said,) = caplog.records
    assert "decisions are not kept across processes in " in said.getMessage()


def test_a_trial_that_was_disturbed_or_stopped_leaves_nothing(process: Any, tmp_path: Path) -> None:
    case = process("uncaptured")
    for _ in range(ENOUGH):
        case.call(2)
        case.call(3)
    assert {trial["reason"] for trial in case.trials} == {"disturbed"}
    stopped = process("uncaptured")
    stopped.calls(60)
    stopped.region.close()
    assert [trial["reason"] for trial in stopped.trials] == ["closed"]
    assert files(tmp_path) == []


# -- the selector ------------------------------------------------------------------------------------------------------

PAST = Decided(("patched", "uncaptured"), "uncaptured", "faster", "", {}, {}, 1, 1.0)


def _selector(past: Decided | None, told: list[Decided], now: list[float], **more: Any) -> Selector:
    return Selector(
        PAST.candidates, lambda: now[0], lambda: None, queue=TrialQueue(), past=past, remember=told.append, **more
    )


REASONS = [*TELLING, "disturbed", "threads", "stalled", "drain-failed", "closed"]


@pytest.mark.parametrize("reason", REASONS)
def test_only_trials_that_were_run_to_their_end_are_remembered(reason: str) -> None:
    told: list[Decided] = []
    selector = _selector(None, told, [0.0])
    report = TrialReport(PAST.candidates, "uncaptured", reason, "", {}, 0.0, 0.0, 0, 0, (), (), ())
    trial: Any = SimpleNamespace(report=report)
    selector._conclude(trial)
    assert [one.reason for one in told] == ([reason] if reason in TELLING else [])


def test_after_a_trial_that_says_nothing_no_pace_is_remembered() -> None:
    """It would be that of a program which was not decided on."""
    told: list[Decided] = []
    now = [0.0]
    selector = _selector(replace(PAST, pace=None), told, now)
    report = TrialReport(PAST.candidates, "uncaptured", "disturbed", "", {}, 0.0, 0.0, 0, 0, (), (), ())
    trial: Any = SimpleNamespace(report=report)
    selector._conclude(trial)
    for _ in range(20):
        selector.step()
        now[0] += 1.0
    assert told == []


def test_what_was_decided_is_granted_at_once_and_watched() -> None:
    now = [0.0]
    selector = _selector(PAST, [], now)
    for _ in range(50):
        assert selector.step() == ("uncaptured", 256)
        now[0] += 256.0
    assert selector.reports == []


def test_of_a_changed_program_there_is_a_trial_at_once() -> None:
    assert _selector(PAST, [], [0.0], changed=True).step() == ("uncaptured", 2)


def test_once_all_trials_are_spent_nothing_is_asked() -> None:
    spent = dataclasses.replace(PAST, trials=SelectionOptions().trials)
    assert _selector(spent, [], [0.0]).step() == ("uncaptured", FOREVER)
    assert _selector(spent, [], [0.0], changed=True).step() == ("uncaptured", FOREVER)
