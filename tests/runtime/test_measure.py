"""Measured selection through Region, in virtual time: what is decided, what disturbs it, what is kept on disk."""

from __future__ import annotations

import contextlib
import logging
import math
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from types import CodeType, FrameType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from pygraph import cache
from pygraph.errors import ReplayError
from pygraph.runtime import region as region_module
from pygraph.runtime.agreement import VOTES, Ballot, Outcome
from pygraph.runtime.contract import Executable, Program, Timer
from pygraph.runtime.discover import capture
from pygraph.runtime.events import counts
from pygraph.runtime.measure import _PLAN, Contest, Decision
from pygraph.runtime.recording import Recording
from pygraph.runtime.region import Region, RegionOptions
from pygraph.runtime.variants import Variant
from tests.runtime.captures import writes
from tests.runtime.fake import FakeDriver

BLOCK = 9
"""Calls of a block, the dropped one included."""
WON = 4 * 2 * BLOCK
"""Calls of a measurement that uncaptured wins: four of five rounds."""
LOST = 2 * 2 * BLOCK
"""Calls of one that is over when uncaptured has lost two rounds."""
TURNS = 4 * 2 * 8
"""Calls of a contest that another order wins."""
FAST, SLOW = 50.0, 65.0


class World:
    """A clock, a device with a queue, and what a call costs in µs: of the host, and of the device."""

    def __init__(self) -> None:
        self.now = 0.0
        self.host = {"replay": FAST, "uncaptured": SLOW, "concurrent": FAST}
        self.device = {"replay": 0.0, "uncaptured": 0.0, "concurrent": 0.0}
        self.ran: list[str] = []
        self.fails: set[int] = set()
        self._idle_at = 0.0

    def run(self, name: str, args: list[Any]) -> Sequence[Any]:
        x, total, *rest = args
        args.clear()
        self.ran.append(name)
        if len(self.ran) in self.fails:
            raise ArithmeticError(name)
        self.now += self.host[name]
        self._idle_at = max(self.now, self._idle_at) + self.device[name]
        total.add_(x)
        return [total * 3 + sum(rest), total]

    def drain(self) -> bool:
        self.now = self.idle_at
        return True

    @property
    def idle_at(self) -> float:
        return max(self.now, self._idle_at)


class WorldTimer:
    """Of the device: it begins when what was submitted before is done, and is over when the device has come so far."""

    def __init__(self) -> None:
        self.begin = world.idle_at
        self.end = math.inf

    def stop(self) -> None:
        self.end = world.idle_at

    def seconds(self) -> float | None:
        return (self.end - self.begin) * 1e-6 if world.now >= self.end else None


world = World()


@pytest.fixture(autouse=True)
def _own_world() -> None:
    global world
    world = World()
    counts.clear()


def uncaptured(args: list[Any]) -> Sequence[Any]:
    return world.run("uncaptured", args)


def replayed(args: list[Any]) -> Sequence[Any]:
    return world.run("replay", args)


def make(fn: Any = uncaptured, driver: FakeDriver | None = None, **options: Any) -> tuple[Region, FakeDriver]:
    chosen = driver or FakeDriver(replayed, written=[1])
    chosen.drains = lambda: world.drain()
    chosen_options = RegionOptions(**{"measure": True, **options})
    return Region(fn, chosen, name="toy", options=chosen_options, clock=lambda: world.now * 1e-6), chosen


def call(region: Callable[[list[Any]], Sequence[Any]], times: int = 1, size: int = 2, *rest: Any) -> None:
    """Calls whose results and whose mutation are checked."""
    for _ in range(times):
        x, total = torch.ones(size), torch.full((size,), 4.0)
        outputs = region([x, total, *rest])
        assert total.tolist() == [5.0] * size, "mutated once"
        assert outputs[1] is total
        assert outputs[0].tolist() == [15.0 + sum(rest)] * size


def timed(region: Region, calls: int = WON) -> list[str]:
    """What ``calls`` calls of a region that is captured now ran."""
    call(region, 2)
    world.ran.clear()
    call(region, calls)
    return list(world.ran)


# -- what is decided ---------------------------------------------------------------------------------------------------


def test_a_faster_replay_is_used_after_two_rounds() -> None:
    region, driver = make()
    ran = timed(region)
    replay, other = ["replay"] * BLOCK, ["uncaptured"] * BLOCK
    assert ran == [*replay, *other, *other, *replay, *["replay"] * (WON - LOST)]
    assert region.record.decisions == [Decision("replay", pytest.approx(FAST), pytest.approx(SLOW), LOST)]
    assert (region.record.state, driver.trimmed) == ("replay", 1)
    assert region.record.replays == world.ran.count("replay")
    assert region.record.uncaptured == 2 + world.ran.count("uncaptured")


def test_a_faster_uncaptured_function_is_used_after_four_rounds() -> None:
    world.host |= {"replay": SLOW, "uncaptured": FAST}
    region, driver = make()
    ran = timed(region, WON + 20)
    assert (ran.count("replay"), ran[WON:]) == (4 * BLOCK, ["uncaptured"] * 20)
    assert region.record.decisions == [Decision("uncaptured", pytest.approx(SLOW), pytest.approx(FAST), WON)]
    assert (region.record.state, region.record.reason, region.record.captures) == ("uncaptured", None, 1)
    assert driver.executables[0].closed, "what was captured is of no use any more"
    assert driver.trimmed == 0, "more uncaptured calls come"


@pytest.mark.parametrize("cost", [FAST, 0.96 * FAST, 1.01 * FAST])
def test_a_tie_replays(cost: float) -> None:
    world.host |= {"replay": FAST, "uncaptured": cost}
    region, _ = make()
    assert timed(region, WON + 5)[WON:] == ["replay"] * 5
    assert [each.choice for each in region.record.decisions] == ["replay"]


@pytest.mark.parametrize(("blocks", "choice"), [((1,), "uncaptured"), ((9,), "uncaptured"), ((2, 6), "replay")])
def test_uncaptured_may_lose_one_round(blocks: tuple[int, ...], choice: str) -> None:
    """The second, third, sixth, seventh and tenth block are uncaptured."""
    world.host |= {"replay": SLOW, "uncaptured": FAST}
    region, _ = make()
    call(region, 2)
    for number in range(10):
        call(region, 3)
        world.now += 10_000.0 * (number in blocks)  # a pause
        call(region, BLOCK - 3)
    (decision,) = region.record.decisions
    assert decision.choice == choice


@pytest.mark.parametrize("slow", ["replay", "uncaptured"])
def test_the_time_of_the_device_counts(slow: str) -> None:
    """The host is far ahead, and hardly busy."""
    world.host = {"replay": 1.0, "uncaptured": 1.0}
    world.device = {"replay": 50.0, "uncaptured": 50.0, slow: 70.0}
    region, _ = make()
    timed(region)
    (decision,) = region.record.decisions
    assert decision.choice == ("replay" if slow == "uncaptured" else "uncaptured")
    times = (decision.replay_us, decision.other_us)
    assert times == pytest.approx(tuple(world.device[name] for name in ("replay", "uncaptured")), rel=0.01)


# -- the order of launches ---------------------------------------------------------------------------------------------


class Parallel(FakeDriver):
    """A region of two launches, of which neither depends on the other. ``wrong``: in another order it goes wrong."""

    parallel = True

    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__(replayed, written=[1])
        self.wrong = wrong
        self.captured_by_user = False
        self.timers: list[WorldTimer] = []
        self.made = 0

    def timer(self, device: torch.device | None) -> Timer | None:  # type: ignore[override]
        self.made += 1
        return None if self.captured_by_user else self.timers.pop() if self.timers else WorldTimer()

    def capture(self, fn: Any, args: Sequence[Any], eager: Collection[str] = (), **options: Any) -> Recording:
        self.edits.append(lambda capture: capture.launch(capture.pool(64), name="beside", uses=[writes(0, 64)]))
        return super().capture(fn, args, eager, **options)

    def instantiate(self, program: Program) -> Executable:
        made = super().instantiate(program)
        if program.order is not None:
            self.executables[-1].driver = concurrent_driver(self)
        return made


def concurrent_driver(of: Parallel) -> FakeDriver:
    """What a replay in another order does."""

    def run(args: list[Any]) -> Sequence[Any]:
        made, total = world.run("concurrent", args)
        return [made + 1 if of.wrong else made, total]

    return FakeDriver(run, written=[1])


def contested(region: Region) -> None:
    """Calls until the replay has been held against uncaptured calls, and one that captures it in another order."""
    call(region, 2 + LOST)
    assert [each.choice for each in region.record.decisions] == ["replay"]
    assert region.record.contests == 1
    before = len(world.ran)
    call(region, 1)
    assert world.ran[before:] == ["concurrent", "uncaptured"], "compared, and answered"
    world.ran.clear()


@pytest.mark.parametrize("cost", [0.9 * FAST, 0.97 * FAST])
def test_another_order_of_launches_is_used_if_it_is_faster(cost: float) -> None:
    world.host["concurrent"] = cost
    region, driver = make(driver=Parallel(), order="measured")
    contested(region)
    call(region, TURNS + 20)
    assert world.ran[TURNS:] == ["concurrent"] * 20
    assert set(world.ran) == {"concurrent", "replay"}
    assert region.record.orders == [
        Decision("concurrent", pytest.approx(FAST), pytest.approx(cost), TURNS, other="concurrent")
    ]
    assert [executable.closed for executable in driver.executables] == [True, False]
    assert (region.record.contests, region.record.captures) == (0, 1)
    assert (region.record.longest_path, region.record.launches) == (1, 2)
    assert region.record.timeline == (("toy", 0, 0), ("beside", 1, 0))


@pytest.mark.parametrize(
    ("every", "cost"), [*((every, 1.03) for every in range(1, 9)), *((every, 0.9) for every in (1, *range(3, 9)))]
)
def test_a_caller_who_waits_now_and_then_does_not_decide(every: int, cost: float) -> None:
    """A call that finds the device idle takes as long as the host does, too. Whichever call that is. A caller who waits
    every second time may miss a gain."""
    for phase in range(every):
        world.device |= {"replay": 100.0, "concurrent": 100.0 * cost}
        world.host |= {"replay": 20.0, "concurrent": 20.0}
        region, _ = make(driver=Parallel(), order="measured", measure=False)
        call(region, 3)
        for turn in range(200):
            if turn % every == phase:
                world.drain()
            call(region)
        (decision,) = region.record.orders
        assert decision.choice == ("concurrent" if cost < 1 else "replay"), (phase, decision)


def test_orders_are_timed_on_the_device_though_it_is_behind() -> None:
    """A loop that the device bounds: what a call took is known some calls later."""
    world.device |= {"replay": 500.0, "concurrent": 400.0}
    world.host |= {"replay": 90.0, "concurrent": 120.0}
    region, _ = make(driver=Parallel(), order="measured", measure=False)
    call(region, 3 + TURNS)
    assert region.record.contests == 1, "not all is known yet"
    call(region, 500)
    assert region.record.orders == [
        Decision("concurrent", pytest.approx(500.0), pytest.approx(400.0), TURNS, other="concurrent")
    ]


@pytest.mark.parametrize("scalars", [((), ()), ((1,), (2,)), ((1.5,), (2.5,))], ids=["sizes", "keys", "floats"])
def test_orders_of_sizes_that_alternate_are_decided(scalars: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    """Each for itself, and those of two regions, at the same time."""
    world.host["concurrent"] = 0.5 * FAST
    regions = [make(driver=Parallel(), order="measured", measure=False)[0] for _ in range(2)]
    for _ in range(3 + TURNS):
        for region in regions:
            call(region, 1, 2, *scalars[0])
            call(region, 1, 3, *scalars[1])
    for region in regions:
        assert [(each.choice, each.disturbed) for each in region.record.orders] == [("concurrent", False)] * 2
        assert region.record.contests == 0


@pytest.mark.parametrize(("cost", "tried"), [(0.5, 6), (1.0, 3)])
def test_another_order_is_tried_for_a_few_sizes_at_once_and_no_more_where_it_does_not_pay(
    cost: float, tried: int
) -> None:
    world.host["concurrent"] = cost * FAST
    region, driver = make(driver=Parallel(), order="measured", measure=False)
    most = 0
    for _ in range(3 * TURNS):
        for size in range(2, 8):
            call(region, 1, size)
            most = max(most, region._variants.contested_now)
    assert most == 3
    assert [each.choice for each in region.record.orders] == ["concurrent" if tried == 6 else "replay"] * tried
    assert (region.record.contests, sum(not each.closed for each in driver.executables)) == (0, 6)
    assert len(driver.executables) == 6 + tried
    world.ran.clear()
    call(region, 3, 2)
    assert world.ran == ["concurrent" if tried == 6 else "replay"] * 3


@pytest.mark.parametrize("scalars", [(), (7,)])
def test_sizes_that_do_not_come_again_leave_others_their_turn(scalars: tuple[int, ...]) -> None:
    """Also those of another key, which nobody looks at any more."""
    world.host["concurrent"] = 0.5 * FAST
    region, _ = make(driver=Parallel(), order="measured", measure=False)
    for size in (3, 4, 5):
        call(region, 10, size)
    for size in (2, 6):
        call(region, 300 + TURNS, size, *scalars)
    assert [each.choice for each in region.record.orders] == ["concurrent"] * 2
    assert region.expects_replay()


def test_a_second_replay_that_declines_leaves_the_first() -> None:
    region, _ = make(driver=Parallel(), order="measured", measure=False)
    call(region, 3)
    (variant,) = region._variants.under(())
    assert variant.rival is not None
    variant.rival.close()
    world.ran.clear()
    call(region, 100)
    assert world.ran == ["replay"] * 100


def decided(region: Region) -> list[tuple[str, bool]]:
    """What was decided on orders, and whether by an earlier process."""
    return [(each.choice, each.path is not None) for each in region.record.orders]


def test_orders_that_are_known_wait_for_nothing(tmp_path: Path) -> None:
    """Neither for those of other sizes that are being measured, nor are they left out where others did not gain."""
    options: dict[str, Any] = {"order": "measured", "measure": False, "cache_dir": str(tmp_path)}
    world.host["concurrent"] = 0.5 * FAST
    call(make(driver=Parallel(), **options)[0], 3 + TURNS, 2)
    world.host["concurrent"] = 2 * FAST
    for size in (3, 4, 5):
        call(make(driver=Parallel(), **options)[0], 3 + TURNS, size)
    region, _ = make(driver=Parallel(), **options)
    for size in (3, 4, 5, 2):
        call(region, 4, size)
    assert decided(region) == [*[("replay", True)] * 3, ("concurrent", True)]
    region, _ = make(driver=Parallel(), **options)
    for size in (6, 7, 8, 2):
        call(region, 4, size)
    assert decided(region) == [("concurrent", True)]
    more = make(driver=Parallel(), order_memory=0.5, **options)[0]
    call(more, 3, 2)
    assert decided(more) == [], "with more memory it was not tried"


def test_turns_that_are_lost_are_made_up_for() -> None:
    """Those that another thread takes part in, and those that an error of the device ends."""
    world.host["concurrent"] = 0.5 * FAST
    for at in count():
        region, _ = make(driver=Parallel(), order="measured", measure=False)
        call(region, 3 + TURNS - 3)
        if not interrupted(Contest.leave.__code__, partial(call, region), partial(call, region, 2), at):
            break
        call(region, 10)
        assert [each.choice for each in region.record.orders] == ["concurrent"], at
    assert at > 20


def test_an_error_of_the_device_in_a_turn_reaches_the_caller_once() -> None:
    world.host["concurrent"] = 0.5 * FAST
    driver = Parallel()
    region, _ = make(driver=driver, order="measured", measure=False)
    call(region, 3)
    broken = WorldTimer()
    broken.seconds = Mock(side_effect=[KeyboardInterrupt, 50e-6])  # type: ignore[method-assign]
    driver.timers = [broken]
    with pytest.raises(KeyboardInterrupt):
        call(region)
    call(region, TURNS + 1)
    assert [each.choice for each in region.record.orders] == ["concurrent"]


def test_a_size_that_does_not_come_again_is_timed_in_vain_for_a_while_only() -> None:
    """And goes on when it does come again."""
    world.host["concurrent"] = 0.5 * FAST
    driver = Parallel()
    region, _ = make(driver=driver, order="measured", measure=False)
    call(region, 10, 3)
    call(region, 3 + TURNS, 2)
    driver.made = 0
    for _ in range(1000):
        call(region, 1, 2)
        call(region, 1, 2, 1)
    assert driver.made <= 2 * 200, "of 1,000 calls of each of two others"
    call(region, TURNS, 3)
    assert [each.choice for each in region.record.orders] == ["concurrent"] * 3


def test_the_end_of_a_contest_does_not_count_in_the_block_of_another_region() -> None:
    world.host |= {"concurrent": 0.5 * FAST}
    contested_region, _ = make(driver=Parallel(), order="measured", measure=False)
    call(contested_region, 3 + TURNS - 1)
    region, _ = make()
    call(region, 2 + 3)

    def slow(_: Variant, *, rival: bool) -> None:
        world.now += 10_000.0 + rival

    with patch.object(Variant, "choose", slow):
        call(contested_region)
    assert len(contested_region.record.orders) == 1
    call(region, LOST + BLOCK)
    assert region.record.decisions[0].replay_us == pytest.approx(FAST)


def test_turns_in_a_stream_that_the_user_captures_are_not_timed() -> None:
    world.host["concurrent"] = 0.5 * FAST
    driver = Parallel()
    region, _ = make(driver=driver, order="measured")
    contested(region)
    driver.captured_by_user = True
    call(region, 100)
    assert world.ran == ["replay"] * 100
    driver.captured_by_user = False
    call(region, TURNS)
    assert [each.choice for each in region.record.orders] == ["concurrent"]


@pytest.mark.parametrize("cost", [0.99 * FAST, FAST, 2 * FAST])
def test_a_tie_keeps_the_order_of_the_program(cost: float) -> None:
    world.host["concurrent"] = cost
    region, driver = make(driver=Parallel(), order="measured")
    contested(region)
    call(region, TURNS + 20)
    assert world.ran[TURNS:] == ["replay"] * 20
    assert [each.choice for each in region.record.orders] == ["replay"]
    assert [executable.closed for executable in driver.executables] == [False, True]


def test_nothing_is_chosen_of_replays_that_were_released() -> None:
    variant = Variant(key=(), signature=(), wanted=2)
    variant.choose(rival=True)
    assert (variant.executable, variant.rival, variant.concurrent) == (None, None, False)


def interrupted(code: CodeType, call: Callable[[], None], by: Callable[[], None], at: int) -> bool:
    """``call``, with ``by`` before instruction ``at`` of ``code``, as on another thread; whether it gets there."""
    steps, happened = count(), []

    def traced(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == at:
            happened.append(by())
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return bool(happened)


@pytest.mark.parametrize("rival", [True, False])
@pytest.mark.parametrize("first", ["choose", "release"])
def test_a_replay_that_is_chosen_while_another_thread_releases_it_is_not_kept(rival: bool, first: str) -> None:
    """Wherever the one is interrupted by the other."""
    for at in count():
        made = Mock(), Mock()
        variant = Variant((), (), 1, executable=made[0], rival=made[1])
        both = {"choose": partial(variant.choose, rival=rival), "release": variant.release}
        if not interrupted(getattr(Variant, first).__code__, both.pop(first), *both.values(), at):
            break
        assert (variant.executable, variant.rival) == (None, None), at
        assert all(each.close.called for each in made), at
    assert at > 20


@pytest.mark.parametrize(("capturing", "calls"), [("_settle", 1), ("_capture_rival", 2 + LOST)])
def test_nothing_is_held_by_a_region_that_is_closed_while_it_captures(capturing: str, calls: int) -> None:
    for at in count():
        world.ran.clear()
        region, driver = make(driver=Parallel(), order="measured")
        call(region, calls)
        if not interrupted(getattr(Region, capturing).__code__, partial(call, region), region.close, at):
            break
        assert [each.closed for each in driver.executables] == [True] * len(driver.executables), at
    assert at > 20


def test_an_order_that_goes_wrong_is_never_used() -> None:
    world.host["concurrent"] = 1.0
    region, driver = make(driver=Parallel(wrong=True), order="measured")
    contested(region)
    call(region, 200)
    assert set(world.ran) == {"replay"}
    assert (region.record.state, list(region.record.refusals)) == ("replay", ["comparison-failed"])
    assert [executable.closed for executable in driver.executables] == [False, True]


def test_an_order_is_chosen_where_replays_are_not_held_against_uncaptured_calls() -> None:
    world.host["concurrent"] = 0.5 * FAST
    region, _ = make(driver=Parallel(), order="measured", measure=False)
    call(region, 3)
    assert world.ran == ["uncaptured", "replay", "uncaptured", "concurrent", "uncaptured"]
    call(region, TURNS + 20)
    assert world.ran[5 + TURNS :] == ["concurrent"] * 20
    assert (len(region.record.decisions), [each.choice for each in region.record.orders]) == (0, ["concurrent"])


@pytest.mark.parametrize(("parallel", "order"), [(False, "measured"), (True, "program")])
def test_no_other_order_is_tried(parallel: bool, order: str) -> None:
    driver = Parallel()
    driver.parallel = parallel
    region, _ = make(driver=driver, order=order)
    call(region, 300)
    assert "concurrent" not in world.ran
    assert (region.record.orders, region.record.contests) == ([], 0)


def test_a_program_without_other_orders_is_not_captured_again() -> None:
    driver = FakeDriver(replayed, written=[1])
    driver.parallel = True  # type: ignore[misc]
    region, _ = make(driver=driver, order="measured")
    call(region, 300)
    assert (driver.captures, region.record.contests) == (2, 0)


def test_an_order_by_dependences_needs_no_calls() -> None:
    region, _ = make(driver=Parallel(), order="dependences", measure=False)
    call(region, 5)
    assert world.ran == ["uncaptured", "concurrent", "uncaptured", "concurrent", "concurrent", "concurrent"]


def test_what_was_decided_on_an_order_is_kept(tmp_path: Path) -> None:
    world.host["concurrent"] = 0.5 * FAST
    region, _ = make(driver=Parallel(), order="measured", cache_dir=str(tmp_path))
    contested(region)
    call(region, TURNS)
    assert len(files(tmp_path)) == 2
    again, driver = make(driver=Parallel(), order="measured", cache_dir=str(tmp_path))
    world.ran.clear()
    call(again, 20)
    assert world.ran[:5] == ["uncaptured", "replay", "uncaptured", "concurrent", "uncaptured"]
    assert world.ran[5:] == ["concurrent"] * 17
    assert [each.path is not None for each in (*again.record.decisions, *again.record.orders)] == [True, True]
    assert [executable.closed for executable in driver.executables] == [True, False]


def test_an_evicted_capture_keeps_its_order() -> None:
    world.host["concurrent"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured", max_captures=1)
    contested(region)
    call(region, TURNS)
    call(region, 3 + LOST, 3)
    assert all(executable.closed for executable in driver.executables[:2])
    world.ran.clear()
    call(region, 6)
    assert world.ran == [*["uncaptured"] * 2, "concurrent", "uncaptured", *["concurrent"] * 3]
    assert len(region.record.orders) == 1


@pytest.mark.parametrize("calls", [0, 1, BLOCK + 3])
def test_a_capture_that_is_evicted_before_an_order_is_decided_is_tried_again(calls: int) -> None:
    world.host["concurrent"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured", max_captures=1)
    call(region, 2 + LOST + calls)
    assert region.record.contests == 1
    call(region, 3, 3)
    assert all(executable.closed for executable in driver.executables[:-1])
    assert region.record.contests == 1, "that of the other size"
    call(region, 2 * TURNS)
    assert [each.choice for each in region.record.orders] == ["concurrent"]
    assert region.record.contests == 0
    world.ran.clear()
    call(region, 3)
    assert world.ran == ["concurrent"] * 3


def test_an_order_is_tried_though_a_later_capture_depends_on_an_offset() -> None:
    world.host["concurrent"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured")
    call(region, 2 + LOST)
    driver.sensitive = frozenset({0})
    for _ in range(2):
        region([torch.ones(5)[1:], torch.ones(4)])
    driver.sensitive = frozenset()
    for _ in range(1 + TURNS):
        region([torch.ones(3)[1:], torch.ones(2)])
    assert [each.choice for each in region.record.orders] == ["concurrent"]
    assert region.record.contests == 1, "that of the other size"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_second_capture_that_is_broken_off_leaves_the_first_one(error: type[BaseException]) -> None:
    class Broken(Parallel):
        def capture(self, fn: Any, args: Sequence[Any], eager: Collection[str] = (), **options: Any) -> Recording:
            if self.captures >= 2:
                raise error
            return super().capture(fn, args, eager, **options)

    region, _ = make(driver=Broken(), order="measured")
    call(region, 2 + LOST)
    assert region.record.contests == 1
    with contextlib.suppress(KeyboardInterrupt):
        call(region, 1)
    assert region.record.contests == 0
    world.ran.clear()
    call(region, 50)
    assert world.ran == ["replay"] * 50


def test_each_variant_is_measured_once() -> None:
    region, _ = make()
    call(region, 2 + LOST, 2)
    world.host |= {"replay": SLOW, "uncaptured": FAST}
    call(region, 2 + WON, 3, 7)
    assert [each.choice for each in region.record.decisions] == ["replay", "uncaptured"]
    assert region.record.state == "replay", "one of them is"
    world.ran.clear()
    for _ in range(200):
        call(region, 1, 2)
        call(region, 1, 3, 7)
    assert world.ran == ["replay", "uncaptured"] * 200
    assert len(region.record.decisions) == 2


@pytest.mark.parametrize("options", [{"measure": False}, {"verify_always": True}])
def test_nothing_is_measured_unless_asked_for_or_where_every_replay_is_compared(options: dict[str, Any]) -> None:
    world.host["uncaptured"] = 1.0
    region, _ = make(**options)
    call(region, WON)
    assert (region.record.decisions, region.record.replays) == ([], WON - 2)


# -- hot paths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepares", [False, True])
@pytest.mark.parametrize("fast", ["replay", "uncaptured"])
def test_a_call_through_the_shortcut_counts_once(fast: str, prepares: bool) -> None:
    """There a call first tries a replay, and then runs the whole program, which calls the region. Where values are
    prepared for a replay, it is asked before whether there will be one: what is asked is what then happens."""
    world.host = {"replay": SLOW, "uncaptured": SLOW, fast: FAST}
    region, _ = make()
    expected: list[bool] = []

    def shortcut(args: list[Any]) -> Sequence[Any]:
        expected.append(not prepares or region.expects_replay())
        outputs = region.try_replay(args) if expected[-1] else None
        return region(args) if outputs is None else outputs

    call(shortcut, 2)
    world.ran.clear()
    expected.clear()
    call(shortcut, WON + 10)
    assert not prepares or expected == [name == "replay" for name in world.ran]
    assert region.record.decisions[0].calls == (LOST if fast == "replay" else WON)
    assert world.ran[WON:] == [fast] * 10


# -- what disturbs -----------------------------------------------------------------------------------------------------


USUAL = (2, 1)
"""Size and scalar of the calls that are measured."""


def _other_size(region: Region, driver: FakeDriver) -> None:
    call(region, 1, 5, 2)


def _watched(region: Region, driver: FakeDriver) -> None:
    with FlopCounterMode(display=False):
        call(region, 1, *USUAL)


def _raises(region: Region, driver: FakeDriver) -> None:
    world.fails = {len(world.ran) + 1}
    with pytest.raises(ArithmeticError):
        call(region, 1, *USUAL)


def _declines(region: Region, driver: FakeDriver) -> None:
    driver.declines = lambda args: True
    call(region, 1, *USUAL)
    driver.declines = lambda args: False


def _captures_elsewhere(region: Region, driver: FakeDriver) -> None:
    other, _ = make(measure=False)
    call(other, 2)


def _on_another_thread(region: Region, driver: FakeDriver) -> None:
    thread = Thread(target=call, args=(region, 1, *USUAL))
    thread.start()
    thread.join()


def _captures_its_stream(region: Region, driver: FakeDriver) -> None:
    """The caller does, which is no time to wait for it."""
    drains, driver.drains = driver.drains, lambda: False
    call(region, BLOCK, *USUAL)
    driver.drains = drains


ANYWHERE = [_other_size, _watched, _raises, _captures_elsewhere, _on_another_thread, _captures_its_stream]


@pytest.mark.parametrize("fast", ["replay", "uncaptured"])
@pytest.mark.parametrize(
    ("disturb", "after"),
    [*((each, 3) for each in (*ANYWHERE, _declines)), *((each, BLOCK + 3) for each in ANYWHERE)],
)
def test_a_disturbed_block_is_run_again(disturb: Callable[[Region, FakeDriver], None], fast: str, after: int) -> None:
    """The third call of a replayed block, or of an uncaptured one."""
    world.host = {"replay": SLOW, "uncaptured": SLOW, fast: FAST}
    region, driver = make()
    call(region, 2 + after, *USUAL)
    for _ in range(3):
        disturb(region, driver)
        world.now += 10_000.0  # would change the decision if it counted
        call(region, 2, *USUAL)
    call(region, WON, *USUAL)
    decision = region.record.decisions[0]
    times = (decision.replay_us, decision.other_us)
    assert (decision.choice, times) == (fast, pytest.approx((world.host["replay"], world.host["uncaptured"])))


@pytest.mark.parametrize("disturb", [_declines, *ANYWHERE])
@pytest.mark.parametrize("after", [3, 4, 7])
def test_what_comes_in_between_two_turns_is_no_part_of_them(
    disturb: Callable[[Region, FakeDriver], None], after: int
) -> None:
    world.host["concurrent"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured")
    call(region, 3 + LOST + after, *USUAL)
    for _ in range(3):
        disturb(region, driver)
        world.now += 10_000.0
        call(region, 2, *USUAL)
    call(region, TURNS, *USUAL)
    decision = region.record.orders[0]
    times = (decision.replay_us, decision.other_us, decision.disturbed)
    assert (decision.choice, times) == ("concurrent", (pytest.approx(FAST), pytest.approx(0.5 * FAST), False))
    world.ran.clear()
    call(region, 3, *USUAL)
    assert world.ran == ["concurrent"] * 3


def test_calls_of_other_threads_are_replayed_while_another_order_is_captured() -> None:
    class Watched(Parallel):
        def capture(self, fn: Any, args: Sequence[Any], eager: Collection[str] = (), **options: Any) -> Recording:
            if self.captures >= 2:
                before = len(world.ran)
                thread = Thread(target=call, args=(region, 4))
                thread.start()
                thread.join()
                seen.append(world.ran[before:])
            return super().capture(fn, args, eager, **options)

    seen: list[list[str]] = []
    region, _ = make(driver=Watched(), order="measured")
    call(region, 3 + LOST)
    assert seen
    assert all(ran == ["replay"] * 4 for ran in seen)
    call(region, WON + 20)
    assert [each.choice for each in region.record.orders] == ["replay"]


@pytest.mark.parametrize("scalars", [((), ()), ((1,), (2,)), ((1.5,), (2.5,))], ids=["sizes", "keys", "floats"])
def test_sizes_that_alternate_end_on_replays(scalars: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    world.host |= {"replay": SLOW, "uncaptured": FAST}
    region, _ = make()
    for _ in range(400):
        call(region, 1, 2, *scalars[0])
        call(region, 1, 3, *scalars[1])
    assert [(each.choice, each.disturbed) for each in region.record.decisions] == [("replay", True)] * 2
    assert region.record.decisions[0].calls <= 30 * BLOCK
    world.ran.clear()
    call(region, 20, 2, *scalars[0])
    assert world.ran == ["replay"] * 20


def test_one_block_is_timed_at_a_time() -> None:
    """A block takes the time of the whole program, so that two at once would be timed together."""
    world.host |= {"replay": SLOW, "uncaptured": FAST}
    regions = [make()[0] for _ in range(3)]
    decisions = [region.record.decisions for region in regions]
    for region in regions:
        call(region, 2)
    while not any(decisions):
        for region in regions:
            call(region)
    (first,) = [each for found in decisions for each in found]
    assert (first.replay_us, first.other_us) == (pytest.approx(3 * SLOW), pytest.approx(2 * SLOW + FAST))
    for _ in range(2 * WON):
        for region in regions:
            call(region)
    assert [[each.choice for each in found] for found in decisions] == [["uncaptured"]] * 3


def test_a_variant_without_more_calls_does_not_keep_others_waiting() -> None:
    (gone, _), (region, _) = make(), make()
    call(gone, 2)
    call(region, 2)
    call(gone, 3)
    call(region, 200 + LOST)
    assert len(region.record.decisions) == 1
    call(gone, LOST + 5)
    assert len(gone.record.decisions) == 1


def test_a_region_that_is_closed_while_it_is_measured_runs_uncaptured() -> None:
    region, driver = make()
    call(region, 10)
    region.close()
    world.ran.clear()
    call(region, WON)
    assert world.ran == ["uncaptured"] * WON
    assert (region.record.decisions, driver.executables[0].closed) == ([], True)


def test_an_error_of_the_device_reaches_the_caller() -> None:
    region, driver = make()
    call(region, 2)

    def broken() -> bool:
        raise ReplayError("the device is gone")

    driver.drains = broken
    with pytest.raises(ReplayError, match="the device is gone"):
        call(region)
    assert region.record.state == "uncaptured"


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Callable[[int], None]]:
    """Makes this process one of so many."""

    def begin(size: int) -> None:
        torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())

    yield begin
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("size", "choices"), [(1, ["uncaptured"]), (2, [])])
def test_one_of_several_ranks_replays_unmeasured(
    group: Callable[[int], None], tmp_path: Path, size: int, choices: list[str], known: bool
) -> None:
    """Also what an earlier process ``known`` decided is not for several ranks."""
    world.host |= {"replay": SLOW, "uncaptured": FAST}
    if known:
        timed(make(cache_dir=str(tmp_path))[0])
    group(size)
    region, _ = make(cache_dir=str(tmp_path))
    timed(region)
    assert [each.choice for each in region.record.decisions] == choices
    assert (region.record.state == "replay") == (not choices)


def test_one_of_several_ranks_times_the_order_of_launches(group: Callable[[int], None]) -> None:
    """Each may decide by itself: launches of whatever order send the same collectives."""
    world.host["concurrent"] = 0.9 * FAST
    group(2)
    region, _ = make(driver=Parallel(), order="measured")
    call(region, 3 + TURNS)
    assert (region.record.decisions, [each.choice for each in region.record.orders]) == ([], ["concurrent"])


class Votes(Ballot):
    """Of ranks that decide so each time; all say no to what is not here. ``others``: what they say of the order."""

    outcomes: tuple[Outcome, ...] = ()
    others = Outcome.YES

    def place(self, call: int) -> str:
        return ""

    def capturing(self) -> Any:
        return contextlib.nullcontext()

    def join(self, region: Any) -> None:
        assert region.record.name == "toy"

    def decide(self, question: str, answer: str | None) -> Outcome:
        if question.startswith("order"):
            return self.others if answer else Outcome.NO
        return self.outcomes[self.held] if answer and self.held < len(self.outcomes) else Outcome.NO


def voting(monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome, **options: Any) -> tuple[Region, FakeDriver]:
    """A region whose collectives ranks may capture."""
    ballot = Votes("toy", "group")
    ballot.outcomes = outcomes
    monkeypatch.setattr(region_module, "collectives_of", lambda program: ("group", "sent"))
    monkeypatch.setattr(region_module, "open_ballot", lambda name, group: ballot)
    return make(driver=Parallel(), **{"order": "measured", "measure": False, "collectives": "captured", **options})


YES, NO = Outcome.YES, Outcome.NO


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("cost", [0.9, 1.1])
def test_calls_choose_the_order_of_captured_collectives(
    monkeypatch: pytest.MonkeyPatch, first: int, cost: float
) -> None:
    """Two votes, one for each order. What calls take before, of which each may be a vote, decides nothing. Ranks take
    turns alike: none ends early."""
    world.host["concurrent"] = cost * FAST
    region, driver = voting(monkeypatch, *[NO] * first, YES, YES)
    call(region, VOTES[first + 1] - 1)
    assert (region.record.captures, region.record.contests, region.record.orders) == (2, 1, [])
    assert "concurrent" not in world.ran
    world.ran.clear()
    call(region)
    assert world.ran == ["concurrent", "uncaptured"], "compared, and answered"
    world.ran.clear()
    call(region, len(_PLAN))
    assert world.ran == ["concurrent" if turn == "concurrent" else "replay" for turn in _PLAN]
    chosen = "concurrent" if cost < 1 else "replay"
    assert [each.choice for each in region.record.orders] == [chosen]
    assert (region.record.contests, region.record.captures) == (0, 2)
    assert sum(not each.closed for each in driver.executables) == 1
    world.ran.clear()
    call(region, 80)
    assert world.ran == [chosen] * 80


@pytest.mark.parametrize("outcomes", [(YES,), (YES, NO), (NO, NO, NO, NO, YES), (YES, Outcome.LATE)])
def test_captured_collectives_keep_their_order_if_ranks_do_not_agree_on_another(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Outcome, ...]
) -> None:
    """Nor if there is no vote left. Nobody tries that by eager calls, and none is sent by one rank alone."""
    world.host["concurrent"] = 0.5 * FAST
    region, driver = voting(monkeypatch, *outcomes)
    call(region, VOTES[outcomes.index(YES)])
    world.ran.clear()
    call(region, VOTES[-1] + 2 * TURNS)
    assert set(world.ran) == {"replay"}
    assert "concurrent" not in world.ran
    assert (region.record.contests, region.record.captures, region.record.orders) == (0, 2, [])
    assert sum(not each.closed for each in driver.executables) == 1
    assert len(driver.executables) == 2 + outcomes.index(YES) + (len(outcomes) < 5), "no order is tried twice"


@pytest.mark.parametrize("outcomes", [(), (Outcome.LATE,)])
def test_eager_calls_choose_an_order_once_ranks_have_not_agreed(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Outcome, ...]
) -> None:
    world.host["concurrent"] = 0.5 * FAST
    region, _ = voting(monkeypatch, *outcomes)
    call(region, 4 if outcomes else VOTES[-1])
    assert (region.record.contests, "concurrent" in world.ran) == (1, False)
    call(region, 2 + TURNS)
    assert [each.choice for each in region.record.orders] == ["concurrent"]


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_collectives_are_captured_in_the_order_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    region, driver = voting(monkeypatch, YES, YES, order=order)
    call(region, VOTES[-1] + 10)
    assert (region.record.captures, len(driver.executables), region.record.contests) == (2, 2, 0)
    assert world.ran[-10:] == ["replay" if order == "program" else "concurrent"] * 10


def test_what_was_decided_on_eager_calls_says_nothing_of_captured_collectives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor the other way round."""
    for captured in (False, True, True):
        world.host["concurrent"] = (0.5 if captured else 1.5) * FAST
        outcomes = (YES, YES) if captured else ()
        region, _ = voting(monkeypatch, *outcomes, cache_dir=str(tmp_path))
        call(region, VOTES[-1] + len(_PLAN))
        assert [each.choice for each in region.record.orders] == ["concurrent" if captured else "replay"]
    world.host["concurrent"] = 1.5 * FAST
    region, _ = make(driver=Parallel(), order="measured", measure=False, cache_dir=str(tmp_path))
    world.ran.clear()
    call(region, 3)
    assert ("concurrent" in world.ran, [each.choice for each in region.record.orders]) == (False, ["replay"])


@pytest.mark.parametrize("others", [NO, Outcome.LATE])
def test_all_ranks_replay_in_one_order(monkeypatch: pytest.MonkeyPatch, others: Outcome) -> None:
    """The program's, if one of them did not find the other one faster."""
    monkeypatch.setattr(Votes, "others", others)
    world.host["concurrent"] = 0.5 * FAST
    region, _ = voting(monkeypatch, YES, YES)
    call(region, VOTES[1] + len(_PLAN))
    assert region._ballot is None, "votes go on meanwhile"
    (decision,) = region.record.orders
    assert (decision.choice, decision.replay_us, decision.other_us) == (
        "replay",
        *map(pytest.approx, (FAST, 0.5 * FAST)),
    )
    world.ran.clear()
    call(region, 80)
    assert world.ran == ["replay"] * 80


def test_an_order_that_takes_too_much_memory_is_not_voted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that was asked for another order then has that of the program."""

    def without(fn: Any, driver: Any, args: Any, slots: Any, eager: Any, order: str, *more: Any, **facts: Any) -> Any:
        orders.append(order)
        return capture(fn, driver, args, slots, eager, "program", *more, **facts)

    orders: list[str] = []
    monkeypatch.setattr(region_module, "capture", without)
    region, driver = voting(monkeypatch, *[YES] * len(VOTES))
    call(region, VOTES[1])
    assert orders == ["program", "program", "dependences"]
    assert world.ran[-1] == "replay"
    assert [each.closed for each in driver.executables] == [True, False, True]
    call(region, VOTES[-1])
    assert (len(orders), region.record.contests) == (3, 0)


def test_a_device_that_is_behind_is_waited_for_before_ranks_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    world.device |= {"replay": 500.0, "concurrent": 400.0}
    region, _ = voting(monkeypatch, YES, YES)
    call(region, VOTES[1] + len(_PLAN))
    assert [each.choice for each in region.record.orders] == ["concurrent"]


def test_one_rank_alone_measures_no_replay_that_votes_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    region, _ = voting(monkeypatch, NO, NO, NO, YES, YES, measure=True)
    call(region, 17)
    world.ran.clear()
    call(region, 14)
    assert world.ran == ["replay"] * 14
    call(region, VOTES[-1] + len(_PLAN))
    assert (region.record.decisions, [each.choice for each in region.record.orders]) == ([], ["replay"])


def test_what_is_captured_again_is_voted_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    region, _ = voting(monkeypatch, YES, NO, YES, YES, max_captures=1)
    call(region, 4)
    call(region, 2, 3)  # another size takes its place
    call(region, 9)
    assert region.record.captures == 4
    world.ran.clear()
    call(region)
    assert (world.ran, region.record.captures) == (["replay", "uncaptured"], 5)
    call(region, 15)
    world.ran.clear()
    call(region)
    assert world.ran == ["concurrent", "uncaptured"]


def test_captured_collectives_that_are_wrong_in_another_order_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    region, driver = voting(monkeypatch, YES, YES)
    driver.wrong = True  # type: ignore[attr-defined]
    call(region, VOTES[-1] + 10)
    assert world.ran[-10:] == ["replay"] * 10
    assert list(region.record.refusals) == ["comparison-failed"]
    assert (region.record.state, region.record.contests) == ("replay", 0)


def test_a_group_that_begins_meanwhile_ends_on_replays(group: Callable[[int], None], tmp_path: Path) -> None:
    world.host |= {"replay": SLOW, "uncaptured": FAST}
    region, _ = make(cache_dir=str(tmp_path))
    call(region, 2 + 3 * BLOCK)
    group(2)
    call(region, WON)
    assert [(each.choice, each.disturbed) for each in region.record.decisions] == [("replay", True)]
    assert not list(tmp_path.rglob("*.json"))


# -- decisions on disk -------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


@pytest.mark.parametrize("fast", ["replay", "uncaptured"])
def test_what_was_decided_is_not_measured_again(tmp_path: Path, fast: str) -> None:
    """And what was decided uncaptured is not even captured."""
    world.host = {"replay": SLOW, "uncaptured": SLOW, fast: FAST}
    timed(make(cache_dir=str(tmp_path))[0])
    (path,) = files(tmp_path)
    region, driver = make(cache_dir=str(tmp_path))
    assert timed(region, 20) == [fast] * 20
    (decision,) = region.record.decisions
    calls = LOST if fast == "replay" else WON
    times = pytest.approx(world.host["replay"]), pytest.approx(world.host["uncaptured"])
    assert decision == Decision(fast, *times, calls, path=str(path))
    assert counts["recalled"] == 1
    assert (driver.captures, region.record.captures) == ((2, 1) if fast == "replay" else (0, 0))
    assert (region.record.state, region.record.reason) == (fast, None)


SOURCE = """# kernel 7 in /tmp/x
from tests.runtime import test_measure
def run(args):
    pass
    return test_measure.world.run("uncaptured", args)
def other(args):
    return run(args)
"""
OTHER_TEXT = {"comment": ("kernel 7 in /tmp/x", "kernel 8 in /tmp/y"), "source": ("pass", "'another kernel'")}


@pytest.mark.parametrize("what", ["nothing", "comment", "source", "machine", "size", "scalar", "name"])
def test_a_decision_is_used_for_the_same_program_calls_and_machine_alone(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(file: str, text: str, name: str, size: int, *rest: int) -> Decision:
        (tmp_path / file).write_text(text)
        fn = runpy.run_path(str(tmp_path / file))[name]
        region, _ = make(fn, cache_dir=str(tmp_path / "cache"))
        call(region, 2 + LOST, size, *rest)
        (decision,) = region.record.decisions
        return decision

    measured("one.py", SOURCE, "run", 2)
    if what == "machine":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    text = SOURCE.replace(*OTHER_TEXT.get(what, ("", "")))
    name, rest = "other" if what == "name" else "run", (1,) if what == "scalar" else ()
    decision = measured("two.py", text, name, 3 if what == "size" else 2, *rest)
    assert (decision.path is not None) == (what in ("nothing", "comment"))
    assert len(files(tmp_path)) == (1 if decision.path else 2)


def _edited(**fields: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        cache.store_json(path, {**(cache.load_json(path) or {}), **fields})

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("[]"),
        _edited(choice="copied"),
        _edited(replay_us="fast"),
        _edited(other_us=float("inf")),
        _edited(calls=None),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(
    tmp_path: Path, damage: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    timed(make(cache_dir=str(tmp_path))[0])
    (path,) = files(tmp_path)
    damage(path)
    with caplog.at_level(logging.WARNING, "pygraph"):
        region, _ = make(cache_dir=str(tmp_path))
        timed(region)
    assert [record.getMessage().count(str(path)) for record in caplog.records] == [1]
    assert region.record.decisions[0].path is None
    third, _ = make(cache_dir=str(tmp_path))
    timed(third)
    assert third.record.decisions[0].path == str(path)
