"""Orders of launches through Region, in virtual time: what is decided, what disturbs it, what is kept on disk."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import logging
import math
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from threading import Thread
from types import CodeType, FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from pygraph import cache
from pygraph.program.default import DefaultPasses
from pygraph.program.program import Program
from pygraph.program.recording import Recording
from pygraph.report.facts import order_text
from pygraph.runtime import contest
from pygraph.runtime import life as life_module
from pygraph.runtime.contest import _PLAN, PATIENCE, Contest, Decision, JointContest
from pygraph.runtime.contract import Executable, Timer
from pygraph.runtime.discover import capture
from pygraph.runtime.events import counts
from pygraph.runtime.ledger import CREDIT
from pygraph.runtime.life import Lives
from pygraph.runtime.live import Owner, held_bytes, owned_by
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.record import RegionRecord
from pygraph.runtime.region import Region, RegionOptions
from pygraph.runtime.variants import Variant, VariantTable
from pygraph.runtime.votes import VOTES, Ballot, Outcome
from tests.runtime.captures import writes
from tests.runtime.fake import BYTES, FakeDriver
from tests.runtime.test_interrupts import UNDOING

TURNS = 4 * 2 * 8
"""Calls of a contest that another order wins."""
FAST, SLOW = 50.0, 65.0


class World:
    """A clock, a device with a queue, and what a call costs in µs: of the host, and of the device."""

    def __init__(self) -> None:
        self.now = 0.0
        self.host = dict.fromkeys(("program", "dependences", "captured", "captured dependences"), FAST)
        self.host["uncaptured"] = SLOW
        self.device = dict.fromkeys(self.host, 0.0)
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

    def since(self, earlier: WorldTimer) -> float:
        return (self.begin - earlier.begin) * 1e-6


world = World()


@pytest.fixture(autouse=True)
def _own_world() -> None:
    global world
    world = World()
    counts.clear()
    contest._timed.clear()


def uncaptured(args: list[Any]) -> Sequence[Any]:
    return world.run("uncaptured", args)


def replayed(args: list[Any]) -> Sequence[Any]:
    return world.run("program", args)


def make(fn: Any = uncaptured, driver: FakeDriver | None = None, **options: Any) -> tuple[Region, FakeDriver]:
    chosen = driver or FakeDriver(replayed, written=[1])
    chosen.drains = lambda: world.drain()
    chosen_options = RegionOptions(**options)
    return Region(fn, chosen, name="toy", options=chosen_options, clock=lambda: world.now * 1e-6), chosen


def call(region: Callable[[list[Any]], Sequence[Any]], times: int = 1, size: int = 2, *rest: Any) -> None:
    """Calls whose results and whose mutation are checked."""
    for _ in range(times):
        x, total = torch.ones(size), torch.full((size,), 4.0)
        outputs = region([x, total, *rest])
        assert total.tolist() == [5.0] * size, "mutated once"
        assert outputs[1] is total
        assert outputs[0].tolist() == [15.0 + sum(rest)] * size


# -- the order of launches ---------------------------------------------------------------------------------------------


class Parallel(FakeDriver):
    """A region of two launches, of which neither depends on the other. ``wrong``: in another order it goes wrong.
    ``joint``: collectives were captured the last time."""

    parallel = True

    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__(replayed, written=[1])
        self.wrong = wrong
        self.captured_by_user = False
        self.timers: list[WorldTimer] = []
        self.made = 0
        self.joint = False

    def no_collectives(self) -> None:
        """They may be captured."""

    def timer(self, device: torch.device | None) -> Timer | None:  # type: ignore[override]
        self.made += 1
        return None if self.captured_by_user else self.timers.pop() if self.timers else WorldTimer()

    def capture(self, fn: Any, args: Sequence[Any], eager: Collection[str] = (), **options: Any) -> Recording:
        self.joint = options.get("collectives", False)
        self.edits.append(lambda capture: capture.launch(capture.pool(64), name="beside", uses=[writes(0, 64)]))
        return super().capture(fn, args, eager, **options)

    def instantiate(self, program: Program) -> Executable:
        made = super().instantiate(program)
        if program.order is not None or self.joint:
            name = "captured" if self.joint else ""
            order = "" if program.order is None else "dependences"
            self.executables[-1].driver = other_driver(self, f"{name} {order}".strip())
        return made


def other_driver(of: Parallel, name: str) -> FakeDriver:
    """Stands in for a replay in another order, or one with captured collectives."""

    def run(args: list[Any]) -> Sequence[Any]:
        made, total = world.run(name, args)
        return [made + 1 if of.wrong and name.endswith("dependences") else made, total]

    return FakeDriver(run, written=[1])


def contested(region: Region) -> None:
    """Calls until the replay is used, and one that captures it in another order."""
    call(region, 2)
    assert region.record.contests == 1
    before = len(world.ran)
    call(region, 1)
    assert world.ran[before:] == ["dependences", "uncaptured"], "compared, and answered"
    world.ran.clear()


@pytest.mark.parametrize("cost", [0.9 * FAST, 0.97 * FAST])
def test_another_order_of_launches_is_used_if_it_is_faster(cost: float) -> None:
    world.host["dependences"] = cost
    region, driver = make(driver=Parallel(), order="measured")
    contested(region)
    call(region, TURNS + 20)
    assert world.ran[TURNS:] == ["dependences"] * 20
    assert set(world.ran) == {"dependences", "program"}
    assert region.record.orders == [Decision("dependences", pytest.approx(FAST), pytest.approx(cost), TURNS)]
    assert [executable.closed for executable in driver.executables] == [True, False]
    assert (region.record.contests, region.record.captures) == (0, 1)
    assert (region.record.longest_path, region.record.launches) == (1, 2)
    assert region.record.timeline == (("toy", 0, 0), ("beside", 1, 0))


def test_no_other_order_is_tried_once_its_session_is_frozen() -> None:
    with owned_by(Owner()):
        region, driver = make(driver=Parallel(), order="measured")
    call(region, 2)
    assert region.record.contests == 1
    region.owner.frozen = True
    captures = driver.captures
    call(region, 4)
    assert (driver.captures, region.record.contests) == (captures, 0)
    assert region.expects_replay()


@pytest.mark.parametrize(
    ("behind", "waits", "chosen"), [(20, True, "program"), (2, True, "dependences"), (20, False, "dependences")]
)
def test_an_order_that_makes_a_callers_loop_slower_is_not_chosen(behind: float, waits: bool, chosen: str) -> None:
    """By what it leaves to be done behind the call, unless the device is what a loop waits for at last."""
    world.host |= {"program": 10.0, "dependences": 10.0}
    world.device |= {"program": 100.0, "dependences": 95.0}
    region, _ = make(driver=Parallel(), order="measured")
    for _ in range(3 + 200):
        call(region)
        if waits:
            world.drain()
        world.now += behind if world.ran[-1] == "dependences" else 0.0
    world.drain()
    call(region, 2)
    (decision,) = region.record.orders
    assert (decision.order, decision.slower_loop) == (chosen, chosen == "program")
    assert decision.dependences_us < decision.program_us
    assert world.ran[-1] == chosen
    assert ("slower in the caller's loop" in order_text([decision])) == decision.slower_loop


@pytest.mark.parametrize(
    ("other", "waits", "chosen"), [(300.0, False, "dependences"), (20.0, False, "program"), (300.0, True, "program")]
)
def test_a_loop_of_several_regions_is_judged_by_the_work_of_all(other: float, waits: bool, chosen: str) -> None:
    """One region's share of the device is less than the loop takes, which does not say that the device waits.
    ``other``: the others' share."""
    world.host |= {"program": 60.0, "dependences": 65.0}
    world.device |= {"program": 50.0, "dependences": 40.0}
    region, _ = make(driver=Parallel(), order="measured")
    for calls in range(3 + 200):
        call(region)
        world.now += 100.0
        world._idle_at = world.idle_at + other
        if waits or calls % 20 == 0:
            world.drain()
    (decision,) = region.record.orders
    assert (decision.order, decision.slower_loop) == (chosen, chosen == "program")
    assert decision.dependences_us < decision.program_us


class Recorded(Parallel):
    """Keeps the last timer that it made, and counts the times that the host waits."""

    last: WorldTimer | None = None
    waits = 0

    def timer(self, device: torch.device | None) -> Timer | None:
        self.last = None if self.captured_by_user else WorldTimer()
        return self.last

    def synchronise(self, device: torch.device | None) -> bool:
        self.waits += 1
        return super().synchronise(device)


@pytest.mark.parametrize(("slower", "chosen"), [(40.0, "program"), (5.0, "dependences")])
def test_an_order_whose_replays_slow_the_work_ahead_of_them_is_not_chosen(slower: float, chosen: str) -> None:
    """A replay waits in the stream behind 300 µs of other work, to which it adds ``slower`` µs before it starts."""
    world.host |= {"program": 10.0, "dependences": 10.0}
    world.device |= {"program": 50.0, "dependences": 40.0}
    driver = Recorded()
    region, _ = make(driver=driver, order="measured")
    for _ in range(3 + 100):
        call(region)
        if world.ran[-1] == "dependences" and driver.last is not None:
            driver.last.begin += slower
            driver.last.end += slower
            world._idle_at += slower
        world._idle_at = world.idle_at + 300.0
    (decision,) = region.record.orders
    assert (decision.order, decision.slower_loop) == (chosen, chosen == "program")
    assert (decision.program_us, decision.dependences_us) == (pytest.approx(50.0), pytest.approx(40.0))


def test_orders_take_turns_by_blocks_between_which_the_host_waits() -> None:
    """Else replays of one order would wait in the stream while those of the other are timed."""
    world.host |= {"program": 10.0, "dependences": 10.0}
    world.device |= {"program": 100.0, "dependences": 90.0}
    driver = Recorded()
    region, _ = make(driver=driver, order="measured")
    contested(region)
    driver.waits = 0
    call(region, TURNS)
    blocks = [{*world.ran[begin : begin + 8]} for begin in range(0, TURNS, 8)]
    assert [len(block) for block in blocks] == [1] * 8
    assert blocks.count({"dependences"}) == 4
    assert driver.waits == len(blocks) - 1


@pytest.mark.parametrize("count", [2, 8])
def test_regions_are_timed_one_after_the_other(count: int) -> None:
    """However many wait, and however long."""
    world.host["dependences"] = 0.5 * FAST
    regions = [make(driver=Parallel(), order="measured")[0] for _ in range(count)]
    for _ in range(3 + count * (TURNS + 4)):
        undecided = [region for region in regions if not region.record.orders]
        world.ran.clear()
        for region in undecided:
            call(region)
        timed = [one for one, following in pairwise([*world.ran, ""]) if following != "uncaptured"]  # else compared
        decided = sum(bool(region.record.orders) for region in undecided)
        assert timed.count("dependences") <= 1 + decided
    assert [region.record.orders[0].order for region in regions] == ["dependences"] * count


def test_a_region_that_is_not_called_any_more_is_waited_for_in_vain_for_a_while_only() -> None:
    """Nor is it by each of those that wait; and it waits itself when it comes back."""
    world.host["dependences"] = 0.5 * FAST
    stalled, *others = (make(driver=Parallel(), order="measured")[0] for _ in range(3))
    call(stalled, 3 + 5)
    call(others[0], 3 + PATIENCE + TURNS)
    call(others[1], 3 + TURNS)
    assert [len(each.record.orders) for each in (stalled, *others)] == [0, 1, 1]
    call(stalled, TURNS)
    assert len(stalled.record.orders) == 1


def test_waiting_regions_hold_no_other_order_and_do_not_lose_patience_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "PATIENCE", 5)
    world.host["dependences"] = 0.5 * FAST
    regions = [make(driver=Parallel(), order="measured")[0] for _ in range(8)]
    for _ in range(3 + 2 * TURNS):
        for region in regions:
            call(region)
        begun = [each for region in regions for each in region._lives.table.captured if each.contest is not None]
        assert len(begun) <= 1
    assert sum(bool(region.record.orders) for region in regions) == 2


@pytest.mark.parametrize("lead", [0, 1])
def test_a_region_that_a_loop_calls_twice_is_judged_by_like_distances(lead: int) -> None:
    """From the first call of an iteration to the second, and from there to the next iteration."""
    world.host |= {"program": 10.0, "dependences": 10.0}
    world.device |= {"program": 100.0, "dependences": 80.0}
    region, _ = make(driver=Parallel(), order="measured")
    call(region, lead)
    for _ in range(120):
        call(region, 2)
        world._idle_at = world.idle_at + 1000.0
    assert [(each.order, each.slower_loop) for each in region.record.orders] == [("dependences", False)]


def test_a_border_is_waited_at_once_the_user_has_captured() -> None:
    world.device |= {"program": 100.0, "dependences": 90.0}
    driver = Recorded()
    region, _ = make(driver=driver, order="measured")
    contested(region)
    call(region, 8)
    drains, driver.drains, driver.captured_by_user, driver.waits = driver.drains, lambda: False, True, 0
    call(region)
    assert driver.waits == 1
    driver.drains, driver.captured_by_user = drains, False
    call(region, 3)
    assert driver.waits == 2


def test_a_contest_of_ranks_is_timed_before_all_others() -> None:
    """Its calls alone say whose turn it is."""
    driver, args = Parallel(), [torch.ones(2)]
    one, joint = Contest(driver, args, None), JointContest(driver, args, lambda: 0, Mock())
    assert one.enter() is not None
    assert joint.enter() is not None
    assert one.enter() is None
    del joint
    assert one.enter() is not None


@pytest.mark.parametrize("drift", [1.0015, 1.002, 1.004, 0.998])
def test_a_device_that_changes_its_speed_does_not_decide(drift: float) -> None:
    region, _ = make(driver=Parallel(), order="measured")
    for _ in range(3 + 100):
        call(region)
        world.host = {name: cost * drift for name, cost in world.host.items()}
    assert [each.order for each in region.record.orders] == ["program"]


def test_sizes_of_one_key_whose_calls_alternate_are_judged_by_the_loop_as_well() -> None:
    world.host |= {"program": 10.0, "dependences": 10.0}
    world.device |= {"program": 100.0, "dependences": 95.0}
    region, _ = make(driver=Parallel(), order="measured")
    for _ in range(3 + 3 * TURNS):
        for size in (2, 3):
            call(region, 1, size)
            world.drain()
            world.now += 20.0 if world.ran[-1] == "dependences" else 0.0
    assert [(each.order, each.slower_loop) for each in region.record.orders] == [("program", True)] * 2


def test_the_host_waits_once_at_a_border_whoever_is_called_there() -> None:
    driver = Recorded()
    region, _ = make(driver=driver, order="measured")
    call(region, 3 + 8, 3)
    driver.waits = 0
    call(region, 100, 2)
    assert driver.waits < 10


@pytest.mark.parametrize(
    ("every", "cost"), [*((every, 1.03) for every in range(1, 9)), *((every, 0.9) for every in (1, *range(3, 9)))]
)
def test_a_caller_who_waits_now_and_then_does_not_decide(every: int, cost: float) -> None:
    """A call that finds the device idle takes as long as the host does, too. Whichever call that is. A caller who waits
    every second time may miss a gain."""
    for phase in range(every):
        world.device |= {"program": 100.0, "dependences": 100.0 * cost}
        world.host |= {"program": 20.0, "dependences": 20.0}
        region, _ = make(driver=Parallel(), order="measured")
        call(region, 3)
        for turn in range(200):
            if turn % every == phase:
                world.drain()
            call(region)
        (decision,) = region.record.orders
        assert decision.order == ("dependences" if cost < 1 else "program"), (phase, decision)


def test_orders_are_timed_on_the_device_though_it_is_behind() -> None:
    """A loop that the device bounds: what a call took is known some calls later."""
    world.device |= {"program": 500.0, "dependences": 400.0}
    world.host |= {"program": 90.0, "dependences": 120.0}
    region, _ = make(driver=Parallel(), order="measured")
    call(region, 3 + TURNS)
    assert region.record.contests == 1, "not all is known yet"
    call(region, 500)
    assert region.record.orders == [Decision("dependences", pytest.approx(500.0), pytest.approx(400.0), TURNS)]


@pytest.mark.parametrize("scalars", [((), ()), ((1,), (2,)), ((1.5,), (2.5,))], ids=["sizes", "keys", "floats"])
def test_orders_of_sizes_that_alternate_are_decided(scalars: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    """Each for itself, and those of two regions, one after the other."""
    world.host["dependences"] = 0.5 * FAST
    regions = [make(driver=Parallel(), order="measured")[0] for _ in range(2)]
    for _ in range(3 + 4 * TURNS):
        for region in regions:
            call(region, 1, 2, *scalars[0])
            call(region, 1, 3, *scalars[1])
    for region in regions:
        assert [each.order for each in region.record.orders] == ["dependences"] * 2
        assert region.record.contests == 0


@pytest.mark.parametrize(("cost", "tried"), [(0.5, 6), (1.0, 3)])
def test_another_order_is_tried_for_one_size_at_a_time_and_no_more_where_it_does_not_pay(
    cost: float, tried: int
) -> None:
    world.host["dependences"] = cost * FAST
    region, driver = make(driver=Parallel(), order="measured")
    for _ in range(7 * TURNS):
        for size in range(2, 8):
            call(region, 1, size)
            assert sum(each.contest is not None for each in region._lives.table.captured) <= 1
    assert [each.order for each in region.record.orders] == ["dependences" if tried == 6 else "program"] * tried
    assert (region.record.contests, sum(not each.closed for each in driver.executables)) == (0, 6)
    assert len(driver.executables) == 6 + tried
    world.ran.clear()
    call(region, 3, 2)
    assert world.ran == ["dependences" if tried == 6 else "program"] * 3


class Dear(Parallel):
    """Captures take ``cost`` µs."""

    cost = 10_000.0

    def instantiate(self, program: Program) -> Executable:
        world.now += self.cost
        return super().instantiate(program)


def test_a_capture_in_another_order_is_paid_for_as_any_other() -> None:
    region, driver = make(driver=Dear(), order="measured", ledger=True)
    contested(region)
    ledger = region.record.ledger
    assert ledger is not None
    assert (ledger.attempts, len(driver.executables)) == (2, 2)
    assert ledger.spent_us == pytest.approx(2 * Dear.cost, rel=0.02)


@pytest.mark.parametrize("times", [1, 3], ids=["in-turn", "in-a-row"])
def test_sizes_that_come_three_times_cost_three_captures_in_whatever_order(times: int) -> None:
    region, driver = make(driver=Dear(), order="measured", ledger=True)
    for _ in range(3 // times):
        for size in range(2, 32):
            call(region, times, size)
    assert len(driver.executables) == CREDIT


@pytest.mark.parametrize("scalars", [(), (1.5,)], ids=["plain", "floats"])
def test_another_order_is_tried_once_replays_have_paid_for_it(scalars: tuple[float, ...]) -> None:
    """Until then, replays take no look at the ledger or at a clock: they are counted."""
    world.host["dependences"] = 0.5 * FAST
    region, driver = make(driver=Dear(), order="measured", ledger=True)
    call(region, 3, 3, *scalars)
    call(region, 2, 2, *scalars)
    assert len(driver.executables) == CREDIT
    needed = math.ceil((Dear.cost + FAST) / (SLOW - FAST))  # a capture is compared
    for _ in range(needed - 1):
        call(region, 1, 2, *scalars)
        assert region.expects_replay() == (not scalars)
    assert len(driver.executables) == CREDIT
    assert region.record.contests == 2
    call(region, PATIENCE + 3, 2, *scalars)  # that of the other size makes no progress
    assert len(driver.executables) == CREDIT + 1
    call(region, TURNS, 2, *scalars)
    assert [each.order for each in region.record.orders] == ["dependences"]


def test_another_order_waits_for_no_payment_where_replays_save_nothing() -> None:
    world.host["uncaptured"] = FAST
    region, driver = make(driver=Dear(), order="measured", ledger=True)
    call(region, 3, 3)
    call(region, 500, 2)
    assert (len(driver.executables), region.expects_replay()) == (CREDIT, True)


@pytest.mark.parametrize(("order", "looks"), [("measured", 1), ("dependences", 0)])
def test_the_longest_path_of_programs_alike_is_looked_for_once_where_it_decides(
    order: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Mock(side_effect=life_module.longest_path)
    monkeypatch.setattr(life_module, "longest_path", looked)
    region, _ = make(driver=Parallel(), order=order)
    for size in range(2, 6):
        call(region, 2, size)
    assert (looked.call_count, region.record.captures) == (looks, 4)


def test_the_longest_path_is_not_looked_for_where_no_order_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    region, _ = make(driver=Parallel(), order="measured")
    for size in range(2, 5):
        call(region, 3 + TURNS, size)
    assert [each.order for each in region.record.orders] == ["program"] * 3
    region._lives._paths.clear()
    monkeypatch.setattr(life_module, "longest_path", Mock(side_effect=AssertionError))
    call(region, 10, 5)
    assert (region.record.captures, region.record.contests) == (4, 0)


@pytest.mark.parametrize("scalars", [(), (7,)])
def test_sizes_that_do_not_come_again_leave_others_their_turn(scalars: tuple[int, ...]) -> None:
    """Also those of another key, which nobody looks at any more."""
    world.host["dependences"] = 0.5 * FAST
    region, _ = make(driver=Parallel(), order="measured")
    for size in (3, 4, 5):
        call(region, 10, size)
    for size in (2, 6):
        call(region, 300 + TURNS, size, *scalars)
    assert [each.order for each in region.record.orders] == ["dependences"] * 2
    assert region.expects_replay()


def test_a_second_replay_that_declines_leaves_the_first() -> None:
    region, _ = make(driver=Parallel(), order="measured")
    call(region, 3)
    (variant,) = region._lives.table.under(())
    variant.held[1].close()
    world.ran.clear()
    call(region, 100)
    assert world.ran == ["program"] * 100


def decided(region: Region) -> list[tuple[str, bool]]:
    """The decided orders, each with True if an earlier process decided it."""
    return [(each.order, each.path is not None) for each in region.record.orders]


def test_orders_that_are_known_wait_for_nothing(tmp_path: Path) -> None:
    """Neither for those of other sizes that are being measured, nor are they left out where others did not gain."""
    options: dict[str, Any] = {"order": "measured", "cache_dir": str(tmp_path)}
    world.host["dependences"] = 0.5 * FAST
    call(make(driver=Parallel(), **options)[0], 3 + TURNS, 2)
    world.host["dependences"] = 2 * FAST
    for size in (3, 4, 5):
        call(make(driver=Parallel(), **options)[0], 3 + TURNS, size)
    region, _ = make(driver=Parallel(), **options)
    for size in (3, 4, 5, 2):
        call(region, 4, size)
    assert decided(region) == [*[("program", True)] * 3, ("dependences", True)]
    region, _ = make(driver=Parallel(), **options)
    for size in (6, 7, 8, 2):
        call(region, 4, size)
    assert decided(region) == [("dependences", True)]
    more = make(driver=Parallel(), launch_passes=DefaultPasses(0.5), **options)[0]
    call(more, 3, 2)
    assert decided(more) == [], "with more memory it was not tried"


def test_turns_that_are_lost_are_made_up_for() -> None:
    """Those that another thread takes part in, and those that an error of the device ends."""
    world.host["dependences"] = 0.5 * FAST
    for at in count():
        region, _ = make(driver=Parallel(), order="measured")
        call(region, 3 + TURNS - 3)
        if not interrupted(Contest.leave.__code__, partial(call, region), partial(call, region, 2), at):
            break
        call(region, 10)
        assert [each.order for each in region.record.orders] == ["dependences"], at
    assert at > 20


def test_an_error_of_the_device_in_a_turn_reaches_the_caller_once() -> None:
    world.host["dependences"] = 0.5 * FAST
    driver = Parallel()
    region, _ = make(driver=driver, order="measured")
    call(region, 3)
    broken = WorldTimer()
    broken.seconds = Mock(side_effect=[KeyboardInterrupt, 50e-6])  # type: ignore[method-assign]
    driver.timers = [broken]
    with pytest.raises(KeyboardInterrupt):
        call(region)
    call(region, TURNS + 1)
    assert [each.order for each in region.record.orders] == ["dependences"]


def test_a_size_that_does_not_come_again_is_timed_in_vain_for_a_while_only() -> None:
    """And goes on when it does come again."""
    world.host["dependences"] = 0.5 * FAST
    driver = Parallel()
    region, _ = make(driver=driver, order="measured")
    call(region, 10, 3)
    call(region, 300 + TURNS, 2)
    driver.made = 0
    for _ in range(1000):
        call(region, 1, 2)
        call(region, 1, 2, 1)
    assert driver.made <= 2 * 200, "of 1,000 calls of each of two others"
    call(region, TURNS, 3)
    assert [each.order for each in region.record.orders] == ["dependences"] * 3


def test_turns_in_a_stream_that_the_user_captures_are_not_timed() -> None:
    world.host["dependences"] = 0.5 * FAST
    driver = Parallel()
    region, _ = make(driver=driver, order="measured")
    contested(region)
    driver.captured_by_user = True
    call(region, 100)
    assert world.ran == ["program"] * 100
    driver.captured_by_user = False
    call(region, TURNS)
    assert [each.order for each in region.record.orders] == ["dependences"]


@pytest.mark.parametrize("cost", [0.99 * FAST, FAST, 2 * FAST])
def test_a_tie_keeps_the_order_of_the_program(cost: float) -> None:
    world.host["dependences"] = cost
    region, driver = make(driver=Parallel(), order="measured")
    contested(region)
    call(region, TURNS + 20)
    assert world.ran[TURNS:] == ["program"] * 20
    assert [each.order for each in region.record.orders] == ["program"]
    assert [executable.closed for executable in driver.executables] == [False, True]


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
@pytest.mark.parametrize("first", [VariantTable.replace, VariantTable.free, Variant.free])
def test_a_replay_that_is_chosen_while_another_thread_releases_it_is_not_kept(rival: bool, first: Any) -> None:
    """Wherever the one is interrupted by the other."""
    for at in count():
        made = Mock(), Mock()
        table = VariantTable(1)
        variant = table.find((), ())
        table.install(variant, made[0].replay, made[0])
        assert table.replace(variant, made[1].replay, *made)
        chosen = made[rival]
        both = [partial(table.replace, variant, chosen.replay, chosen), partial(table.free, variant)]
        if first is not VariantTable.replace:
            both.reverse()
        if not interrupted(first.__code__, *both, at):
            break
        assert (variant.replay, variant.held) == (None, ()), at
        assert all(each.close.called for each in made), at
    assert at > 10


@pytest.mark.parametrize(("capturing", "calls"), [("_capture_first", 1), ("_adopt", 1), ("_live", 2)])
def test_nothing_is_held_by_a_region_that_is_closed_while_it_captures(capturing: str, calls: int) -> None:
    for at in count():
        world.ran.clear()
        region, driver = make(driver=Parallel(), order="measured")
        call(region, calls)
        if not interrupted(getattr(Lives, capturing).__code__, partial(call, region), region.close, at):
            break
        assert [each.closed for each in driver.executables] == [True] * len(driver.executables), at
    assert at > 20


def test_an_order_that_goes_wrong_is_never_used() -> None:
    world.host["dependences"] = 1.0
    region, driver = make(driver=Parallel(wrong=True), order="measured")
    contested(region)
    call(region, 200)
    assert set(world.ran) == {"program"}
    assert (region.record.state, list(region.record.refusals)) == ("replay", ["comparison-failed"])
    assert [executable.closed for executable in driver.executables] == [False, True]


def test_an_order_is_chosen_where_replays_are_not_held_against_uncaptured_calls() -> None:
    world.host["dependences"] = 0.5 * FAST
    region, _ = make(driver=Parallel(), order="measured")
    call(region, 3)
    assert world.ran == ["uncaptured", "program", "uncaptured", "dependences", "uncaptured"]
    call(region, TURNS + 20)
    assert world.ran[5 + TURNS :] == ["dependences"] * 20
    assert [each.order for each in region.record.orders] == ["dependences"]


@pytest.mark.parametrize(("parallel", "order"), [(False, "measured"), (True, "program")])
def test_no_other_order_is_tried(parallel: bool, order: str) -> None:
    driver = Parallel()
    driver.parallel = parallel
    region, _ = make(driver=driver, order=order)
    call(region, 300)
    assert "dependences" not in world.ran
    assert (region.record.orders, region.record.contests) == ([], 0)


def test_a_program_without_other_orders_is_not_captured_again() -> None:
    driver = FakeDriver(replayed, written=[1])
    driver.parallel = True  # type: ignore[misc]
    region, _ = make(driver=driver, order="measured")
    call(region, 300)
    assert (driver.captures, region.record.contests) == (2, 0)


def test_an_order_by_dependences_needs_no_calls() -> None:
    region, _ = make(driver=Parallel(), order="dependences")
    call(region, 5)
    assert world.ran == ["uncaptured", "dependences", "uncaptured", "dependences", "dependences", "dependences"]


def test_what_was_decided_on_an_order_is_kept(tmp_path: Path) -> None:
    world.host["dependences"] = 0.5 * FAST
    region, _ = make(driver=Parallel(), order="measured", cache_dir=str(tmp_path))
    contested(region)
    call(region, TURNS)
    assert len(files(tmp_path)) == 1
    again, driver = make(driver=Parallel(), order="measured", cache_dir=str(tmp_path))
    world.ran.clear()
    call(again, 20)
    assert world.ran == ["uncaptured", "dependences", "uncaptured", *["dependences"] * 18], "captured so at once"
    assert [each.path is not None for each in again.record.orders] == [True]
    assert sum(not executable.closed for executable in driver.executables) == 1


@pytest.mark.parametrize("room", [1, 2])
def test_another_order_is_tried_where_there_is_room_for_both(room: int) -> None:
    """Another capture goes for it, and never the one in the order of the program."""
    world.host["dependences"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured", memory_limit=room * BYTES)
    call(region, 2, 4)
    call(region, 3)
    assert held_bytes(region.device) == room * BYTES
    assert [executable.closed for executable in driver.executables] == [True, False, room == 1]
    call(region, TURNS)
    chosen = [each.order for each in region.record.orders]
    assert chosen == (["dependences"] if room == 2 else [])
    assert (region.record.contests, held_bytes(region.device)) == (0, BYTES)
    assert ("memory-limit" in region.record.refusals) == (room == 1)


def evict(region: Region) -> None:
    """Have its capture make room."""
    (capture,) = region.captures()
    capture.evict("memory-limit")


def test_an_evicted_capture_keeps_its_order() -> None:
    world.host["dependences"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured")
    contested(region)
    call(region, TURNS)
    evict(region)
    assert all(executable.closed for executable in driver.executables)
    world.ran.clear()
    call(region, 6)
    assert world.ran == [*["uncaptured"] * 2, "dependences", "uncaptured", *["dependences"] * 3]
    assert len(region.record.orders) == 1


@pytest.mark.parametrize("calls", [0, 1, 12])
def test_a_capture_that_is_evicted_before_an_order_is_decided_is_tried_again(calls: int) -> None:
    world.host["dependences"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured")
    call(region, 2 + calls)
    assert region.record.contests == 1
    evict(region)
    assert all(executable.closed for executable in driver.executables)
    assert region.record.contests == 0
    call(region, 2 * TURNS)
    assert [each.order for each in region.record.orders] == ["dependences"]
    assert region.record.contests == 0
    world.ran.clear()
    call(region, 3)
    assert world.ran == ["dependences"] * 3


def test_an_order_is_tried_though_a_later_capture_depends_on_an_offset() -> None:
    world.host["dependences"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured")
    call(region, 2)
    driver.sensitive = frozenset({0})
    for _ in range(2):
        region([torch.ones(5)[1:], torch.ones(4)])
    driver.sensitive = frozenset()
    for _ in range(1 + TURNS):
        region([torch.ones(3)[1:], torch.ones(2)])
    assert [each.order for each in region.record.orders] == ["dependences"]
    assert region.record.contests == 1, "that of the other size"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_second_capture_that_is_broken_off_leaves_the_first_one(error: type[BaseException]) -> None:
    class Broken(Parallel):
        def capture(self, fn: Any, args: Sequence[Any], eager: Collection[str] = (), **options: Any) -> Recording:
            if self.captures >= 2:
                raise error
            return super().capture(fn, args, eager, **options)

    region, _ = make(driver=Broken(), order="measured")
    call(region, 2)
    assert region.record.contests == 1
    with contextlib.suppress(KeyboardInterrupt):
        call(region, 1)
    assert region.record.contests == 0
    world.ran.clear()
    call(region, 50)
    assert world.ran == ["program"] * 50


EACH_LINE = pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.sweep)])

INTERRUPTED = tuple(map(inspect.getfile, (Contest, Lives, RegionRecord, Variant)))


class Interrupt:
    """A trace function that interrupts line ``at`` of those of these files that run, each counted once, but for lines
    within which Python handles no signals. ``where`` is the line."""

    def __init__(self, at: int) -> None:
        self.at, self.where, self.lines = at, "", set[tuple[str, int]]()

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        line = frame.f_code.co_filename, frame.f_lineno
        if line[0] not in INTERRUPTED or frame.f_code.co_name in UNDOING:
            return None
        if event == "line" and line not in self.lines and "self._leaving" not in linecache.getline(*line):
            self.lines.add(line)
            if len(self.lines) > self.at and not self.where:
                self.where = f"{Path(line[0]).name}:{line[1]}"
                raise KeyboardInterrupt
        return self


def interrupts(calls: Callable[[], Region], each: int) -> Iterator[tuple[Region, str]]:
    """A region after the next call of one that ``calls`` makes, interrupted at one line of ``each`` in turn, and the
    line."""
    for at in count(step=each):
        region, interrupt = calls(), Interrupt(at)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                call(region)
        finally:
            sys.settrace(before)
        if not interrupt.where:
            assert at > 50
            return
        yield region, interrupt.where


def assert_over(region: Region, where: str) -> None:
    """No contest goes on, and one executable is replayed."""
    assert region.record.contests == 0, where
    for variant in region._lives.table.captured:
        assert (variant.contest, len(variant.held)) == (None, 1), where
    before = len(world.ran)
    call(region, 3)
    (variant,) = region._lives.table.captured
    assert world.ran[before:] == [variant.order or "program"] * 3, where


@EACH_LINE
def test_a_decision_that_is_interrupted_is_found_by_the_next_call(tmp_path: Path, each: int) -> None:
    def calls() -> Region:
        world.host["dependences"] = 0.5 * FAST
        region, _ = make(driver=Parallel(), order="measured", cache_dir=str(tmp_path))
        contested(region)
        call(region, TURNS - 1)
        assert region.record.contests == 1
        return region

    for region, where in interrupts(calls, each):
        call(region, 2)
        assert_over(region, where)
        assert [each.order for each in region.record.orders] == ["dependences"], where
        for file in files(tmp_path):
            file.unlink()


@EACH_LINE
@pytest.mark.parametrize("before", [1, 2])
def test_a_life_that_is_interrupted_leaves_a_capture_that_counts_and_no_contest_that_never_ends(
    before: int, each: int
) -> None:
    """That captures, or begins the contest."""

    def calls() -> Region:
        world.host["dependences"] = 0.5 * FAST
        region, _ = make(driver=Parallel(), order="measured")
        call(region, before)
        return region

    for region, where in interrupts(calls, each):
        call(region, 4 + TURNS)
        assert region.record.captures == 1, where
        assert region.record.state == "replay", where
        assert_over(region, where)


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
    other, _ = make()
    call(other, 2)


def _on_another_thread(region: Region, driver: FakeDriver) -> None:
    thread = Thread(target=call, args=(region, 1, *USUAL))
    thread.start()
    thread.join()


def _captures_its_stream(region: Region, driver: FakeDriver) -> None:
    """The caller does, which is no time to wait for it."""
    drains, driver.drains = driver.drains, lambda: False
    call(region, 9, *USUAL)
    driver.drains = drains


ANYWHERE = [_other_size, _watched, _raises, _captures_elsewhere, _on_another_thread, _captures_its_stream]


@pytest.mark.parametrize("disturb", [_declines, *ANYWHERE])
@pytest.mark.parametrize("after", [3, 4, 7])
def test_what_comes_in_between_two_turns_is_no_part_of_them(
    disturb: Callable[[Region, FakeDriver], None], after: int
) -> None:
    world.host["dependences"] = 0.5 * FAST
    region, driver = make(driver=Parallel(), order="measured")
    call(region, 3 + after, *USUAL)
    for _ in range(3):
        disturb(region, driver)
        world.now += 10_000.0
        call(region, 2, *USUAL)
    call(region, TURNS, *USUAL)
    decision = region.record.orders[0]
    times = (decision.program_us, decision.dependences_us)
    assert (decision.order, times) == ("dependences", (pytest.approx(FAST), pytest.approx(0.5 * FAST)))
    world.ran.clear()
    call(region, 3, *USUAL)
    assert world.ran == ["dependences"] * 3


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
    call(region, 3)
    assert seen
    assert all(ran == ["program"] * 4 for ran in seen)
    call(region, TURNS + 20)
    assert [each.order for each in region.record.orders] == ["program"]


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Callable[[int], None]]:
    """Makes this process one of so many."""

    def begin(size: int) -> None:
        torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())

    yield begin
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_one_of_several_ranks_times_the_order_of_launches(group: Callable[[int], None]) -> None:
    """Each may decide by itself: launches of whatever order send the same collectives."""
    world.host["dependences"] = 0.9 * FAST
    group(2)
    region, _ = make(driver=Parallel(), order="measured")
    call(region, 3 + TURNS)
    assert [each.order for each in region.record.orders] == ["dependences"]


class Votes(Ballot):
    """Of ranks that decide so each time; all say no to what is not here. ``others``: what they say of times."""

    outcomes: tuple[Outcome, ...] = ()
    others: tuple[Outcome, ...] = ()

    def place(self, call: int) -> str:
        return ""

    def capturing(self) -> Any:
        return contextlib.nullcontext()

    def join(self, region: Any) -> None:
        assert region.record.name == "toy"

    def decide(self, question: str, answer: str | None) -> Outcome:
        if question.startswith("times"):
            first, *self.others = self.others or (Outcome.YES,)
            return first if answer else Outcome.NO
        return self.outcomes[self.held] if answer and self.held < len(self.outcomes) else Outcome.NO


def voting(
    monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome, others: Sequence[Outcome] = (), **options: Any
) -> tuple[Region, FakeDriver]:
    """A region whose collectives ranks may capture."""
    ballot = Votes("toy", "group")
    ballot.outcomes, ballot.others = outcomes, tuple(others)
    monkeypatch.setattr(life_module, "collectives_of", lambda program: ("group", "sent"))
    monkeypatch.setattr(life_module, "open_ballot", lambda name, group: ballot)
    return make(driver=Parallel(), **{"order": "measured", "collectives": "measured", **options})


YES, NO, LATE = Outcome
TIMED = JointContest.TURNS


def took(called: str, captured: str) -> list[str]:
    """Programs that the calls of a contest run."""
    return [captured if turn == "dependences" else called for turn in _PLAN]


def note(region: Region) -> str:
    """The last note of the report on collectives."""
    return region.record.notes[-1].partition(":")[0]


CAPTURED = "collectives are captured"
SLOWER = "collectives are called by each replay, as not all ranks have measured captured ones as fast"


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("cost", [0.5, 1.0, 1.005, 1.1])
def test_captured_collectives_are_used_where_they_are_no_slower(
    monkeypatch: pytest.MonkeyPatch, first: int, cost: float
) -> None:
    """By times of the same calls on all ranks, behind the vote in which they agree. None ends early."""
    world.host["captured"] = cost * FAST
    region, driver = voting(monkeypatch, *[NO] * first, YES, order="program")
    call(region, VOTES[first] - 1)
    world.ran.clear()
    call(region)
    assert world.ran == ["captured", "uncaptured"], "compared, and answered"
    assert (region.record.captures, region.record.contests) == (1, 1)
    world.ran.clear()
    call(region, TIMED)
    assert world.ran == took("program", "captured")
    chosen = "captured" if cost < 1.02 else "program"
    assert note(region) == (CAPTURED if chosen == "captured" else SLOWER)
    assert (region.record.contests, region.record.captures) == (0, 2 if chosen == "captured" else 1)
    assert region.record.orders == []
    assert sum(not each.closed for each in driver.executables) == 1
    world.ran.clear()
    call(region, 80)
    assert world.ran == [chosen] * 80


@pytest.mark.parametrize("answer", [NO, LATE])
def test_a_rank_that_measured_them_slower_decides_for_all(monkeypatch: pytest.MonkeyPatch, answer: Outcome) -> None:
    """So does one that does not answer. Calls then choose the order of eager steps."""
    world.host |= {"captured": 0.5 * FAST, "dependences": 0.5 * FAST}
    region, driver = voting(monkeypatch, YES, others=[answer])
    call(region, VOTES[0] + TIMED)
    assert (note(region), region.record.captures, region.record.contests) == (SLOWER, 1, 1)
    world.ran.clear()
    call(region, len(VOTES))
    assert set(world.ran) <= {"program", "dependences", "uncaptured"}
    assert region._lives.ballot is None, "no vote goes on for nothing"
    call(region, 2 + TURNS)
    assert [each.order for each in region.record.orders] == ["dependences"]
    assert sum(not each.closed for each in driver.executables) == 1


@pytest.mark.parametrize("missed", [1, 7])
def test_a_rank_that_missed_calls_is_in_step_again(monkeypatch: pytest.MonkeyPatch, missed: int) -> None:
    """Whose turn it is depends on the number of the call: other ranks replay in the same way."""
    region, _ = voting(monkeypatch, YES, order="program")
    call(region, VOTES[0])
    world.ran.clear()
    call(region, missed, 3)  # other sizes
    call(region, TIMED - missed)
    assert world.ran[-(TIMED - missed) :] == took("program", "captured")[missed:]
    assert note(region) == CAPTURED


def test_calls_that_nobody_could_time_decide_for_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a rank has missed, it takes its turns as the others do."""
    region, driver = voting(monkeypatch, YES, order="program")
    call(region, VOTES[0])
    driver.captured_by_user = True  # type: ignore[attr-defined]
    world.ran.clear()
    call(region, TIMED)
    assert (world.ran, note(region)) == (took("program", "captured"), SLOWER)


def test_the_last_call_of_a_contest_may_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one asks."""
    region, _ = voting(monkeypatch, YES, order="program")
    call(region, VOTES[0] + TIMED - 1)
    call(region, 1, 3)
    assert region.record.contests == 1
    call(region)
    assert (note(region), region.record.contests, world.ran[-1]) == (CAPTURED, 0, "program")


@pytest.mark.parametrize("outcome", [(), (LATE,)])
def test_votes_that_end_early_leave_eager_steps(monkeypatch: pytest.MonkeyPatch, outcome: tuple[Outcome, ...]) -> None:
    region, _ = voting(monkeypatch, *outcome, order="program")
    call(region, VOTES[-1] + 10)
    assert note(region) == "collectives are called by each replay"
    assert (region.record.captures, world.ran[-1]) == (1, "program")


def test_a_driver_that_forbids_it_is_told_of_and_nobody_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parallel, "no_collectives", lambda self: Refusal("collective", "as asked"))
    world.host["dependences"] = 0.5 * FAST
    region, _ = voting(monkeypatch, YES)
    call(region, 3 + TURNS)
    assert region.record.notes == ["collectives are called by each replay: as asked"]
    assert [each.order for each in region.record.orders] == ["dependences"], "at once"


@pytest.mark.parametrize("options", [{"collectives": "eager"}, {"verify_every": 2}])
def test_who_switches_it_off_has_no_votes(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    region, driver = voting(monkeypatch, YES, order="program", **options)
    call(region, VOTES[0] + TIMED)
    assert (region.record.notes, region.record.captures, len(driver.executables)) == ([], 1, 1)


BOTH = VOTES[0] + TIMED
"""Calls until collectives are captured. The next one is a vote on their order."""


@pytest.mark.parametrize("cost", [0.9, 1.1])
def test_calls_choose_the_order_of_captured_collectives(monkeypatch: pytest.MonkeyPatch, cost: float) -> None:
    """Two votes, one for each order. What calls take before, of which each may be a vote, decides nothing. Ranks take
    turns alike: none ends early."""
    world.host["captured dependences"] = cost * FAST
    region, driver = voting(monkeypatch, YES, YES)
    call(region, BOTH)
    assert (region.record.captures, region.record.contests, region.record.orders) == (2, 1, [])
    assert not {"dependences", "captured dependences"} & set(world.ran)
    world.ran.clear()
    call(region)
    assert world.ran == ["captured dependences", "uncaptured"], "compared, and answered"
    world.ran.clear()
    call(region, TIMED)
    assert world.ran == took("captured", "captured dependences")
    chosen = "dependences" if cost < 1 else "program"
    assert [each.order for each in region.record.orders] == [chosen]
    assert (region.record.contests, region.record.captures) == (0, 2)
    assert sum(not each.closed for each in driver.executables) == 1
    world.ran.clear()
    call(region, 80)
    assert set(world.ran) == {"captured dependences" if cost < 1 else "captured"}


@pytest.mark.parametrize("outcomes", [(YES,), (YES, NO), (NO, NO, NO, NO, YES), (YES, LATE)])
def test_captured_collectives_keep_their_order_if_ranks_do_not_agree_on_another(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Outcome, ...]
) -> None:
    """Nor if there is no vote left. Nobody tries that by eager calls, and none is sent by one rank alone."""
    world.host |= {"dependences": 0.5 * FAST, "captured dependences": 0.5 * FAST}
    region, driver = voting(monkeypatch, *outcomes)
    call(region, VOTES[outcomes.index(YES)] + TIMED)
    assert note(region) == CAPTURED
    world.ran.clear()
    call(region, VOTES[-1] + 2 * TURNS)
    assert set(world.ran) == {"captured"}
    assert (region.record.contests, region.record.captures, region.record.orders) == (0, 2, [])
    assert sum(not each.closed for each in driver.executables) == 1
    assert len(driver.executables) == 2 + outcomes.index(YES) + (len(outcomes) < 5), "no order is tried twice"


@pytest.mark.parametrize("outcomes", [(), (LATE,)])
def test_eager_calls_choose_an_order_once_ranks_have_not_agreed(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Outcome, ...]
) -> None:
    world.host["dependences"] = 0.5 * FAST
    region, _ = voting(monkeypatch, *outcomes)
    call(region, 4 if outcomes else VOTES[-1])
    assert (region.record.contests, "dependences" in world.ran) == (1, False)
    call(region, 2 + TURNS)
    assert [each.order for each in region.record.orders] == ["dependences"]


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_collectives_are_captured_in_the_order_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    region, driver = voting(monkeypatch, YES, YES, order=order)
    call(region, BOTH + 10)
    assert (region.record.captures, len(driver.executables), region.record.contests) == (2, 2, 0)
    assert world.ran[-10:] == ["captured" if order == "program" else "captured dependences"] * 10


def test_what_was_decided_on_eager_calls_says_nothing_of_captured_collectives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor the other way round: a region that calls collectives uses no decision where ranks may vote."""
    for captured in (False, True, True):
        world.host |= {"dependences": 1.5 * FAST, "captured dependences": 0.5 * FAST}
        region, _ = voting(monkeypatch, *((YES, YES) if captured else ()), cache_dir=str(tmp_path))
        region._lives._eager["_c10d_functional.all_reduce"] = None
        call(region, BOTH + 1 + TIMED)
        assert [each.order for each in region.record.orders] == ["dependences" if captured else "program"]
    region, _ = make(driver=Parallel(), order="measured", cache_dir=str(tmp_path))
    world.ran.clear()
    call(region, 3)
    assert ("dependences" in world.ran, [each.order for each in region.record.orders]) == (False, ["program"])


@pytest.mark.parametrize("others", [NO, LATE])
def test_all_ranks_replay_in_one_order(monkeypatch: pytest.MonkeyPatch, others: Outcome) -> None:
    """The program's, if one of them did not find the other one faster."""
    world.host["captured dependences"] = 0.5 * FAST
    region, _ = voting(monkeypatch, YES, YES, others=(YES, others))
    call(region, BOTH + 1 + TIMED)
    assert region._lives.ballot is None, "votes go on meanwhile"
    (decision,) = region.record.orders
    assert (decision.order, decision.program_us, decision.dependences_us) == (
        "program",
        *map(pytest.approx, (FAST, 0.5 * FAST)),
    )
    world.ran.clear()
    call(region, 80)
    assert world.ran == ["captured"] * 80


def test_an_order_that_takes_too_much_memory_is_not_voted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that was asked for another order then has that of the program."""

    def without(fn: Any, driver: Any, args: Any, slots: Any, eager: Any, order: str, *more: Any, **facts: Any) -> Any:
        orders.append(order)
        return capture(fn, driver, args, slots, eager, "program", *more, **facts)

    orders: list[str] = []
    monkeypatch.setattr(life_module, "capture", without)
    region, driver = voting(monkeypatch, *[YES] * len(VOTES))
    call(region, BOTH + 1)
    assert orders == ["program", "program", "dependences"]
    assert world.ran[-1] == "captured"
    assert [each.closed for each in driver.executables] == [True, False, True]
    call(region, VOTES[-1])
    assert (len(orders), region.record.contests) == (3, 0)


def test_a_device_that_is_behind_is_waited_for_before_ranks_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    world.device |= {"program": 500.0, "captured": 500.0, "captured dependences": 400.0}
    region, _ = voting(monkeypatch, YES, YES)
    call(region, BOTH + 1 + TIMED)
    assert (note(region), [each.order for each in region.record.orders]) == (CAPTURED, ["dependences"])


def test_what_is_captured_again_is_voted_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    region, _ = voting(monkeypatch, NO, NO, YES, YES)
    call(region, 4)
    evict(region)
    call(region, 11)
    assert region.record.captures == 2
    world.ran.clear()
    call(region)
    assert world.ran == ["captured", "uncaptured"]
    call(region, TIMED)
    assert (note(region), region.record.captures) == (CAPTURED, 3)
    world.ran.clear()
    call(region)
    assert world.ran == ["captured dependences", "uncaptured"]


def test_what_ranks_agree_on_is_used_and_others_make_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    other, _ = make(memory_limit=2 * BYTES)
    call(other, 2)
    region, _ = voting(monkeypatch, YES, memory_limit=2 * BYTES)
    call(region, 2)
    assert held_bytes(region.device) == 2 * BYTES
    call(region, 2)
    assert other.record.events["evicted.memory-limit"] == 1
    assert held_bytes(region.device) == 2 * BYTES
    region, _ = voting(monkeypatch, YES, memory_limit=BYTES)
    call(region, 4 + TIMED)
    assert note(region) == CAPTURED


def test_captured_collectives_that_are_wrong_in_another_order_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    region, driver = voting(monkeypatch, YES, YES)
    driver.wrong = True  # type: ignore[attr-defined]
    call(region, BOTH + 10)
    assert world.ran[-5:] == ["captured"] * 5
    assert list(region.record.refusals) == ["comparison-failed"]
    assert (region.record.state, region.record.contests) == ("replay", 0)


# -- decisions on disk -------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("decisions/*.json"))


def decide(cache_dir: Path, fn: Any = uncaptured, size: int = 2, *rest: int) -> list[Decision]:
    """The order that a region of its own decides on."""
    region, _ = make(fn, driver=Parallel(), order="measured", cache_dir=str(cache_dir))
    call(region, 3 + TURNS, size, *rest)
    return region.record.orders


SOURCE = """# kernel 7 in /tmp/x
from tests.runtime import test_contest
def run(args):
    pass
    return test_contest.world.run("uncaptured", args)
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
        (decision,) = decide(tmp_path / "cache", fn, size, *rest)
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
        _edited(order="copied"),
        _edited(program_us="fast"),
        _edited(dependences_us=float("inf")),
        _edited(calls=None),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(
    tmp_path: Path, damage: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    decide(tmp_path)
    (path,) = files(tmp_path)
    damage(path)
    with caplog.at_level(logging.WARNING, "pygraph"):
        (again,) = decide(tmp_path)
    assert [record.getMessage().count(str(path)) for record in caplog.records] == [1]
    assert again.path is None
    assert [each.path for each in decide(tmp_path)] == [str(path)]
