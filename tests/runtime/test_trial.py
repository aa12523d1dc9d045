"""Trials of simulated programs: the faster candidate is picked in every regime, and the budget of lost time holds."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.trial import Trial
from tests.runtime.simulation import Cost, Machine, Outcome, Program, on_trial, steady

SEEDS = 50
BUDGET = 20.0
"""Calls of the incumbent: 2 % of 1,000."""
SLACK = 4.0
"""Calls by which one trial may exceed it: a candidate that is hardly slower is known to be so only in the end."""


def _program(fast: Cost, slow: Cost, **of: float) -> Program:
    return Program({"fast": fast, "slow": slow}, **{"noise": 0.05, "user_host": 10.0, **of})  # type: ignore[arg-type]


PROGRAMS = {
    "host-bound, 3 %": _program(Cost(100, 20), Cost(103.4, 20, 4)),
    "host-bound, 10 %": _program(Cost(50, 20), Cost(56, 20, 4)),
    "host-bound, 5 µs": _program(Cost(5, 3), Cost(6, 3, 4), user_host=5),
    "device-bound, less host time is slower": _program(Cost(60, 100, 8), Cost(10, 104)),
    "device-bound, more host time is slower": _program(Cost(10, 100), Cost(50, 104, 8)),
    "balanced, device": _program(Cost(40, 100), Cost(88, 104, 8), user_host=5),
    "balanced, one side each": _program(Cost(40, 100), Cost(105, 96, 8), user_host=5),
    "queue of 4": _program(Cost(10, 100), Cost(60, 104, 4), depth=4, user_device=20),
    "queue of 2": _program(Cost(80, 100, 4), Cost(30, 104), depth=2, user_device=20),
    "queue of 1": _program(Cost(10, 100), Cost(10, 104), depth=1),
    "sync each call": _program(Cost(24, 100, 4), Cost(20, 100), sync_every=1),
    "sync each 100 calls": _program(Cost(20, 100), Cost(60, 104, 4), sync_every=100, depth=1000),
    "period 2, host": _program(Cost(50, 30), Cost(55, 30, 4), odd_host=100),
    "period 2, device": _program(Cost(20, 100), Cost(60, 107, 4), odd_device=100),
    "pauses": _program(Cost(100, 20), Cost(105, 20, 4), pauses=0.005, pause=2000),
    "evaluation each 100 calls": _program(Cost(100, 20), Cost(106, 20, 4), pause_every=100, pause=50000),
    "drift": _program(Cost(100, 20), Cost(105, 20, 4), user_host=30, growth=1.5),
    "twice as slow": _program(Cost(50, 20), Cost(110, 20, 4)),
}


def _outcomes(program: Program, order: list[str]) -> list[Outcome]:
    truth = {name: steady(program, name) for name in program.candidates}
    assert truth["slow"] > 1.029 * truth["fast"]
    return [on_trial(program, order, seed, truth) for seed in range(SEEDS)]


@pytest.mark.parametrize("order", [["fast", "slow"], ["slow", "fast"]], ids=["model-right", "model-wrong"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_faster_candidate_is_picked_within_the_budget(name: str, order: list[str]) -> None:
    outcomes = _outcomes(PROGRAMS[name], order)
    wrong = [outcome.report for outcome in outcomes if outcome.slower > 0]
    assert len(wrong) <= 0.02 * SEEDS, [(report.seed, report.reason, report.detail) for report in wrong]
    lost = [outcome.lost for outcome in outcomes]
    assert max(lost) <= BUDGET + SLACK
    assert sum(lost) / SEEDS <= 0.75 * BUDGET


def test_call_by_call_alternation_picks_the_slower_side_and_the_trial_does_not() -> None:
    program = replace(PROGRAMS["queue of 1"], noise=0.0)
    machine = Machine(program)
    spent = {"fast": 0.0, "slow": 0.0}
    for call in range(400):
        before = machine.now
        name = ("fast", "slow")[call % 2]
        machine.call(name)
        spent[name] += machine.now - before
    assert spent["slow"] < 0.99 * spent["fast"], "the slower candidate looks faster, since the host waits for the other"
    assert steady(program, "slow") > 1.03 * steady(program, "fast")
    outcomes = _outcomes(program, ["slow", "fast"])
    assert {outcome.report.decision for outcome in outcomes} == {"fast"}


@pytest.mark.parametrize("order", [["fast", "slow"], ["slow", "fast"]], ids=["model-right", "model-wrong"])
@pytest.mark.parametrize("factor", [3.8, 8.0])
def test_much_slower_candidates_are_left_before_they_cost_much(factor: float, order: list[str]) -> None:
    outcomes = _outcomes(_program(Cost(50, 40), Cost(50 * factor, 40, 8)), order)
    assert all(outcome.report.decision == "fast" for outcome in outcomes)
    assert max(outcome.lost for outcome in outcomes) <= BUDGET + SLACK
    assert max(outcome.report.calls for outcome in outcomes) < 100


@pytest.mark.parametrize(("host", "device"), [(100, 20), (10, 100)], ids=["host-bound", "device-bound"])
def test_equal_candidates_keep_the_models_choice(host: float, device: float) -> None:
    program = Program({"one": Cost(host, device), "two": Cost(host, device, 4)}, user_host=10, noise=0.05)
    for seed in range(20):
        outcome = on_trial(program, ["two", "one"], seed, {"one": 1.0, "two": 1.0})
        assert outcome.report.decision == "two"
        assert outcome.report.reason in ("equivalent", "undecided", "budget")


def test_syncs_now_and_then_cost_power_but_decide_nothing_wrong() -> None:
    """A block holds one sync more or less, which is noise: the budget ends some trials on the model's choice."""
    program = _program(Cost(20, 100), Cost(60, 108, 4), sync_every=10)
    outcomes = _outcomes(program, ["slow", "fast"])
    assert {outcome.report.reason for outcome in outcomes if outcome.slower > 0} <= {"budget"}
    assert sum(outcome.slower > 0 for outcome in outcomes) <= 0.1 * SEEDS
    assert max(outcome.lost for outcome in outcomes) <= BUDGET + SLACK
    assert all(outcome.slower == 0 for outcome in _outcomes(program, ["fast", "slow"]))


def test_three_candidates_are_eliminated_one_by_one() -> None:
    costs = {"slow": Cost(110, 22), "fast": Cost(100, 20), "slowest": Cost(220, 20, 4)}
    program = Program(costs, user_host=10, noise=0.05)
    truth = {name: steady(program, name) for name in costs}
    outcomes = [on_trial(program, ["slow", "slowest", "fast"], seed, truth) for seed in range(SEEDS)]
    assert sum(outcome.slower > 0 for outcome in outcomes) <= 0.02 * SEEDS
    assert max(outcome.lost for outcome in outcomes) <= BUDGET + SLACK
    gone = [[look.eliminated for look in outcome.report.looks if look.eliminated] for outcome in outcomes]
    assert sum(looks == [("slowest",), ("slow",)] for looks in gone) >= 0.9 * SEEDS


def test_a_budget_that_is_spent_leaves_the_models_choice() -> None:
    program = _program(Cost(100, 20), Cost(101.5, 20, 4), noise=0.3)
    truth = {name: steady(program, name) for name in program.candidates}
    for order in (["fast", "slow"], ["slow", "fast"]):
        reports = [on_trial(program, order, seed, truth).report for seed in range(20)]
        spent = [report for report in reports if report.reason == "budget"]
        assert spent
        assert all(report.decision == order[0] for report in spent)
        assert all(report.lost <= report.budget * 1.2 for report in spent)


def test_a_seed_makes_a_trial_repeatable_and_the_global_generator_is_left_alone() -> None:
    program = PROGRAMS["queue of 4"]
    truth = {"fast": 1.0, "slow": 1.04}
    state = random.getstate()
    first, again, other = (on_trial(program, ["slow", "fast"], seed, truth).report for seed in (3, 3, 4))
    assert random.getstate() == state
    assert first == again
    assert [block.candidate for block in first.blocks] != [block.candidate for block in other.blocks]


def test_blocks_are_even_in_random_order_and_drop_their_first_call() -> None:
    truth = {"fast": 1.0, "slow": 1.03}
    report = on_trial(PROGRAMS["host-bound, 3 %"], ["slow", "fast"], 1, truth).report
    rounds = [block for block in report.blocks if block.purpose == "round"]
    assert len(rounds) >= 8
    assert all(block.dropped == 1 and block.calls % 2 == 0 for block in rounds)
    assert {block.candidate for block in rounds[::2]} == {"fast", "slow"}
    warm_up = 16
    assert sum(block.calls + block.dropped for block in report.blocks) == report.calls - warm_up
    assert max(block.calls for block in rounds) > rounds[0].calls


def test_a_report_is_json() -> None:
    report = on_trial(PROGRAMS["twice as slow"], ["slow", "fast"], 0, {"fast": 1.0, "slow": 2.0}).report
    read = json.loads(json.dumps(report.as_dict()))
    assert read["decision"] == "fast"
    assert read["reason"] == "faster"
    assert "slow takes" in read["detail"]
    assert read["blocks"][0]["purpose"] == "baseline"
    assert read["looks"][-1]["eliminated"] == ["slow"]
    assert 0 < read["lost"] <= read["budget"]


def test_spoiled_blocks_do_not_count() -> None:
    machine = Machine(_program(Cost(100, 20), Cost(120, 20), noise=0.0))
    trial = Trial(["slow", "fast"], machine.clock, machine.drain, options=SelectionOptions(), seed=0)
    grant = trial.step()
    spoiled = 0
    while grant is not None:
        for _ in range(grant.calls):
            machine.call(grant.candidate)
        if grant.calls > 4 and spoiled < 3:
            machine.now += 1e6
            trial.spoil()
            spoiled += 1
        grant = trial.step()
    assert trial.report is not None
    assert sum(not block.kept for block in trial.report.blocks) == 3
    assert trial.report.decision == "fast"


def test_a_candidate_that_never_runs_as_asked_for_ends_the_trial() -> None:
    machine = Machine(_program(Cost(100, 20), Cost(120, 20)))
    trial = Trial(["slow", "fast"], machine.clock, machine.drain, options=SelectionOptions(), seed=0)
    grant = trial.step()
    while grant is not None:
        for _ in range(grant.calls):
            machine.call(grant.candidate)
        trial.spoil()
        grant = trial.step()
    assert trial.report is not None
    assert (trial.report.decision, trial.report.reason) == ("slow", "disturbed")


def test_an_aborted_trial_keeps_the_models_choice() -> None:
    machine = Machine(_program(Cost(100, 20), Cost(120, 20)))
    trial = Trial(["slow", "fast"], machine.clock, machine.drain, options=SelectionOptions(), seed=0)
    assert trial.step() is not None
    trial.abort("closed")
    assert trial.step() is None
    assert trial.report is not None
    assert (trial.report.decision, trial.report.reason) == ("slow", "closed")
