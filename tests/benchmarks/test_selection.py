"""Trials held against the truth, on the host driver with few calls: what is forced, judged, told and left out."""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import scenarios, selection, truth
from benchmarks.scenarios import CALLERS, PROGRAMS, SCENARIOS, Slowed, arguments
from benchmarks.truth import Subject, as_fast, summary, sure
from pygraph.regions import driver_for
from pygraph.runtime import measuring
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.region import Region

HANDICAP = 5e-4
"""Seconds: some five times what the program takes, so that noise does not matter."""


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Garbage is collected before each trial: not through all that torch keeps."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks are as short as they may be."""
    monkeypatch.setattr(truth, "_BLOCK", 0.001)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def test_every_program_has_a_steady_caller_and_every_caller_a_program() -> None:
    assert len(set(SCENARIOS)) == len(SCENARIOS)
    assert [name for name, caller in SCENARIOS if caller == "steady"] == list(PROGRAMS)
    assert {caller for _, caller in SCENARIOS} == set(CALLERS)
    assert {program.slowed for program in PROGRAMS.values()} == {"", "host", "device"}


# -- trials ------------------------------------------------------------------------------------------------------------


def test_a_replay_with_a_heavy_handicap_is_left_uncaptured() -> None:
    subject = Subject(replace(PROGRAMS["host-bound, slowed"], ratio=0.0), "cpu")
    assert subject.delay.seconds == 0, "it is to take no time at all, and cannot be made faster"
    subject.delay.seconds = HANDICAP
    row = selection.run_scenario(subject, "steady", 4, math.inf)
    subject.close()
    told = json.dumps(row["trials"], indent=1)
    assert row["handicap"] == {"where": "host", "us": HANDICAP * 1e6}
    assert row["truth"]["uncaptured"]["ratio"] == 1
    assert row["truth"]["patched"]["ratio"] > 2
    assert [each["right"] for each in row["trials"]] == [each["decision"] == "uncaptured" for each in row["trials"]]
    assert any(each["right"] for each in row["trials"]), told
    wrong = {each["reason"] for each in row["trials"] if not each["right"]}
    assert wrong <= {"budget", "disturbed"}, f"a machine with pauses may end a trial, but show nothing:\n{told}"


def test_trials_share_nothing_and_leave_the_programs_own_queue_alone() -> None:
    subject, queue = Subject(PROGRAMS["queue-bound"], "cpu"), vars(measuring)["TRIALS"]
    charged = queue.charged(0.0)
    trials = [selection.trial(subject, CALLERS["period 2"]("cpu"), seed, calls=100) for seed in range(2)]
    subject.close()
    assert vars(measuring)["TRIALS"] is queue
    assert queue.charged(0.0) == charged
    for each in trials:
        assert each["candidates"] == ("patched", "uncaptured")
        assert each["timed_calls"] == 100
        assert each["took_us"] > 0
        assert each["ended"] == (each["reason"] != "closed")
        whole = 20 * each["per_call_us"].get("patched", 0.0)
        assert each["budget_us"] == pytest.approx(whole), "the time of 20 calls, less nothing that an earlier one lost"
        assert 0 <= each["overhead_us"] <= each["lost_us"]
        assert sum(block["calls"] + block["dropped"] for block in each["blocks"]) <= each["calls"]
        assert all(block["us"] >= block["waited_us"] >= 0 for block in each["blocks"])


# -- candidates that are forced ----------------------------------------------------------------------------------------


def test_forced_candidates_run_as_such_without_a_trial() -> None:
    subject = Subject(PROGRAMS["fresh inputs"], "cpu")
    counts = {}
    for name, step in subject.steps.items():
        records = [region.record for region in subject.regions.values()]
        before = [int(record.replays) for record in records]
        for _ in range(40):
            step()
        counts[name] = [int(record.replays) - replays for record, replays in zip(records, before, strict=True)]
    assert counts == {"patched": [40, 0], "copied": [0, 40], "uncaptured": [0, 0]}
    assert subject.regions["copied"].record.staged_bytes > 0
    assert subject.regions["patched"].record.staged_bytes == 0
    assert not any(region.record.trials for region in subject.regions.values())
    subject.close()
    assert {region.record.state for region in subject.regions.values()} == {"uncaptured"}


def test_a_delay_follows_each_replay_and_changes_no_result() -> None:
    delays: list[int] = []
    driver: Any = Slowed(driver_for("cpu"), lambda: delays.append(1))  # type: ignore[arg-type]
    region = Region(scenarios.chain, driver, name="slowed", options=RegionOptions())
    x = torch.rand(16)
    for _ in range(6):
        (result,) = region([x, 5])
        assert torch.equal(result, scenarios.chain([x, 5])[0])
    assert region.record.replays == 4
    assert len(delays) == 4 + 1, "and one in the comparison"
    region.close()


def test_fresh_inputs_lie_elsewhere_in_each_call() -> None:
    make = arguments(PROGRAMS["fresh inputs"], "cpu")
    seen = [make()[0].data_ptr() for _ in range(9)]
    assert all(one != other for one, other in itertools.pairwise(seen))


# -- callers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caller", "calls"),
    [
        ("steady", []),
        ("waits", list(range(32))),
        ("waits each 16", [15, 31]),
        ("period 2, waits", list(range(1, 32, 2))),
    ],
)
def test_callers_wait_after_these_calls(caller: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    after, call = CALLERS[caller]("cpu"), 0
    monkeypatch.setattr(scenarios, "wait", lambda device: waits.append(call))
    for call in range(32):
        after(call, Random(0))
    assert waits == calls


def test_pauses_come_at_random_but_the_same_ones_for_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    after = CALLERS["pauses"]("cpu")

    def pauses(seed: int) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []
        random, call = Random(seed), 0
        monkeypatch.setattr(scenarios, "time", SimpleNamespace(sleep=lambda seconds: found.append((call, seconds))))
        for call in range(4000):
            after(call, random)
        return found

    assert pauses(0) == pauses(0) != pauses(1)
    assert 5 < len(pauses(0)) < 60


# -- the truth ---------------------------------------------------------------------------------------------------------


def test_the_truth_goes_by_ratios_within_rounds() -> None:
    """The machine becomes slower from round to round, and one round holds a pause."""
    rows = [{"one": scale * 1.0, "two": scale * 1.1} for scale in (1.0, 2.0, 3.0, 4.0)]
    rows.append({"one": 50.0, "two": 5.5})
    found = summary(rows)
    assert found["one"]["ratio"] == 1
    assert found["two"]["ratio"] == pytest.approx(1.1)
    assert found["two"]["us"] == pytest.approx(3.3e6)
    assert found["one"]["near"] == pytest.approx(0.8)
    assert (as_fast(found, "one"), sure(found, "one")) == (True, False)
    assert (as_fast(found, "two"), sure(found, "two")) == (False, False)
    calm = summary(rows[:4])
    assert (as_fast(calm, "one"), sure(calm, "one"), as_fast(calm, "two"), sure(calm, "two")) == (
        True,
        True,
        False,
        True,
    )
    equal = summary([{"one": 1.0, "two": 1.01}, {"one": 1.01, "two": 1.0}])
    assert all(as_fast(equal, name) and sure(equal, name) for name in equal)


# -- the script --------------------------------------------------------------------------------------------------------


def test_the_script_writes_truths_and_decisions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = (("queue-bound", "steady"), ("fresh inputs", "period 2"), ("host-bound", "other stream"))
    monkeypatch.setattr(selection, "SCENARIOS", chosen)
    selection.main(["--device", "cpu", "--seeds", "1", "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["program"], row["caller"]) for row in found["scenarios"]] == list(chosen[:2])
    assert found["left_out"] == ["host-bound, other stream: needs a GPU"]
    for row in found["scenarios"]:
        candidates = set(PROGRAMS[row["program"]].candidates)
        assert set(row["truth"]) == candidates
        assert min(one["us"] for one in row["truth"].values()) > 0
        assert all(set(one) == candidates for one in row["rounds_us"])
        (trial,) = row["trials"]
        assert set(trial["candidates"]) == candidates
        assert trial["decision"] in candidates
        assert trial["right"] == (row["truth"][trial["decision"]]["ratio"] <= 1.02)
        fastest = min(one["us"] for one in row["truth"].values())
        assert trial["lost_from_outside_noisy_us"] == pytest.approx(trial["took_us"] - 1000 * fastest)
    printed = capsys.readouterr().out
    assert "queue-bound           steady" in printed
    assert "left out: host-bound, other stream: needs a GPU" in printed


def _clock(monkeypatch: pytest.MonkeyPatch, readings: int) -> None:
    """Time is up from so many looks at the clock on."""
    looks = iter(range(1_000_000))
    limited = SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: 0.0 if next(looks) < readings else 1e9)
    monkeypatch.setattr(selection, "time", limited)


def test_an_early_end_names_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, readings=3)  # when it begins, before the first scenario, before its first trial
    told: list[str] = []
    found = selection.run_all(SCENARIOS, "cpu", 2, 60.0, told.append)
    names = [f"{program}, {caller}" for program, caller in SCENARIOS if caller != "other stream"]
    left_out = [each for each in found["left_out"] if "needs a GPU" not in each]
    assert left_out == [f"{names[0]}: 1 of 2 trials, time was up", *(f"{name}: time was up" for name in names[1:])]
    assert len(told) == len(found["scenarios"]) == 1
    assert len(found["scenarios"][0]["trials"]) == 1
    assert found["scenarios"][0]["truth"]


def test_a_scenario_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_the_device(args: list[Any]) -> Any:
        x, _ = args
        return (x * float(x.sum()),)

    monkeypatch.setitem(PROGRAMS, "bad", replace(PROGRAMS["queue-bound"], fn=reads_the_device))
    found = selection.run_all((("bad", "steady"), ("queue-bound", "steady")), "cpu", 1, 60.0, lambda line: None)
    assert [row["program"] for row in found["scenarios"]] == ["queue-bound"]
    (told,) = found["left_out"]
    assert told.startswith("bad, steady: failed, queue-bound was not captured: host-read")
