"""Trials as they were met on GPUs: hosts that run ahead, candidates many times slower, callers that begin to wait.

The regimes themselves, and which candidate is picked in them, are ``test_trial``'s subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.queue import TrialQueue
from pygraph.runtime.selection.selector import Selector
from pygraph.runtime.selection.trial import Trial
from tests.runtime.simulation import MICRO, Cold, Cost, Machine, Outcome, Program, on_trial, steady

ORDER = ["patched", "uncaptured"]
SEEDS = 20
BUDGET = 20.0
"""Calls of the incumbent: 2 % of 1,000."""


def _program(patched: Cost, uncaptured: Cost, **more: float) -> Program:
    costs = {"patched": patched, "uncaptured": uncaptured}
    return Program(costs, **{"noise": 0.05, "depth": 1024, **more})  # type: ignore[arg-type]


BERT = _program(Cost(130, 705), Cost(3100, 650, 196))
CASES = {
    "host far ahead": BERT,
    "nine times slower": _program(Cost(105, 404), Cost(3700, 400, 150)),
    "waits for each call": replace(BERT, sync_every=1),
    "short queue": replace(BERT, depth=4),
    "period 2": replace(BERT, odd_host=300),
    "small": _program(Cost(47, 128), Cost(500, 60, 8)),
    "host-bound": _program(Cost(100, 20), Cost(320, 20, 20)),
}


def _outcomes(program: Program, *, foreseen: bool, share: float = 1.0) -> list[Outcome]:
    truth = {name: steady(program, name, 300) for name in ORDER}
    expected = {"uncaptured": 1.2 * program.candidates["uncaptured"].host * MICRO} if foreseen else None
    return [
        on_trial(program, ORDER, seed, truth, share=share, expected=expected, machine=Cold(program, seed))
        for seed in range(SEEDS)
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_time_per_call_is_that_of_many_calls_and_the_budget_goes_by_it(name: str) -> None:
    program = CASES[name]
    truth = steady(program, "patched", 300)
    for outcome in _outcomes(program, foreseen=True):
        report = outcome.report
        assert report.samples["patched"].median == pytest.approx(truth, rel=0.08)
        assert report.per_call["patched"] == pytest.approx(truth, rel=0.08)
        assert report.budget == pytest.approx(BUDGET * truth, rel=0.08)


@pytest.mark.parametrize("name", CASES)
def test_what_is_many_times_slower_is_known_to_be_so_after_a_call_or_two(name: str) -> None:
    for outcome in _outcomes(CASES[name], foreseen=True):
        report = outcome.report
        assert (report.decision, report.reason) == ("patched", "faster"), report.detail
        assert sum(block.candidate == "uncaptured" for block in report.blocks) <= 1
        assert report.lost <= 0.5 * report.budget
        assert outcome.lost <= 0.5 * BUDGET


@pytest.mark.parametrize("name", ["host far ahead", "nine times slower", "short queue", "period 2"])
def test_what_the_run_before_the_trial_shows_to_be_far_slower_is_not_tried(name: str) -> None:
    for outcome in _outcomes(replace(CASES[name], thought=100.0), foreseen=True):
        report = outcome.report
        assert {block.candidate for block in report.blocks} == {"patched"}
        assert report.detail.endswith("by the run before the trial")
        assert max(report.lost / report.budget, outcome.lost / BUDGET) <= 0.15


def _outcome_of_a_run_before(program: Program, took: float, seed: int) -> Outcome:
    truth = {name: steady(program, name, 300) for name in ORDER}
    expected = {"uncaptured": took * MICRO}
    return on_trial(program, ORDER, seed, truth, expected=expected, machine=Cold(program, seed))


def test_a_run_before_the_trial_that_was_slow_by_chance_decides_nothing() -> None:
    """It took more than four times as long as a replay, half a millisecond of which was no part of it."""
    program = _program(Cost(120, 40), Cost(80, 40, 4))
    for seed in range(SEEDS):
        report = _outcome_of_a_run_before(program, 80 + 490, seed).report
        assert (report.decision, report.reason) == ("uncaptured", "faster"), report.detail


def test_a_run_before_the_trial_that_was_as_cold_as_a_run_may_be_decides_nothing() -> None:
    program = _program(Cost(1200, 40), Cost(1000, 40, 4))
    for seed in range(SEEDS):
        report = _outcome_of_a_run_before(program, 2.0 * 1000, seed).report
        assert (report.decision, report.reason) == ("uncaptured", "faster"), report.detail


def test_a_candidate_of_which_one_call_exceeds_the_budget_is_not_tried() -> None:
    """Nor is it known to be slower: a replay takes 40 µs, and the run before the trial was half a millisecond."""
    program = _program(Cost(30, 20), Cost(420, 20, 4))
    for outcome in _outcomes(program, foreseen=True):
        report = outcome.report
        assert (report.decision, report.reason, report.dropped) == ("patched", "budget", ("uncaptured",))
        assert "too costly to be tried: uncaptured" in report.detail
        assert {block.candidate for block in report.blocks} == {"patched"}
        assert outcome.lost <= 0.1 * BUDGET


def test_a_later_trial_with_less_to_lose_does_not_try_it() -> None:
    program = _program(Cost(85, 511), Cost(4400, 500, 300))
    for outcome in _outcomes(program, foreseen=True, share=0.5):
        assert outcome.lost <= BUDGET / 2


def test_what_nobody_could_foresee_costs_one_call() -> None:
    program = _program(Cost(105, 404), Cost(9000, 400, 150))
    for outcome in _outcomes(program, foreseen=False):
        assert sum(block.candidate == "uncaptured" for block in outcome.report.blocks) == 1


def test_single_calls_decide_nothing_where_they_are_only_cold() -> None:
    """A first call takes half as long again; in a row the candidates are equal but for some percent."""
    program = _program(Cost(100, 20), Cost(96, 20, 4))
    for outcome in _outcomes(program, foreseen=True):
        assert all(look.rounds >= 2 for look in outcome.report.looks)


def test_cold_calls_are_not_charged_to_each_drain() -> None:
    """Candidates that take the device equally long, one of which takes the host five times as long."""
    program = _program(Cost(1093, 5570), Cost(4800, 5570, 200))
    for outcome in _outcomes(program, foreseen=True):
        assert (outcome.report.decision, outcome.report.reason) == ("patched", "equivalent")
        assert max(outcome.lost / BUDGET, outcome.report.lost / outcome.report.budget) <= 0.8


# -- calls of other sizes ----------------------------------------------------------------------------------------------


def _interrupted(trial: Trial, machine: Machine, every: int, calls: int = 400) -> None:
    """Calls of another size come after each ``every`` calls."""
    made = 0
    grant = trial.step()
    while grant is not None and made < calls:
        for _ in range(grant.calls):
            machine.call(grant.candidate)
            made += 1
            if made % every == 0:
                machine.call(grant.candidate)
                trial.spoil()
        grant = trial.step()


def test_sizes_that_take_turns_are_left_alone_at_no_cost() -> None:
    machine, drains = Machine(BERT), []
    trial = Trial(ORDER, machine.clock, lambda: drains.append(1), options=SelectionOptions(), seed=0)
    _interrupted(trial, machine, every=1)
    assert trial.report is not None
    assert (trial.report.decision, trial.report.reason) == ("patched", "disturbed")
    assert (drains, trial.report.lost, trial.report.blocks) == ([], 0.0, ())


def test_sizes_that_come_in_now_and_then_cost_a_shorter_baseline() -> None:
    program = _program(Cost(50, 20), Cost(65, 20, 4))
    machine = Machine(program)
    trial = Trial(ORDER, machine.clock, machine.drain, options=SelectionOptions(), seed=0)
    _interrupted(trial, machine, every=7, calls=4000)
    assert trial.report is not None
    baseline = trial.report.blocks[0]
    assert (baseline.purpose, baseline.calls) == ("baseline", 2)
    assert trial.report.decision == "patched"
    assert trial.report.reason != "disturbed"
    assert any(block.candidate == "uncaptured" and block.kept for block in trial.report.blocks)


# -- several trials of a program ---------------------------------------------------------------------------------------


class _Region:
    """Calls a machine as a region would; after each call it does ``then``."""

    def __init__(self, machine: Machine, queue: TrialQueue, **more: object) -> None:
        self.machine = machine
        self.selector = Selector(ORDER, machine.clock, machine.drain, queue=queue, **more)  # type: ignore[arg-type]
        self._left, self._active = 0, ""

    def call(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._active, calls = self.selector.step()
            self._left = calls - 1
        self.machine.call(self._active)


def _wait_after(machine: Machine, calls: int, pause: float) -> Callable[[], None]:
    """The caller waits for the device each so many calls, and then does something else for ``pause`` µs."""

    def wait() -> None:
        if machine.calls % calls == 0:
            machine.drain()
            machine.now += pause

    return wait


@pytest.mark.parametrize("pause", [0.0, 200_000.0])
def test_a_caller_that_begins_to_wait_for_the_device_is_no_reason_for_another_trial(pause: float) -> None:
    machine = Machine(_program(Cost(47, 128), Cost(200, 60, 8)))
    region = _Region(machine, TrialQueue())
    for _ in range(2000):
        region.call()
    wait = _wait_after(machine, 200, pause)
    for _ in range(12_000):
        region.call()
        wait()
    first, *others = region.selector.reports
    assert first.decision == "patched"
    assert {(report.decision, report.reason) for report in others} <= {("patched", "unchanged")}
    assert all(block.candidate == "patched" for report in others for block in report.blocks)
    assert sum(report.lost for report in others) <= 0.2 * first.budget
    assert len(others) <= SelectionOptions().trials


def test_a_program_that_has_changed_is_tried_again_however_often_its_caller_waited() -> None:
    machine = Machine(_program(Cost(47, 128), Cost(200, 60, 8)))
    region = _Region(machine, TrialQueue())
    for _ in range(2000):
        region.call()
    wait = _wait_after(machine, 200, 200_000.0)
    for _ in range(4000):
        region.call()
        wait()
    machine.program = replace(machine.program, candidates={"patched": Cost(300, 128), "uncaptured": Cost(200, 60, 8)})
    for _ in range(6000):
        region.call()
    assert region.selector.decision == "uncaptured"


def test_trials_of_a_programs_regions_share_one_budget() -> None:
    """Five regions that are called in turn: in any 1,000 calls they lose no more than one may."""
    for seed in range(4):
        machine, queue = Machine(_program(Cost(50, 20), Cost(80, 20, 4)), seed), TrialQueue()
        regions = [_Region(machine, queue, seed=seed + number) for number in range(5)]
        ends = []
        for _ in range(12_000):
            for region in regions:
                known = len(region.selector.reports)
                region.call()
                ends += [(machine.now * MICRO, report) for report in region.selector.reports[known:]]
        assert len(ends) >= 5
        loop = 5 * steady(machine.program, "patched", 300)
        for when, _ in ends:
            lost = sum(report.lost for end, report in ends if when - 1000 * loop < end <= when)
            assert lost <= BUDGET * loop * 1.05
