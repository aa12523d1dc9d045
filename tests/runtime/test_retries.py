"""Captures that were refused are tried again after a wait that is bounded, or never; by themselves, or when asked.
Where memory is short, the least recently used of all regions go. All in virtual time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import CaptureError
from pygraph.runtime import live
from pygraph.runtime.reasons import CLOSED, REASONS, Lasting
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.fake import FakeDriver, FakeExecutable, Function, double

CALLS, SECONDS = 64, 30
"""The longest wait."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions that other tests have left are not alive here."""
    monkeypatch.setattr(live, "_regions", weakref.WeakValueDictionary())


class World:
    """Regions and the time that passes for them. ``refusal``: what captures meet, if anything."""

    def __init__(self, reason: str | None = None) -> None:
        self.now = 0.0
        self.driver = FakeDriver()
        self.refuse(reason)

    def refuse(self, reason: str | None) -> None:
        self.driver.refuses = None if reason is None else CaptureError(reason, "as asked")

    def region(self, fn: Function = double, name: str = "toy", **options: Any) -> Region:
        return Region(fn, self.driver, name=name, clock=lambda: self.now, options=RegionOptions(**options))

    def attempts(self, region: Region, calls: int, size: int = 3) -> list[int]:
        """The calls at which a capture was tried."""
        found = []
        for number in range(calls):
            before = self.driver.captures
            call(region, size)
            if self.driver.captures > before:
                found.append(number)
        return found


def call(region: Region, size: int = 3) -> None:
    assert region([torch.ones(size)])[0].tolist() == [2.0] * size


def of(*lasting: Lasting) -> list[str]:
    return sorted(code for code, reason in REASONS.items() if reason.lasting in lasting and code != CLOSED)


def waits(attempts: Sequence[int]) -> list[int]:
    return [later - sooner for sooner, later in pairwise(attempts)]


@pytest.mark.parametrize("reason", of(Lasting.PASSES))
def test_what_may_pass_is_tried_again_after_sixty_four_calls_at_most_however_often(reason: str) -> None:
    world = World(reason)
    region = world.region()
    assert waits(world.attempts(region, 600)) == [3, 5, 9, 17, 33, *[CALLS + 1] * 8]
    world.refuse(None)
    assert len(world.attempts(region, CALLS + 1)) == 1
    assert region.record.captures == 1
    replays = region.record.replays
    call(region)
    assert region.record.replays == replays + 1


@pytest.mark.parametrize("reason", of(Lasting.PASSES, Lasting.DOUBTFUL))
def test_what_may_pass_is_tried_again_after_thirty_seconds_at_most(reason: str) -> None:
    world = World(reason)
    region = world.region()
    world.attempts(region, 40)
    world.now += SECONDS - 1
    assert world.attempts(region, 1) == []
    world.now += 1
    assert world.attempts(region, 2) == [0]
    world.refuse(None)
    world.now += SECONDS
    assert world.attempts(region, 1) == [0]
    assert region.record.captures == 1


@pytest.mark.parametrize("error", [RuntimeError("for a moment"), OSError("for a moment"), ValueError()])
def test_one_error_in_a_capture_is_not_the_last_word(error: Exception) -> None:
    world = World()
    region = world.region()

    def fail(_: object) -> None:
        raise error

    world.driver.edits = [fail]
    for _ in range(6):
        call(region)
    assert list(region.record.refusals) == ["capture-raised"]
    assert (region.record.state, region.record.captures) == ("replay", 1)


@pytest.mark.parametrize("reason", of(Lasting.DOUBTFUL))
def test_what_never_passes_is_given_up(reason: str) -> None:
    world = World(reason)
    region = world.region()
    assert len(world.attempts(region, 2000)) == 8
    world.now += 10 * SECONDS
    assert world.attempts(region, 10) == []
    world.refuse(None)
    assert pygraph.retry() == 1
    assert len(world.attempts(region, 3)) == 1
    assert (region.record.state, region.record.reason) == ("replay", None)


@pytest.mark.parametrize("reason", [*of(Lasting.SIZES), "no-such-reason"])
def test_what_lasts_is_tried_again_only_where_all_are_asked_for(reason: str) -> None:
    world = World(reason)
    region = world.region()
    assert world.attempts(region, 300) == [1]
    world.now += 10 * SECONDS
    assert pygraph.retry() == 0
    assert world.attempts(region, 10) == []
    world.refuse(None)
    assert pygraph.retry(every=True) == 1
    for _ in range(3):
        call(region)
    assert (region.record.captures, region.record.replays) == (1, 1)


@pytest.mark.parametrize("every", [False, True])
def test_sizes_that_were_refused_are_due_at_once_when_retried(every: bool) -> None:
    world = World()
    region = world.region()
    for _ in range(3):
        call(region, 2)
    for size, reason in ((3, "comparison-budget"), (4, "survivor")):
        world.refuse(reason)
        world.attempts(region, 30, size)
    world.refuse(None)
    assert pygraph.retry(every=every) == 1
    assert world.attempts(region, 1, 3) == [0]
    assert world.attempts(region, 1, 4) == ([0] if every else [])
    assert region.record.captures == 2 + every


def test_a_wrong_replay_is_the_last_until_all_are_asked_for() -> None:
    world = World()
    world.driver.kernel = lambda args: [args[0] * 3]
    region = world.region()
    assert len(world.attempts(region, 200)) == 1
    assert "comparison-failed" in str(region.record.reason)
    world.driver.kernel = None
    assert pygraph.retry() == 0
    assert pygraph.retry(every=True) == 1
    for _ in range(4):
        call(region)
    assert region.record.replays >= 1


def test_a_closed_region_stays_so() -> None:
    world = World()
    region = world.region()
    for _ in range(3):
        call(region)
    region.close()
    assert pygraph.retry(every=True) == 0
    assert world.attempts(region, 10) == []


def test_a_retry_is_an_event() -> None:
    world, seen = World("comparison-budget"), list[pygraph.Event]()
    region = world.region(name="graph3.region1")
    call(region)
    call(region)
    end = pygraph.on_event(seen.append)
    pygraph.retry()
    end()
    assert [(each.kind, each.region, each.reason) for each in seen] == [
        ("retried", "graph3.region1", "comparison-budget")
    ]


# -- memory ------------------------------------------------------------------------------------------------------------


def captured(world: World, names: str) -> dict[str, tuple[Region, FakeExecutable]]:
    """Regions with a capture each, used in this order."""
    found = {}
    for name in names:
        region = world.region(name=name)
        for _ in range(3):
            call(region)
        found[name] = region, world.driver.executables[-1]
    return found


def held(regions: dict[str, tuple[Region, FakeExecutable]]) -> str:
    return "".join(name for name, (_, executable) in regions.items() if not executable.closed)


@pytest.mark.parametrize("short", [CaptureError("no-address-space"), torch.OutOfMemoryError("CUDA out of memory")])
@pytest.mark.parametrize("where", ["instantiation", "comparison"])
def test_captures_that_were_not_used_for_longest_make_room_for_another(where: str, short: Exception) -> None:
    world, seen = World(), list[pygraph.Event]()
    regions = captured(world, "abcdef")
    for name in "ace":
        call(regions[name][0])  # used in the order b, d, f, a, c, e
    late = world.region(name="late")

    def short_of_memory(args: list[Any]) -> Any:
        raise short

    def fail() -> None:
        world.driver.refuses = short if where == "instantiation" else None
        world.driver.kernel = short_of_memory if where == "comparison" else None

    def pass_() -> None:
        world.driver.refuses = world.driver.kernel = None

    end = pygraph.on_event(seen.append)
    call(late)
    fail()
    call(late)
    pass_()
    assert held(regions) == "ace"
    evicted = [(each.region, each.reason, each.sizes) for each in seen if each.kind == "evicted"]
    assert evicted == [(name, "out-of-memory", ((3,),)) for name in "bdf"]
    call(late)
    assert (late.record.captures, late.record.replays) == (1, 0), "tried again at once"
    end()
    for _ in range(4):
        for region, _ in regions.values():
            call(region)
    assert all(region.record.state == "replay" for region, _ in regions.values()), "what went comes back"


def test_captures_in_use_make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that replays all of its regions in turn gains nothing if one takes the place of another."""
    world = World()
    regions = captured(world, "abc")
    late = world.region(name="late")
    world.refuse("out-of-memory")
    for _ in range(200):
        call(late)
        for region, _ in regions.values():
            call(region)
    assert held(regions) == "abc"
    assert not late.record.captures


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_call_that_is_short_of_memory_has_captures_make_room_and_raises(calls: int) -> None:
    """A run, one that was to be compared with a replay, and a replay."""
    world = World()
    short = [False]

    def large(args: list[Any]) -> Sequence[Any]:
        if short[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return double(args)

    def kernel(args: list[Any]) -> Sequence[Any]:
        return large(args) if calls == 2 else double(args)

    region = world.region(large)
    for _ in range(calls):
        call(region)
    regions = captured(world, "abcd")
    call(regions["a"][0])
    short[0], world.driver.kernel = True, kernel
    with pytest.raises(torch.OutOfMemoryError):
        region([torch.ones(3)])
    assert held(regions) == ("a" if calls == 2 else "ad")  # of four captures, or five: it is in use itself


def test_captures_on_another_device_make_no_room() -> None:
    world = World()
    regions = captured(world, "ab")
    assert live.shed(torch.device("cuda", 0)) == 0
    assert held(regions) == "ab"


# -- release -----------------------------------------------------------------------------------------------------------


def test_release_frees_all_captures_and_programs_go_on() -> None:
    world, seen = World(), list[pygraph.Event]()
    regions = captured(world, "ab")
    first = regions["a"][0]
    for _ in range(3):
        call(first, 5)
    end = pygraph.on_event(seen.append)
    assert pygraph.release() == 3
    assert all(executable.closed for executable in world.driver.executables)
    assert [(each.kind, each.region) for each in seen] == [("released", "a"), ("released", "b")]
    assert first.record.state == "warm"
    assert pygraph.release() == 0
    end()
    before = first.record.uncaptured
    for size in (3, 5):
        for _ in range(3):
            call(first, size)
    assert (first.record.captures, first.record.uncaptured - before) == (4, 4)
    assert first.record.state == "replay"


def test_release_while_a_capture_is_compared_leaves_it_usable() -> None:
    world = World()

    def releasing(args: list[Any]) -> Sequence[Any]:
        pygraph.release()
        return double(args)

    world.driver.kernel = releasing
    region = world.region()
    call(region)
    call(region)
    world.driver.kernel = None
    call(region)
    assert (region.record.captures, region.record.replays) == (1, 1)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("act", [pygraph.release, lambda: pygraph.retry(every=True)])
def test_a_compiled_program_goes_on(act: Callable[[], int]) -> None:
    compiled = torch.compile(lambda x: (x @ x).relu(), backend="pygraph")
    x = torch.ones(4, 4)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        act()
        for _ in range(3):
            assert torch.equal(compiled(x), torch.full((4, 4), 4.0))
    counted = pygraph.counters()
    assert (counted["captures"], counted["replays"]) == ((2, 3) if act is pygraph.release else (1, 4))
