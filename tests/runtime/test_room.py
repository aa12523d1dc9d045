"""Captures take no more memory than they may, all regions of a device together: the least recently used go."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pygraph
from pygraph.runtime import variants
from pygraph.runtime.host import HostDriver
from pygraph.runtime.live import held_bytes
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.fake import BYTES, EvenDriver, FakeDriver, double
from tests.runtime.host.replays import make_program
from tests.runtime.programs import region_calls

CPU = torch.device("cpu")


def region_of(driver: HostDriver, limit: int | None = None, fn: Any = double, **options: Any) -> Region:
    return Region(fn, driver, name="toy", options=RegionOptions(memory_limit=limit, **options))


def call(region: Region, *sizes: int) -> None:
    for size in sizes:
        assert region([torch.ones(size)])[0].tolist() == [2.0] * size


def held(region: Region) -> list[int]:
    """The sizes that are captured."""
    assert region.record.held_bytes == BYTES * len(region.captures())
    return sorted(size for capture in region.captures() for ((size,), *_) in capture.variant.signature)  # type: ignore[attr-defined]


# -- what goes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.sweep)])
def test_sizes_that_return_in_turn_are_all_replayed(count: int) -> None:
    """By default, of a compiled program."""
    compiled = torch.compile(lambda x: torch.cumsum(x, 0) * 2, backend="pygraph", dynamic=True)
    with torch.no_grad():
        for turn in range(4):
            before = pygraph.counters().get("replays", 0)
            for size in range(1, count + 1):
                x = torch.arange(1.0 + size)
                assert torch.equal(compiled(x), torch.cumsum(x, 0) * 2)
            replays = pygraph.counters().get("replays", 0) - before
            assert replays == count or turn < 2
    (report,) = pygraph.reports()
    record = report.regions[0].record
    assert record is not None
    assert record.captures == count
    assert not record.events["evicted"]
    assert record.held_bytes == held_bytes(CPU) > count * 1000


def test_sizes_of_one_region_are_as_many_as_are_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MAX_TRACKED", 64)
    region = region_of(FakeDriver())
    call(region, *[*range(1, 65)] * 3)
    before = region.record.replays
    call(region, *range(1, 65))
    assert region.record.replays - before == 64


def test_the_least_recently_used_of_all_regions_goes() -> None:
    driver, seen = FakeDriver(), list[pygraph.Event]()
    one, other = (region_of(driver, 4 * BYTES) for _ in range(2))
    for region, size in ((one, 1), (one, 2), (other, 1), (other, 2)):
        call(region, size, size)
    call(one, 1)
    assert (held(one), held(other)) == ([1, 2], [1, 2])
    end = pygraph.on_event(seen.append)
    call(other, 3, 3)
    assert (held(one), held(other)) == ([1], [1, 2, 3])
    call(one, 3, 3)
    assert (held(one), held(other)) == ([1, 3], [2, 3])
    end()
    evicted = [(each.reason, each.sizes) for each in seen if each.kind == "evicted"]
    assert evicted == [("memory-limit", ((2,),)), ("memory-limit", ((1,),))]
    assert held_bytes(CPU) == 4 * BYTES
    assert sum(not executable.closed for executable in driver.executables) == 4


def test_as_many_go_as_the_new_one_needs() -> None:
    driver = FakeDriver()
    region = region_of(driver, 4 * BYTES)
    for size in (1, 2, 3, 4):
        call(region, size, size)
    driver.nbytes = 3 * BYTES
    call(region, 5, 5)
    assert [capture.variant.held_bytes for capture in region.captures()] == [BYTES, 3 * BYTES]
    assert [executable.closed for executable in driver.executables] == [True, True, True, False, False]


def test_what_takes_more_than_all_may_is_refused_and_nothing_goes_for_it() -> None:
    driver = FakeDriver()
    region, other = region_of(driver, 2 * BYTES), region_of(driver, 2 * BYTES)
    call(other, 1, 1)
    driver.nbytes = 2 * BYTES + 1
    before = driver.captures
    call(region, *[1] * 200)
    assert driver.captures <= before + 2, "it is refused for good"
    assert (region.record.state, held(other)) == ("uncaptured", [1])
    assert str(region.record.reason) == "memory-limit: the capture takes 2,001 bytes, and all of them may take 2,000"
    assert all(executable.closed for executable in driver.executables[1:])
    driver.nbytes = BYTES
    assert region.retry(every=True)
    call(region, 1, 1)
    assert region.record.held_bytes == BYTES


def test_a_limit_holds_for_what_is_captured_under_it() -> None:
    driver = FakeDriver()
    free, limited = region_of(driver), region_of(driver, BYTES)
    call(free, 1, 1, 2, 2)
    assert len(held(free)) == 2
    call(limited, 1, 1)
    assert (held(free), held(limited)) == ([], [1])
    call(free, 1, 1, 1)
    assert (held(free), held(limited)) == ([1], [1])


def test_what_is_given_no_tensor_counts_on_the_device_that_is_the_current_one() -> None:
    class Second(FakeDriver):
        def current_device(self) -> torch.device:
            return torch.device("cuda", 1)

        def memory_limit(self, device: torch.device) -> int:
            asked.append(device)
            return 2 * BYTES

    asked: list[torch.device] = []
    region = region_of(Second(), fn=lambda args: [torch.ones(args.pop())])
    for size in (1, 2, 3):
        for _ in range(3):
            assert region([size])[0].tolist() == [1.0] * size
    assert asked == [torch.device("cuda", 1)] * 3
    assert (held_bytes(torch.device("cuda", 1)), held_bytes(CPU)) == (2 * BYTES, 0)


def test_a_capture_that_ranks_have_agreed_on_counts_and_stays() -> None:
    driver = FakeDriver()
    agreed, region = region_of(driver), region_of(driver, 2 * BYTES)
    call(agreed, 1, 1)
    agreed.captures()[0].variant.shared = True
    call(region, 1, 1, 2, 2)
    assert held(region) == [2]
    assert agreed.record.held_bytes == BYTES
    agreed._lives.table.captured[0].shared = False


def test_what_went_runs_twice_as_often_each_time_however_long_that_takes() -> None:
    now, waits = [0.0], []
    region = Region(double, FakeDriver(), name="toy", clock=lambda: now[0])
    call(region, 1, 1)
    for _ in range(8):
        (capture,) = region.captures()
        capture.evict("memory-limit")
        before = region.record.uncaptured
        while not region.captures():
            now[0] += 1
            call(region, 1)
        waits.append(region.record.uncaptured - before - 1)
    assert waits == [2 << turn for turn in range(8)]


# -- what is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [pygraph.release, Region.close, None])
def test_what_is_freed_is_held_no_longer(end: Callable[..., Any] | None) -> None:
    driver = EvenDriver()
    region = region_of(driver)
    for size in (1, 2, 3):
        call(region, size, size, size)
    record = region.record
    alive = [weakref.ref(executable) for capture in region.captures() for executable in capture.variant.held]
    assert (record.held_bytes, held_bytes(CPU)) == (3 * BYTES, 3 * BYTES)
    if end is pygraph.release:
        end()
    elif end is not None:
        end(region)
    else:
        del region
        gc.collect()
    assert (record.held_bytes, held_bytes(CPU)) == (0, 0)
    gc.collect()
    assert [executable() for executable in alive] == [None] * 3


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "program", ["branches", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("mlp", "random"))]
)
def test_the_host_driver_counts_no_less_than_a_process_grows_by(program: str) -> None:
    driver, (versions, *_) = HostDriver(), region_calls(program)
    made = make_program(driver, versions[0].fn, versions[0].args)
    kept = [driver.instantiate(made) for _ in range(50)]
    before = resident()
    kept += [driver.instantiate(made) for _ in range(200)]
    assert resident() - before <= sum(executable.nbytes for executable in kept[50:])


# -- threads -----------------------------------------------------------------------------------------------------------


def test_a_capture_that_is_evicted_within_its_replay_ends_it_as_ever() -> None:
    """By another region, on another thread."""
    driver = EvenDriver()
    other = region_of(driver, BYTES)
    evicts = [False]

    @torch.library.custom_op("pygraph_room::evict", mutates_args=())
    def evict(x: torch.Tensor) -> torch.Tensor:
        if evicts[0]:
            thread = threading.Thread(target=call, args=(other, 3, 3))
            thread.start()
            thread.join()
        return x + 1

    evict.register_fake(torch.empty_like)

    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [torch.relu(torch.ops.pygraph_room.evict(torch.relu(x))) * 2]

    region = region_of(driver, fn=fn)
    for turn in range(6):
        evicts[0] = turn == 3
        assert region([torch.ones(4)])[0].tolist() == [4.0] * 4
    assert (held(other), held(region)) == ([3], [])
    assert region.record.events["evicted.memory-limit"] == 1
    assert (region.record.captures, region.record.replays, region.record.uncaptured) == (1, 2, 4)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=60), st.integers(1, 6))
def test_the_last_used_stay_whatever_comes(calls: list[tuple[int, int]], room: int) -> None:
    pygraph.release()
    driver = FakeDriver()
    regions = [region_of(driver, room * BYTES) for _ in range(3)]
    recent: list[tuple[int, int]] = []
    for which, size in calls:
        call(regions[which], size)
        now = {(number, n) for number, region in enumerate(regions) for n in held(region)}
        recent = [*(each for each in recent if each != (which, size)), *[(which, size)] * ((which, size) in now)]
        assert now == set(recent[-room:])
        assert held_bytes(CPU) == BYTES * len(now)
    for region in regions:
        region.close()
    assert held_bytes(CPU) == 0


def test_threads_that_evict_each_others_captures_get_their_own_results() -> None:
    driver = EvenDriver()
    regions = [region_of(driver, 3 * BYTES, lambda args: [torch.cumsum(args[0], 0) * 2]) for _ in range(3)]
    wrong: list[object] = []
    over: list[int] = []

    def work(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(150):
            x = torch.full((drawn.randint(1, 3),), float(seed))
            if not torch.equal(drawn.choice(regions)([x.clone()])[0], torch.cumsum(x, 0) * 2):
                wrong.append(seed)
            now = held_bytes(CPU)
            if now > 3 * BYTES:
                over.append(now)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, over) == ([], [])
    assert sum(region.record.events["evicted"] for region in regions) > 0
    assert sum(region.record.replays for region in regions) > 0
