"""The queue, the watch, and the selector that a region asks."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

import pytest

from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.queue import TrialQueue
from pygraph.runtime.selection.records import Grant
from pygraph.runtime.selection.selector import FOREVER, Selector
from pygraph.runtime.selection.watch import Watch
from tests.runtime.simulation import Cost, Machine, Program

PROGRAM = Program({"fast": Cost(50, 20), "slow": Cost(60, 20, 4)}, user_host=10, noise=0.03)
ORDER = ["slow", "fast"]


class _Region:
    """Calls a machine as a region would: a count of calls, and a question when it is used up."""

    def __init__(self, machine: Machine, queue: TrialQueue, order: list[str] | None = None, **options: float) -> None:
        self.machine = machine
        chosen = SelectionOptions(**options)  # type: ignore[arg-type]
        self.selector = Selector(order or ORDER, machine.clock, machine.drain, options=chosen, queue=queue)
        self.ran: list[str] = []
        self._left = 0

    def call(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._active, calls = self.selector.step()
            self._left = calls - 1
        self.ran.append(self._active)
        self.machine.call(self._active)

    def calls(self, count: int) -> None:
        for _ in range(count):
            self.call()


def _steps(selector: Selector, count: int) -> None:
    for _ in range(count):
        selector.step()


def test_a_region_is_tried_in_its_own_calls_and_then_keeps_the_decision() -> None:
    region = _Region(Machine(PROGRAM), TrialQueue())
    region.calls(1000)
    (report,) = region.selector.reports
    assert (report.decision, report.reason) == ("fast", "faster")
    assert set(region.ran[: report.calls]) == {"fast", "slow"}
    assert set(region.ran[report.calls :]) == {"fast"}


def test_a_single_candidate_is_never_asked_about_again() -> None:
    machine = Machine(PROGRAM)
    selector = Selector(["slow"], machine.clock, machine.drain, queue=TrialQueue())
    assert selector.step() == Grant("slow", FOREVER)
    assert machine.now == 0


def test_one_region_is_on_trial_at_a_time() -> None:
    machine, queue = Machine(PROGRAM), TrialQueue()
    first, second = _Region(machine, queue), _Region(machine, queue)
    while not first.selector.reports:
        first.call()
        second.call()
    assert set(second.ran[: len(first.ran) - 1]) == {"slow"}
    for _ in range(2000):
        first.call()
        second.call()
    assert len(second.selector.reports) == 1


def test_waiting_regions_take_turns_in_order() -> None:
    queue = TrialQueue()
    a, b, c = object(), object(), object()
    assert queue.enter(a)
    assert not queue.enter(b)
    assert not queue.enter(c)
    queue.leave(a)
    assert not queue.enter(c)
    assert queue.enter(b)
    assert queue.enter(b)
    queue.leave(b)
    assert queue.enter(c)


def test_a_region_that_is_not_called_any_more_loses_its_turn() -> None:
    queue = TrialQueue(patience=5)
    gone, here = object(), object()
    assert queue.enter(gone)
    assert [queue.enter(here) for _ in range(6)] == [False] * 5 + [True]
    assert not queue.enter(gone)
    queue.leave(here)
    first_in_line, other = gone, object()
    assert [queue.enter(other) for _ in range(6)] == [False] * 5 + [True]
    queue.leave(other)
    assert queue.enter(first_in_line)


def test_a_stalled_trial_ends_on_the_models_choice() -> None:
    machine, queue = Machine(PROGRAM), TrialQueue(patience=3)
    rare, busy = _Region(machine, queue), _Region(machine, queue)
    rare.calls(30)
    busy.calls(64 * 4)
    assert not rare.selector.reports
    rare.calls(60)
    (report,) = rare.selector.reports
    assert (report.decision, report.reason) == ("slow", "stalled")
    busy.calls(1000)
    assert busy.selector.decision == "fast"


def test_the_watch_sees_a_change_but_no_pause() -> None:
    watch, now = Watch(1.25), 0.0
    seen = []
    for period in range(40):
        now += 1.0 + 0.05 * (period % 3) + (500.0 if period in (8, 20) else 0.0)
        seen.append(watch.observe(now))
    assert not any(seen)
    for _ in range(4):
        now += 1.5
        seen.append(watch.observe(now))
    assert seen[-1]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_program_that_changes_gets_another_trial_with_half_the_budget(factor: float) -> None:
    machine = Machine(PROGRAM)
    region = _Region(machine, TrialQueue())
    region.calls(5000)
    (first,) = region.selector.reports
    changed = {"fast": Cost(70 * factor, 20), "slow": Cost(50 * factor, 20)}
    machine.program = replace(PROGRAM, candidates=changed, user_host=10 * factor)
    region.calls(5000)
    _, second = region.selector.reports
    assert second.candidates == ("fast", "slow")
    assert second.decision == "slow"
    calls = [report.budget / report.per_call[report.candidates[0]] for report in (first, second)]
    assert calls == [pytest.approx(20.0), pytest.approx(10.0)]


def test_trials_are_bounded_in_number() -> None:
    machine = Machine(PROGRAM)
    region = _Region(machine, TrialQueue(), trials=3, period=16)
    for step in range(20):
        machine.program = replace(PROGRAM, user_host=10.0 + 100 * (step % 2))
        region.calls(2000)
    assert len(region.selector.reports) == 3
    assert region.selector.step() == Grant(region.selector.decision, FOREVER)


def test_a_steady_program_is_asked_about_once_a_period() -> None:
    machine = Machine(PROGRAM)
    region = _Region(machine, TrialQueue())
    region.calls(2000)
    clock, reads = machine.clock, 0

    def counted() -> float:
        nonlocal reads
        reads += 1
        return clock()

    region.selector._clock = counted
    region.calls(2560)
    assert reads == 10


def test_callers_in_several_threads_end_the_trial() -> None:
    region = _Region(Machine(PROGRAM), TrialQueue())
    for _ in range(20):
        region.calls(10)
        thread = Thread(target=region.calls, args=(10,))
        thread.start()
        thread.join()
    (report,) = region.selector.reports
    assert (report.decision, report.reason) == ("slow", "threads")
    assert set(region.ran[report.calls + 20 :]) == {"slow"}


def test_a_caller_that_moves_to_another_thread_is_tried_on() -> None:
    region = _Region(Machine(PROGRAM), TrialQueue())
    region.calls(40)
    thread = Thread(target=region.calls, args=(1500,))
    thread.start()
    thread.join()
    assert [report.decision for report in region.selector.reports] == ["fast"]


def test_a_thread_that_comes_while_another_one_steps_gets_one_call() -> None:
    machine, grants = Machine(PROGRAM), []

    def drain() -> None:
        grants.append(selector.step())

    selector = Selector(ORDER, machine.clock, drain, queue=TrialQueue())
    while not grants:
        for _ in range(selector.step().calls):
            machine.call("slow")
    assert set(grants) == {Grant("slow", 1)}


def test_a_drain_that_raises_is_heard_and_ends_selection() -> None:
    machine, queue = Machine(PROGRAM), TrialQueue()

    def drain() -> None:
        raise RuntimeError("device lost")

    selector = Selector(ORDER, machine.clock, drain, queue=queue)
    with pytest.raises(RuntimeError, match="device lost"):
        _steps(selector, 20)
    assert selector.reports[0].reason == "drain-failed"
    assert selector.step() == Grant("slow", FOREVER)
    assert queue.enter(object()), "the next region's turn"


def test_a_closed_selector_stays_with_its_decision() -> None:
    region, queue = None, TrialQueue()
    region = _Region(Machine(PROGRAM), queue)
    region.calls(50)
    region.selector.close()
    assert region.selector.reports[0].reason == "closed"
    assert region.selector.step() == Grant("slow", FOREVER)
    assert queue.enter(object())
