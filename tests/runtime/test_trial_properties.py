"""Trials of any simulated program: the loss stays bounded, and what is decided for good is never much slower."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.simulation import Cost, Program, on_trial, steady

costs = st.builds(Cost, st.floats(5, 200), st.floats(5, 200), st.integers(1, 8))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Callers of all regimes, with two or three candidates."""
    names = ("patched", "uncaptured", "copied")[: draw(st.integers(2, 3))]
    return Program(
        {name: draw(costs) for name in names},
        user_host=draw(st.floats(1, 50)),
        user_device=draw(st.floats(0, 50)),
        odd_host=draw(st.sampled_from([0.0, 0.0, 60.0])),
        odd_device=draw(st.sampled_from([0.0, 0.0, 60.0])),
        sync_every=draw(st.sampled_from([0, 0, 1, 2, 5, 30, 100])),
        depth=draw(st.sampled_from([1, 2, 5, 64, 1000])),
        noise=draw(st.floats(0, 0.06)),
    )


@settings(max_examples=120, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 1000))
def test_the_loss_is_bounded_and_the_decision_is_no_slow_one(program: Program, seed: int) -> None:
    order = list(program.candidates)
    truth = {name: steady(program, name, 400) for name in order}
    outcome = on_trial(program, order, seed, truth)
    report = outcome.report
    dearest = max(truth.values()) / truth[order[0]]
    assert outcome.lost <= 20 + 5 + dearest, "2 % of 1,000 calls, half a percent of slack, and one call of the slowest"
    assert report.lost <= report.budget * 1.25 + max(truth.values())
    if report.reason in ("faster", "equivalent") and not report.dropped:
        assert outcome.slower <= 0.03
    elif report.reason in ("budget", "undecided"):
        ruled_out = any(order[0] in look.eliminated for look in report.looks)
        assert report.decision == order[0] or ruled_out or order[0] in report.dropped
