"""Copied inputs as a candidate: used where they are the fastest, given up where not, and never without a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread
from typing import Any

import pytest
import torch

from pygraph.errors import ReplayError
from pygraph.report.trials import trial_text
from pygraph.runtime import staging
from pygraph.runtime.driver import CopyCost
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.region import Region
from pygraph.runtime.staging import WATCHED
from tests.runtime.fake import FakeDriver
from tests.runtime.measured import ENOUGH, FAST, SLOW, Case
from tests.runtime.simulation import Cost

pytestmark = pytest.mark.usefixtures("own_queue")

ALL = ("patched", "copied", "uncaptured")
TRIED = 2 * ENOUGH
"""Calls within which a trial of three candidates ends."""


@pytest.mark.parametrize("fast", ALL)
def test_the_fastest_of_three_is_used_and_only_copies_hold_memory(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    case = Case(monkeypatch, **{"patched": SLOW, "copied": SLOW, "uncaptured": SLOW, fast: FAST})
    case.calls(TRIED)
    (trial,) = case.trials
    assert (trial["candidates"], trial["decision"], trial["reason"]) == (ALL, fast, "faster")
    case.ran.clear()
    case.calls(300)
    assert set(case.ran) == {fast}
    assert case.region.record.staged_bytes == (64 if fast == "copied" else 0)
    assert case.driver.executables[-1].staged == ((0,) if fast == "copied" else ())
    case.region.close()
    assert case.region.record.staged_bytes == 0


def test_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, SLOW, Cost(70, 20, 4), copied=FAST)
    case.calls(TRIED)
    assert "replays with copied inputs (faster: patched takes" in trial_text(case.trials[0])


def test_the_first_calls_are_patched_to_see_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, copied=SLOW)
    case.calls(2)
    assert case.ran == ["uncaptured", "patched", "uncaptured", "copied"], "the second call also compares, both ways"
    case.ran.clear()
    case.calls(TRIED)
    assert case.ran[: WATCHED + 16] == ["patched"] * (WATCHED + 16)
    assert case.trials[0]["calls"] <= TRIED - WATCHED


def test_what_does_not_move_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, copied=FAST)
    case.driver.moving = frozenset([1])
    case.calls(ENOUGH)
    assert case.trials[0]["candidates"] == ("patched", "uncaptured")
    assert "copied" not in case.ran[4:]


def test_a_wrong_replay_with_copies_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, copied=FAST)
    right: Any = case.driver.kernel

    def kernel(args: list[Any]) -> Sequence[Any]:
        outputs = right(args)
        if case.driver.executables[-1].staged:
            outputs[0][1] += 1
        return list(outputs)

    case.driver.kernel = kernel
    case.calls(ENOUGH)
    assert case.trials[0]["candidates"] == ("patched", "uncaptured")
    assert "copied" not in case.ran[4:]
    assert case.region.record.state == "replay"
    assert "inputs are not copied, as such a replay was wrong: output 0 has other values" in case.region.record.notes


@pytest.mark.parametrize("error", [RuntimeError, ArithmeticError])
def test_one_that_raises_is_never_used(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    case = Case(monkeypatch, copied=FAST)
    right: Any = case.driver.kernel

    def kernel(args: list[Any]) -> Sequence[Any]:
        if case.driver.executables[-1].staged:
            raise error("with copies")
        return list(right(args))

    case.driver.kernel = kernel
    case.calls(ENOUGH)
    assert case.trials[0]["candidates"] == ("patched", "uncaptured")
    assert f"{error.__name__}: with copies" in case.region.record.notes[-1]
    assert case.driver.executables[-1].staged == ()


def test_without_memory_for_the_comparison_copies_are_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, copied=FAST)
    case.driver.has_room = False
    case.calls(ENOUGH)
    assert case.trials[0]["candidates"] == ("patched", "uncaptured")
    assert case.region.record.notes == []


def test_without_memory_later_on_the_trial_ends_on_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, copied=FAST)
    case.calls(WATCHED)
    case.driver.has_room = False
    case.calls(TRIED)
    (trial,) = case.trials
    assert (trial["decision"], trial["reason"]) == ("patched", "disturbed")
    assert case.region.record.staged_bytes == 0


def test_arguments_that_are_written_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, SLOW, copied=FAST)
    case.driver.moving = frozenset([0, 1])
    case.calls(TRIED)
    assert case.driver.executables[-1].staged == (0,)


def test_copies_that_were_asked_for_need_no_trial_and_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "HELD_LIMIT", 1)
    case = Case(monkeypatch, copied=SLOW, asked=[0, 1], measure=False)
    case.driver.moving = frozenset([0, 1])
    case.calls(2)
    case.ran.clear()
    case.calls(WATCHED + 40)
    assert case.ran == ["patched"] * WATCHED + ["copied"] * 40
    assert case.driver.executables[-1].staged == (0,), "the other one is written"
    assert case.trials == []
    case.region.close()
    assert case.region.record.staged_bytes == 0


def test_copies_that_were_asked_for_wait_until_something_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, copied=FAST, asked=[0], measure=False)
    case.driver.moving = frozenset()
    case.calls(WATCHED + 40)
    assert "copied" not in case.ran[4:]
    assert case.region.record.staged_bytes == 0


def test_a_trial_begins_with_copies_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, FAST, copied=SLOW, asked=[0])
    case.calls(TRIED)
    (trial,) = case.trials
    assert trial["candidates"] == ("copied", "patched", "uncaptured")
    assert trial["decision"] == "patched"


@pytest.mark.parametrize(
    "options", [{"measure": False}, {"verify_always": True}, {"verify_always": True, "asked": [0]}]
)
def test_nothing_is_copied_where_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    case = Case(monkeypatch, copied=FAST, **options)
    case.calls(60)
    assert "copied" not in case.ran
    assert case.trials == []


def test_captures_of_a_region_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygraph.runtime.staging.HELD_LIMIT", 84)
    case = Case(monkeypatch, Cost(60, 20), Cost(65, 20, 4), copied=FAST)
    case.calls(TRIED, 2)
    case.calls(TRIED, 3)
    decided = [(trial["capture"], trial["candidates"], trial["decision"]) for trial in case.trials]
    assert decided[0] == (1, ALL, "copied")
    assert decided[-1][:2] == (2, ("patched", "uncaptured"))
    assert case.region.record.staged_bytes == 64


def test_a_switch_that_meets_a_replay_of_another_thread_waits_for_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch, SLOW, copied=FAST)
    case.calls(4)
    right: Any = case.driver.kernel
    inside, go_on = Event(), Event()
    executable = case.driver.executables[-1]

    def slow(args: list[Any]) -> Sequence[Any]:
        inside.set()
        assert go_on.wait(10)
        return list(right(args))

    case.driver.kernel = slow
    thread = Thread(target=case.call)
    thread.start()
    assert inside.wait(10)
    case.driver.kernel = right
    try:
        assert executable.stage([0]) is None
        assert executable.staged == ()
        case.calls(3)
    finally:
        go_on.set()
        thread.join()
    case.calls(TRIED)
    assert case.trials[0]["decision"] == "copied"


# -- the comparison ----------------------------------------------------------------------------------------------------


class _Compared:
    """A region that is captured on its second call, with copies compared; ``staged`` is added to what those return."""

    def __init__(self, fn: Any, written: Sequence[int] = (), staged: Any = None, **options: Any) -> None:
        self.driver = FakeDriver(self._replay, written)
        self.driver.copy_cost = CopyCost(patch_us=1.0, copy_us=0.5, most_bytes=1 << 20)
        self.fn, self.staged = fn, staged
        self.tried = 0
        self.region = Region(fn, self.driver, name="toy", options=RegionOptions(measure=True, **options))

    def _replay(self, args: list[Any]) -> Sequence[Any]:
        if not self.driver.executables[-1].staged:
            return list(self.fn(args))
        self.tried += 1
        x = args[0]
        outputs = list(self.fn(args))
        if self.staged is not None:
            self.staged(x, outputs)
        return outputs

    @property
    def admitted(self) -> bool:
        used = self.region._measured
        assert used is not None
        return used._copies is not None


def _draws(args: list[Any]) -> Sequence[Any]:
    (x,) = args
    args.clear()
    return [x + torch.rand(4)]


def test_the_comparison_leaves_random_numbers_as_one_run_does() -> None:
    case = _Compared(_draws)
    case.region([torch.ones(4)])
    state = torch.get_rng_state()
    (expected,) = _draws([torch.ones(4)])
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    (output,) = case.region([torch.ones(4)])
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert (case.tried, case.admitted) == (1, True)
    assert not case.driver.within
    assert case.driver.executables[-1].staged == ()


def test_a_replay_that_draws_more_with_copies_is_noticed() -> None:
    case = _Compared(_draws, staged=lambda x, outputs: torch.rand(1))
    for _ in range(2):
        case.region([torch.ones(4)])
    assert (case.tried, case.admitted) == (1, False)
    assert "the random state afterwards is another one" in case.region.record.notes[-1]


@pytest.mark.parametrize(("off", "admitted"), [(0.0, True), (1.0, False)])
def test_a_region_that_does_not_repeat_itself_is_held_to_its_spread(off: float, admitted: bool) -> None:
    runs = iter(range(1000))

    def unsteady(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [x + 1e-6 * (next(runs) % 2)]

    case = _Compared(unsteady, staged=lambda x, outputs: outputs[0].add_(off))
    case.driver.nondeterministic = True
    for _ in range(2):
        case.region([torch.ones(4)])
    assert any("non-deterministic" in note for note in case.region.record.notes), case.region.record
    assert (case.tried, case.admitted) == (1, admitted)


def test_a_replay_that_writes_what_it_should_copy_ends_the_region() -> None:
    def total(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [x.sum()]

    case = _Compared(total, staged=lambda x, outputs: x.add_(1), comparison_budget=0)
    case.region([torch.ones(4)])
    with pytest.raises(ReplayError, match="with copied inputs wrote to an argument"):
        case.region([torch.ones(4)])
    assert case.region.record.state == "uncaptured"
    assert torch.equal(case.region([torch.ones(4)])[0], torch.tensor(4.0))
