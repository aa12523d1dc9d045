"""Captures that must pay, through Region, in virtual time: which sizes are captured, and what that costs in all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from pygraph.program.program import Program
from pygraph.program.recording import Recording
from pygraph.runtime import life
from pygraph.runtime.contract import Executable
from pygraph.runtime.region import Region, RegionOptions
from pygraph.runtime.variants import ScalarKey
from tests.runtime.fake import BYTES, FakeDriver


class World(FakeDriver):
    """``uncaptured`` and ``replay``: what a call of each kind takes, in µs; ``capture``, what a capture takes besides
    the uncaptured run that answers its call. ``first``: what the first call of a size takes on top. ``proven``:
    captures are not compared from now on."""

    proven = False

    def __init__(self, uncaptured: float = 100.0, replay: float = 40.0, capture: float = 1400.0) -> None:
        super().__init__(self._replayed)
        self.now = self.first = 0.0
        self.uncaptured, self.replay, self.cost = uncaptured, replay, capture
        self._capturing = False
        self._seen: set[int] = set()

    def run(self, args: list[Any]) -> Sequence[Any]:
        """The region's function."""
        (x, *_) = args
        args.clear()
        self.now += self.uncaptured + self.first * (len(x) not in self._seen)
        self._seen.add(len(x))
        return [x * 2]

    def _replayed(self, args: list[Any]) -> Sequence[Any]:
        (x, *_) = args
        args.clear()
        if not self._capturing:
            self.now += self.replay
        return [x * 2]

    def capture(self, fn: Any, args: Sequence[Any], eager: Collection[str] = (), **options: Any) -> Recording:
        self._capturing = not self.proven
        return super().capture(fn, args, eager, **options)

    def instantiate(self, program: Program) -> Executable:
        self.now += self.cost
        return super().instantiate(program)


def region_of(world: World, **options: Any) -> Region:
    made = RegionOptions(**{"ledger": True, **options})
    return Region(world.run, world, name="toy", options=made, clock=lambda: world.now * 1e-6)


def call(region: Region, world: World, sizes: Iterable[int], *rest: Any) -> list[str]:
    """Answers to a call of each size: ``replay``, ``uncaptured``, or an uncaptured run beside a ``capture``."""
    done = []
    for size in sizes:
        before, made = region.record.replays, region.record.captures
        (result,) = region([torch.ones(size), *rest])
        world._capturing = False
        assert result.tolist() == [2.0] * size
        done.append(
            "replay" if region.record.replays > before else "capture" if region.record.captures > made else "uncaptured"
        )
    return done


def test_one_size_is_captured_at_its_second_call() -> None:
    world = World()
    region = region_of(world)
    assert call(region, world, [3] * 6) == ["uncaptured", "capture", *["replay"] * 4]


def test_sizes_that_never_return_cost_three_captures() -> None:
    """Though each comes four times in a row, as in a block that four layers share."""
    world = World()
    region = region_of(world)
    call(region, world, [size for size in range(2, 122) for _ in range(4)])
    assert region.record.captures == 3
    assert world.now <= 1.1 * 480 * world.uncaptured
    assert region.record.ledger is not None
    told = 128 // 4
    assert region.record.ledger.declined == told * 3, "all calls but the first of each size that is told apart"


def test_captures_that_were_dear_at_first_do_not_put_off_those_that_are_not() -> None:
    """As where the first ones load the device's kernels: what a later one will cost is what the cheapest did."""
    world = World(uncaptured=2300.0, replay=450.0, capture=500_000.0)
    region = region_of(world)
    sizes = list(range(2, 34))
    for size in sizes * 34:
        world.cost = 500_000.0 if region.record.captures < 2 else 120_000.0
        call(region, world, [size])
    assert call(region, world, sizes) == ["replay"] * len(sizes)
    assert region.record.ledger is not None
    assert region.record.ledger.cost_us == pytest.approx(120_000, rel=0.01)


def test_sizes_that_cycle_beyond_the_room_cost_a_twentieth_at_most() -> None:
    world = World()
    region = region_of(world)
    done = call(region, world, islice(cycle(range(2, 202)), 2000))
    assert done.count("capture") == 3, "replays of these are too few to pay for another one"
    assert world.now <= 1.05 * 2000 * world.uncaptured


def test_numbers_that_count_up_cost_a_twentieth_at_most() -> None:
    """Each comes as often as there are layers."""
    world = World()
    region = region_of(world)
    for number in range(500):
        call(region, world, [3] * 4, number)
    assert region.record.captures == 3
    assert world.now <= 1.05 * 2000 * world.uncaptured


def test_of_sizes_that_never_return_few_are_looked_at() -> None:
    """Those that do are seen within a few calls, and what is captured is replayed whatever comes in between."""
    world = World()
    region = region_of(world)
    keys = 0

    class Counting(ScalarKey):
        def of(self, args: Sequence[Any]) -> Any:
            nonlocal keys
            keys += 1
            return super().of(args)

    call(region, world, [2] * 3)
    region._lives.key = Counting([torch.ones(2)])
    call(region, world, [size for size in range(3, 403) for _ in range(4)])
    assert 128 < keys < 300
    assert call(region, world, [2] * 12)[-1] == "replay"
    assert call(region, world, [each for size in range(3, 90) for each in (2, size)])[::2] == ["replay"] * 87
    assert call(region, world, [700] * 60)[-1] == "replay"


def test_of_sizes_whose_captures_do_not_pay_few_are_looked_at() -> None:
    """Though they return, and three of them are replayed if they are looked at."""
    world = World(capture=18_000.0)
    region = region_of(world)
    call(region, world, [*range(2, 202)] * 3)
    assert region.record.ledger is not None
    looks = region.record.ledger.declined
    done = call(region, world, [*range(2, 202)] * 4)
    assert 0 < region.record.ledger.declined - looks <= 4 * 200 / 11 + 1
    assert done.count("replay") <= 4
    assert call(region, world, [300] * 400)[-1] == "replay", "one that pays is found all the same"


@pytest.mark.parametrize(("capture", "layers"), [(1400.0, 1), (9000.0, 1), (20_000.0, 4)])
def test_sizes_that_return_are_all_replayed(capture: float, layers: int) -> None:
    """By the time each of 30 has come 40 times, though captures may be dear."""
    world = World(capture=capture)
    region = region_of(world)
    forwards = [size for size in range(2, 32) for _ in range(layers)]
    call(region, world, forwards * 39)
    assert call(region, world, forwards) == ["replay"] * len(forwards)


def test_a_capture_that_is_too_dear_is_not_made() -> None:
    """200 sizes in turn, four layers each, whose captures cost what 300 replays save."""
    world = World(capture=18_000.0)
    region = region_of(world)
    call(region, world, [2 + size for _ in range(10) for size in range(200) for _ in range(4)])
    assert region.record.captures == 3


def test_a_few_sizes_take_at_most_twice_the_least_possible() -> None:
    """And three captures. The least: each of 8 captured at once, or never."""
    for rounds in (2, 5, 10, 20, 40, 80, 400):
        world = World()
        region = region_of(world)
        call(region, world, list(range(2, 10)) * rounds)
        never = 8 * rounds * world.uncaptured
        at_once = 8 * (2 * world.uncaptured + world.cost + (rounds - 2) * world.replay)
        assert world.now <= 2 * min(never, at_once) + 3 * world.cost, rounds
    assert call(region, world, range(2, 10)) == ["replay"] * 8
    assert world.now <= 1.05 * at_once


def test_a_size_that_returns_after_others_never_did_is_captured() -> None:
    """Nobody knows what replays save yet."""
    world = World()
    region = region_of(world)
    call(region, world, [size for size in range(2, 50) for _ in range(2)])
    assert (region.record.captures, region.record.replays) == (3, 0)
    assert call(region, world, [77] * 40)[-1] == "replay"


@pytest.mark.parametrize("replay", [100.0, 130.0])
def test_where_replays_save_nothing_no_more_is_captured(replay: float) -> None:
    world = World(replay=replay)
    region = region_of(world)
    call(region, world, list(range(2, 12)) * 400)
    assert region.record.captures == 3
    assert region.record.ledger is not None
    assert region.record.ledger.saved_us < 1e-6


def test_first_calls_of_sizes_are_no_savings() -> None:
    """They load kernels."""
    world = World(replay=100.0)
    world.first = 10_000.0
    region = region_of(world)
    call(region, world, list(range(2, 12)) * 100)
    assert region.record.captures == 3


def test_a_first_call_that_loads_kernels_is_no_saving_where_it_is_captured_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a later process, whose captures are of proven kernels: they run uncaptured but once."""
    monkeypatch.setattr(life, "proof_path", lambda *_: tmp_path / "proof.json")
    for later in (False, True):
        world = World(replay=100.0)
        world.code, world.proven, world.first = "toy", later, 500_000.0 * later
        region = region_of(world)
        call(region, world, [2] if later else [2, 2])
        assert (region.record.captures, region.record.proven) == (1, later)
        world.proven, world.first = True, 0.0
        call(region, world, list(range(2, 12)) * 100)
        assert region.record.captures == 3
        ledger = region.record.ledger
        assert ledger is not None
        assert ledger.cost_us == pytest.approx(world.cost)
        assert ledger.saved_us < 1


def test_evicted_captures_wait_longer_each_time() -> None:
    """Where more sizes cycle than there is room for, captures become rarer and rarer."""
    world = World()
    region = region_of(world, memory_limit=4 * BYTES)
    captures = []
    for _ in range(4):
        call(region, world, list(range(2, 10)) * 200)
        captures.append(region.record.captures - sum(captures))
    assert captures[0] > captures[-1]
    assert world.now <= 1.25 * 4 * 1600 * world.uncaptured


def test_what_fails_is_paid_for_too() -> None:
    """A capture that is refused for what may pass is tried again after calls that would have paid for it."""

    class Failing(World):
        def capture(self, fn: Any, args: Sequence[Any], eager: Collection[str] = (), **options: Any) -> Recording:
            self.now += 5000.0
            tried.append(self.now)
            raise torch.OutOfMemoryError("no room")

    tried: list[float] = []
    world = Failing()
    region = region_of(world)
    call(region, world, [3] * 3000)
    assert len(tried) > 3
    assert 5000.0 * len(tried) <= 0.5 * 3000 * world.uncaptured + 3 * 5000.0
    before = len(tried)
    region.retry(every=False)
    call(region, world, [3])
    assert len(tried) == before + 1, "the user wants it tried"


def test_the_report_has_what_was_spent_and_saved() -> None:
    world = World()
    region = region_of(world)
    call(region, world, [3] * 102)
    region.record.settle()
    ledger = region.record.ledger
    assert ledger is not None
    assert (ledger.attempts, ledger.replays) == (1, 100)
    assert ledger.spent_us == pytest.approx(world.cost)
    assert ledger.saved_us == pytest.approx(100 * (world.uncaptured - world.replay))


def test_replays_of_each_size_save_what_that_size_saves() -> None:
    """Sizes that take long and never return say nothing of a short one that does."""
    world = World(uncaptured=50.0, replay=40.0)
    region = region_of(world)
    call(region, world, [3] * 12)
    world.uncaptured = 5000.0
    for size in range(10, 210):
        call(region, world, [size, size])
        world.uncaptured = 50.0
        call(region, world, [3] * 10)
        world.uncaptured = 5000.0
    region.record.settle()
    assert region.record.ledger is not None
    assert region.record.ledger.saved_us == pytest.approx(region.record.replays * 10.0, rel=0.01)


def test_without_a_ledger_each_size_is_captured_when_it_comes_again() -> None:
    world = World()
    region = region_of(world, ledger=False)
    assert call(region, world, [size for size in range(2, 12) for _ in range(3)]) == [
        *["uncaptured", "capture", "replay"] * 10
    ]
    assert region.record.ledger is None


@pytest.mark.parametrize("scalar", [2, 2.5], ids=["ints", "floats"])
def test_few_replays_are_timed(scalar: float) -> None:
    """Then they take no look at a clock, but for sizes in turn."""
    world, looks = World(), []
    made = RegionOptions(ledger=True)
    region = Region(world.run, world, name="toy", options=made, clock=lambda: looks.append(1) or world.now * 1e-6)
    call(region, world, [3] * 12, scalar)
    before = len(looks)
    call(region, world, [3] * 100, scalar)
    assert len(looks) == before
    assert region.record.replays == 110
