"""Trials under callers that wait for the device or pause, where a replay is a fifth slower, and sums take time.

What the programs take is as it was seen on GPUs; which regimes there are besides is ``test_trial``'s subject.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.trial import Trial
from tests.runtime.simulation import MICRO, Cold, Cost, Machine, Outcome, Program, on_trial, steady

SEEDS = 40
BUDGET = 20.0
"""Calls of the incumbent: 2 % of 1,000."""

CALLERS: dict[str, dict[str, float]] = {
    "steady": {},
    "waits": {"sync_every": 1},
    "waits each 2": {"sync_every": 2},
    "waits each 16": {"sync_every": 16},
    "period 2": {"odd_host": 32, "odd_device": 16},
    "pauses": {"pauses": 0.005, "pause": 2000},
}
SLOWED = {
    "device": {"patched": Cost(15, 172), "uncaptured": Cost(40, 142, 4)},
    "host": {"patched": Cost(495, 60), "uncaptured": Cost(410, 60, 60)},
}
THREE = {"patched": Cost(100, 85), "copied": Cost(101, 86), "uncaptured": Cost(315, 85, 40)}


def _outcomes(costs: dict[str, Cost], caller: str, seeds: int = SEEDS) -> list[Outcome]:
    """Trials whose own work takes 100 µs a block, which is much where a call takes as long."""
    more = {"noise": 0.05, "depth": 1024, "thought": 100.0, **CALLERS[caller]}
    program = Program(costs, **more)  # type: ignore[arg-type]
    truth = {name: steady(program, name, 400) for name in costs}
    expected = {"uncaptured": 1.2 * costs["uncaptured"].host * MICRO}
    return [
        on_trial(program, list(costs), seed, truth, expected=expected, machine=Cold(program, seed))
        for seed in range(seeds)
    ]


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("where", SLOWED)
def test_a_replay_that_is_a_fifth_slower_is_found_whatever_the_caller_does(where: str, caller: str) -> None:
    outcomes = _outcomes(SLOWED[where], caller)
    wrong = [outcome.report for outcome in outcomes if outcome.slower > 0]
    assert len(wrong) <= 0.05 * SEEDS, [(report.seed, report.reason, report.lost / report.budget) for report in wrong]
    assert {report.reason for report in wrong} <= {"budget"}
    assert max(outcome.report.lost / outcome.report.budget for outcome in outcomes) <= 1.0


@pytest.mark.parametrize("caller", [caller for caller in CALLERS if caller != "pauses"])
def test_three_candidates_stay_within_the_budget(caller: str) -> None:
    """One of them is nearly three times slower, and two are equal, so that nothing ends most of the trials but what
    they lost."""
    outcomes = _outcomes(THREE, caller)
    assert {outcome.report.decision for outcome in outcomes} <= {"patched", "copied"}
    assert max(outcome.report.lost / outcome.report.budget for outcome in outcomes) <= 1.0
    assert max(outcome.lost for outcome in outcomes) <= 1.1 * BUDGET


def test_what_the_trials_own_work_takes_is_lost_time_and_foreseen() -> None:
    program = Program(SLOWED["device"], noise=0.05, depth=1024, thought=400.0)
    truth = {name: steady(program, name, 400) for name in program.candidates}
    for seed in range(SEEDS):
        report = on_trial(program, list(program.candidates), seed, truth).report
        assert 400 * MICRO * len(report.blocks) <= report.lost <= 1.05 * report.budget


@dataclass
class _Contended(Machine):
    """A machine whose device does something else for 1.5 ms in call ``busy``."""

    busy: int = 0

    def call(self, candidate: str) -> None:
        """One call."""
        if self.calls == self.busy:
            self.free = max(self.free, self.now) + 1500
        super().call(candidate)


@pytest.mark.parametrize("busy", [33, 34], ids=["first-single-call", "second-single-call"])
def test_a_single_call_that_waited_long_makes_the_baseline_little_shorter(busy: int) -> None:
    program = Program(SLOWED["device"], noise=0.03, depth=1024)
    for seed in range(SEEDS):
        machine = _Contended(program, seed, busy=busy)
        trial = Trial(list(program.candidates), machine.clock, machine.drain, options=SelectionOptions(), seed=seed)
        while machine.calls < 36:
            grant = trial.step()
            assert grant is not None
            for _ in range(grant.calls):
                machine.call(grant.candidate)
        trial.abort("closed")
        assert trial.report is not None
        budget = BUDGET * steady(program, "patched", 300)
        assert 0.9 * budget <= trial.report.budget <= 1.05 * budget


def test_a_pause_in_the_first_block_of_a_round_is_seen_by_the_baseline() -> None:
    """It makes that block a fifth longer, and nothing else has been timed of calls in a row yet."""
    program = Program(SLOWED["host"], noise=0.03, depth=1024)
    for seed in range(SEEDS):
        machine = Machine(program, seed)
        trial = Trial(list(program.candidates), machine.clock, machine.drain, options=SelectionOptions(), seed=seed)
        paused = 0
        while (grant := trial.step()) is not None:
            for _ in range(grant.calls):
                machine.call(grant.candidate)
            if not paused and grant.candidate == "patched" and machine.calls > 37 and grant.calls > 1:
                machine.now += 0.2 * grant.calls * 500
                paused = machine.calls
        assert trial.report is not None
        blocks = [block for block in trial.report.blocks if block.purpose == "round"]
        first = next(block for block in blocks if block.candidate == "patched")
        assert paused == first.start + first.dropped + first.calls
        assert not first.kept
        assert trial.report.decision == "uncaptured"
