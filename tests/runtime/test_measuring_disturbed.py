"""What disturbs or ends measuring: sizes, captures, exceptions, threads, the region's own end. Calls stay right."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from threading import Barrier, Thread
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.errors import CaptureError, ReplayError
from pygraph.runtime import measuring
from pygraph.runtime import region as region_module
from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.measuring import Measured, Site
from pygraph.runtime.region import Region
from pygraph.runtime.selection.records import Grant
from pygraph.runtime.selection.selector import FOREVER
from tests.runtime.fake import FakeDriver, FakeExecutable, double
from tests.runtime.measured import ENOUGH, FAST, SLOW, Case

pytestmark = pytest.mark.usefixtures("own_queue")


# -- what interferes ---------------------------------------------------------------------------------------------------


def test_each_captured_size_has_its_own_trial_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, SLOW, FAST)
    case.calls(ENOUGH, 2)
    case.calls(ENOUGH, 3)
    assert [(trial["capture"], trial["decision"]) for trial in case.trials] == [(1, "uncaptured"), (2, "uncaptured")]
    assert len({trial["seed"] for trial in case.trials}) == 2
    case.ran.clear()
    for size in (2, 3, 3, 2, 2):
        case.call(size)
    assert set(case.ran) == {"uncaptured"}


@pytest.mark.parametrize("scalars", [((), ()), ((1,), (2,)), ((1.5,), (2.5,))], ids=["sizes", "keys", "floats"])
def test_sizes_that_alternate_cannot_be_timed(
    monkeypatch: pytest.MonkeyPatch, scalars: tuple[tuple[Any, ...], tuple[Any, ...]]
) -> None:
    case = Case(monkeypatch, SLOW, FAST)
    for _ in range(ENOUGH):
        case.call(2, *scalars[0])
        case.call(3, *scalars[1])
    assert {(trial["decision"], trial["reason"]) for trial in case.trials} == {("patched", "disturbed")}
    assert len(case.trials) >= 1
    case.ran.clear()
    case.calls(20, 2, *scalars[0])
    assert set(case.ran) == {"patched"}


def test_another_size_is_noticed_where_the_first_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one key; calls are looked at one in many."""
    case = Case(monkeypatch, SLOW, FAST)
    case.calls(ENOUGH, 2)
    assert case.trials[0]["decision"] == "uncaptured"
    case.calls(600, 3)
    assert case.region.record.captures == 2


def test_of_two_sizes_each_runs_as_was_decided_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, SLOW, FAST)
    case.calls(ENOUGH, 2)
    case.machine.program = replace(case.machine.program, candidates={"patched": FAST, "uncaptured": SLOW})
    case.calls(ENOUGH, 3)
    assert [trial["decision"] for trial in case.trials] == ["uncaptured", "patched"]
    case.ran.clear()
    for _ in range(20):
        case.call(2)
        case.call(3)
    assert case.ran == ["uncaptured", "patched"] * 20


def test_calls_of_a_decided_size_do_not_count_for_the_one_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, SLOW, FAST)
    case.calls(ENOUGH, 2)
    for _ in range(100):
        case.calls(6, 3)
        case.call(2)
    (trial,) = [trial for trial in case.trials if trial["capture"] == 2]
    timed = [block for block in trial["blocks"] if block["purpose"] != "baseline" and block["kept"]]
    assert all(block["calls"] < 6 for block in timed)


def test_a_selector_that_settled_for_good_is_still_asked_now_and_then() -> None:
    """By that, calls of another size are noticed."""

    class Settled:
        reports: ClassVar[list[Any]] = []

        def step(self) -> Grant:
            return Grant("uncaptured", FOREVER)

        def spoil(self) -> None:
            pass

    driver = FakeDriver()
    site = Site(driver, [torch.ones(2)], frozenset())
    executable = FakeExecutable(driver, double, [])
    used = Measured(executable, Settled(), site, RegionRecord("toy"))  # type: ignore[arg-type]
    seen = []
    for size in [2, *[3] * 600]:
        assert used.awaits_uncaptured()
        seen.append(used.grants([torch.ones(size)], alone=True))
    assert seen[:256] == [True] * 256
    assert not any(seen[256:])


def test_offsets_that_are_captured_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, SLOW, FAST)
    case.driver.sensitive = frozenset([0])
    case.calls(ENOUGH)
    assert [(trial["decision"], trial["reason"]) for trial in case.trials] == [("uncaptured", "faster")]
    assert case.region.record.captures == 1


def test_blocks_with_declined_replays_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(2)
    case.driver.declines = lambda args: case.machine.calls % 7 == 0
    case.calls(ENOUGH)
    (trial,) = case.trials
    tried = [block for block in trial["blocks"] if block["candidate"] == "patched"]
    assert tried[0]["purpose"] == "baseline"
    assert all(block["calls"] < 14 for block in tried if block["kept"])


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_calls_under_a_dispatch_mode_run_uncaptured_and_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(40)
    case.ran.clear()
    for _ in range(40):
        case.calls(3)
        with _Watching():
            case.call()
    assert case.ran.count("uncaptured") >= 40
    case.calls(ENOUGH)
    (trial,) = case.trials
    assert trial["decision"] == "patched"
    assert any(not block["kept"] for block in trial["blocks"])


def test_calls_while_another_thread_captures_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(42)
    another_thread = -1
    monkeypatch.setattr(region_module, "_capturing", [another_thread])
    case.calls(200)
    (trial,) = case.trials
    during = [block for block in trial["blocks"] if block["purpose"] != "baseline" and block["start"] >= 40]
    assert during
    assert not any(block["kept"] for block in during)


def test_a_capture_of_another_region_disturbs_what_is_being_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(45)
    other = Region(lambda args: [args.pop() * 2], FakeDriver(), name="other")
    before = len(case.ran)
    for _ in range(2):
        other([torch.ones(2)])
    case.calls(ENOUGH)
    (trial,) = case.trials
    at = before - 3  # calls of the trial; the comparison ran once more
    blocks = [block for block in trial["blocks"] if block["purpose"] != "baseline"]
    (timed,) = [block for block in blocks if 0 <= at - block["start"] <= block["dropped"] + block["calls"] - 1]
    assert not timed["kept"]
    assert (trial["decision"], trial["reason"]) == ("patched", "faster")


@pytest.mark.parametrize("name", ["patched", "uncaptured"])
def test_what_a_candidate_raises_reaches_the_caller_and_the_trial_goes_on(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = Case(monkeypatch)
    case.calls(40)
    case.fails[name] = 3
    args: list[Any] = []

    def calls() -> None:
        for _ in range(ENOUGH):
            args[:] = torch.ones(2), torch.zeros(2)
            case.region(args)
            assert args == []

    with pytest.raises(ArithmeticError, match=name):
        calls()
    assert args == []
    calls()
    (trial,) = case.trials
    assert (trial["decision"], trial["reason"]) == ("patched", "faster")
    assert any(not block["kept"] for block in trial["blocks"])


def test_a_replay_that_breaks_its_contract_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(30)

    def broken(args: list[Any]) -> Sequence[Any]:
        raise ReplayError("out of order")

    case.driver.kernel = broken
    with pytest.raises(ReplayError, match="out of order"):
        case.calls(100)
    case.calls(5)
    assert [(trial["decision"], trial["reason"]) for trial in case.trials] == [("patched", "closed")]
    assert case.region.record.state == "uncaptured"


def test_what_waiting_for_the_device_raises_reaches_the_caller_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(10)

    def lost() -> bool:
        raise RuntimeError("device lost")

    case.driver.drains = lost
    with pytest.raises(RuntimeError, match="device lost"):
        case.calls(100)
    assert case.trials[0]["reason"] == "drain-failed"
    case.ran.clear()
    case.calls(100)
    assert case.ran == ["patched"] * 100


def test_where_the_caller_captures_its_stream_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.driver.drains = lambda: False
    case.calls(100)
    (trial,) = case.trials
    assert (trial["decision"], trial["reason"]) == ("patched", "disturbed")


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [2, 10, 19, 22, 40])
def test_closing_ends_a_trial_wherever_it_is(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    case = Case(monkeypatch)
    case.calls(calls)
    case.region.close()
    assert all(executable.closed for executable in case.driver.executables)
    assert [trial["reason"] for trial in case.trials] == ["closed"] * (calls > 2)
    assert measuring.TRIALS.enter(object()), "the next region's turn"
    case.ran.clear()
    case.calls(20)
    assert set(case.ran) == {"uncaptured"}
    assert case.region.record.replays + case.region.record.uncaptured == calls + 20


def test_eviction_ends_a_trial_and_the_next_capture_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, max_captures=1)
    case.calls(40, 2)
    case.calls(ENOUGH, 3)
    assert case.driver.executables[0].closed
    assert [(trial["capture"], trial["reason"]) for trial in case.trials] == [(1, "closed"), (2, "faster")]


def test_a_region_that_nobody_holds_is_freed_at_once_also_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(30)
    used = weakref.ref(case.region._measured)  # type: ignore[arg-type]
    case.driver.executables.clear()
    gc.disable()
    try:
        del case.region
        assert used() is None
    finally:
        gc.enable()


def test_nothing_of_a_call_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, SLOW, FAST)
    case.calls(2)
    for _ in range(200):
        tensors = [torch.ones(2), torch.zeros(2)]
        known = [weakref.ref(tensor) for tensor in tensors]
        outputs = list(case.region(tensors))
        known += [weakref.ref(out) for out in outputs]
        del outputs, tensors
        assert [ref() for ref in known] == [None] * 4


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 4])
def test_calls_from_several_threads_are_right_and_end_the_trial(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    case = Case(monkeypatch)
    case.calls(4)
    barrier, errors = Barrier(number), []
    interval = sys.getswitchinterval()

    def work() -> None:
        try:
            barrier.wait(10)
            case.calls(400)
        except BaseException as error:  # noqa: BLE001 - handed to the test, whatever it is
            errors.append(error)

    threads = [Thread(target=work) for _ in range(number)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert case.region.record.replays + case.region.record.uncaptured == 4 + 400 * number
    assert len(case.trials) == 1


def test_a_thread_that_comes_while_another_one_waits_for_the_device_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch)
    case.calls(2)
    inside = []

    def drain() -> bool:
        thread = Thread(target=case.call)
        thread.start()
        thread.join(10)
        inside.append(thread.is_alive())
        return True

    case.driver.drains = drain
    case.calls(ENOUGH)
    assert inside
    assert not any(inside)
    (trial,) = case.trials
    assert trial["decision"] == "patched"
    assert not any(block["kept"] for block in trial["blocks"] if block["purpose"] != "baseline")


def test_closing_while_another_thread_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.calls(2)
    closing: list[Thread] = []

    def drain() -> bool:
        if not closing:
            closing.append(Thread(target=case.region.close))
            closing[0].start()
            closing[0].join(0.05)
        return True

    case.driver.drains = drain
    case.calls(60)
    closing[0].join(10)
    assert not closing[0].is_alive()
    assert case.trials[-1]["reason"] == "closed"
    assert case.region.record.state == "uncaptured"


def test_a_refused_capture_is_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.driver.refuses = CaptureError("opaque", "no way")
    case.calls(30)
    assert case.trials == []
    assert set(case.ran) == {"uncaptured"}
