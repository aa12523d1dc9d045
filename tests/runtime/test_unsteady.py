"""Regions that do not repeat themselves: a replay may be as far from an uncaptured run as others of those are."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import ReplayError
from pygraph.program.recording import PythonCall
from pygraph.runtime import compare as compare_module
from pygraph.runtime import judge as judge_module
from pygraph.runtime import life as life_module
from pygraph.runtime.compare import Verdict, compare
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.judge import RUNS, distance
from pygraph.runtime.region import Region, RegionOptions, RegionRecord
from tests.runtime.captures import Capture
from tests.runtime.fake import FakeDriver

Function = Callable[[list[Any]], Sequence[Any]]

SIZE = 64


def noise(seed: int) -> Callable[[int], torch.Tensor]:
    """Numbers between -1 and 1, others each time, that are drawn from no generator that a region knows."""
    generator = torch.Generator().manual_seed(seed)
    return lambda size: torch.rand(size, generator=generator) * 2 - 1


def unsteady(seed: int, scale: float) -> Function:
    """An output that is off by up to ``scale`` each time, one that is not, and a written argument that is.

    What is added to the argument is so large that its rounding is no matter.
    """
    draw = noise(seed)

    def fn(args: list[Any]) -> Sequence[Any]:
        x, state = args
        args.clear()
        state.add_(1)
        return [x * 3 + scale * draw(SIZE), x * 2, state.clone()]

    return fn


def unsteady_region(
    fn: Function, kernel: Function | None = None, written: Sequence[int] = (1,), outputs: int = 1, **options: Any
) -> tuple[Region, FakeDriver]:
    """A region that is known to be non-deterministic, and draws from no generator that it knows."""
    driver = FakeDriver(kernel, written)
    driver.nondeterministic, driver.random = outputs, False
    return Region(fn, driver, name="toy", options=RegionOptions(**options)), driver


def run(
    fn: Function, kernel: Function | None = None, calls: int = 3, outputs: int = 3
) -> tuple[RegionRecord, FakeDriver]:
    """The record and the driver of a region after ``calls`` calls: exactly one run's effect is seen for each, and
    random numbers are not drawn."""
    region, driver = unsteady_region(fn, kernel, outputs=outputs)
    state, before = torch.zeros(4), torch.get_rng_state()
    for call in range(calls):
        x = torch.linspace(-1, 1, SIZE)
        region([x, state])
        assert torch.equal(x, torch.linspace(-1, 1, SIZE))
        assert state.tolist() == [call + 1.0] * 4
    assert torch.equal(torch.get_rng_state(), before)
    return region.record, driver


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.floats(1e-6, 10.0))
def test_a_right_replay_is_accepted_however_noisy_the_region(seed: int, scale: float) -> None:
    record, driver = run(unsteady(seed, scale))
    assert record.replays == 1, record
    assert record.notes == ["non-deterministic: compared within a tolerance"]
    assert driver.executables[0].replays == 1 + 1, "one on copies, one that answers a call"


def spoiled(fn: Function, spoil: Callable[[list[Any]], None]) -> Function:
    """A wrong kernel: ``spoil`` changes what the right one returned."""

    def kernel(args: list[Any]) -> Sequence[Any]:
        outputs = list(fn(args))
        spoil(outputs)
        return outputs

    return kernel


@settings(max_examples=20)
@given(st.integers(0, 1 << 30), st.floats(1e-2, 10.0), st.integers(0, SIZE - 1))
def test_a_replay_off_by_ten_times_the_spread_is_refused(seed: int, scale: float, at: int) -> None:
    fn = unsteady(seed, scale)

    def spoil(outputs: list[Any]) -> None:
        outputs[0][at] += 10 * 2 * scale

    record, driver = run(fn, spoiled(fn, spoil), calls=5)
    assert (record.captures, record.replays) == (0, 0)
    words = "comparison-failed: twice in a row, non-deterministic: output 0 is off by "
    assert str(record.reason).startswith(words), record
    assert [executable.closed for executable in driver.executables] == [True, True]


def only(replay: int, off: float) -> Callable[[list[Any]], None]:
    """Spoils the replay with this number, from 1 on: one element of 64 up to 2."""
    replays: list[int] = []

    def spoil(outputs: list[Any]) -> None:
        replays.append(1)
        outputs[1][0] += off * (len(replays) == replay)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda outputs: outputs[1][0].add_(1), "non-deterministic: output 1 is off by 1.00e+00"),
        (lambda outputs: outputs[1].view(torch.uint8)[8].bitwise_xor_(1), "output 1 has other values, though"),
        (lambda outputs: outputs[1].view(torch.uint8)[9].bitwise_xor_(1), "output 1 is off by 3.05e-05"),
        (lambda outputs: outputs.insert(0, outputs.pop(1)), "output 0 is off by"),
        (lambda outputs: outputs[0][5].fill_(math.nan), "output 0 has a NaN or an infinity at another place"),
        (lambda outputs: outputs.pop(), "2 outputs instead of 3"),
    ],
)
def test_a_replay_that_is_wrong_in_what_the_region_repeats_is_refused(spoil: Any, words: str) -> None:
    fn = unsteady(1, 1e-2)
    record, _ = run(fn, spoiled(fn, spoil), calls=8)
    assert str(record.reason).startswith("comparison-failed: ")
    assert words in str(record.reason)
    assert (record.captures, record.replays) == (0, 0)


@pytest.mark.parametrize("off", [1e-6, 1.0])
def test_a_replay_that_is_the_odd_one_of_runs_that_vary_is_captured_once_more(off: float) -> None:
    """In a result on which all others agree: at twice as many calls, and used if it is not so again."""
    fn = unsteady(1, 1e-2)
    record, driver = run(fn, spoiled(fn, only(1, off)), calls=4)
    assert list(record.refusals) == ["odd-replay"]
    assert "though uncaptured runs agree on it" in record.refusals["odd-replay"].detail
    assert (record.captures, record.replays) == (0, 0)
    record, driver = run(fn, spoiled(fn, only(1, off)), calls=8)
    assert (record.captures, record.replays, record.reason) == (1, 3, None)
    assert len(driver.executables) == 2


def lagging(values: Sequence[float]) -> RegionRecord:
    """The record of a region whose replay adds the operand of the replay before, as where it reads memory before that
    is written: made again with the same arguments, it is right. Each call adds one of ``values``."""
    left = torch.zeros(SIZE, dtype=torch.bfloat16)

    def kernel(args: list[Any]) -> Sequence[Any]:
        small, left[:] = left.clone(), args[1]
        return [args[0] + small]

    region, _ = unsteady_region(lambda args: [args[0] + args[1]], kernel, written=())
    for value in values:
        args = [torch.full((SIZE,), 8.0, dtype=torch.bfloat16), torch.full((SIZE,), value, dtype=torch.bfloat16)]
        assert torch.equal(region(list(args))[0], args[0] + args[1])
    return region.record


@pytest.mark.parametrize("period", [2, 3, 4, 20])
def test_a_replay_that_lags_by_one_run_is_refused(period: int) -> None:
    record = lagging([0.05 * (1 + call % period) for call in range(20)])
    assert "twice in a row" in str(record.reason), record
    assert record.captures == 0


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-2, 1.0])
def test_of_a_program_that_varies_too_a_replay_that_lags_by_one_run_is_refused(scale: float, draws: bool) -> None:
    """It returns what the one before should have: made again with the same arguments, it is right."""
    draw, left = noise(4), [torch.zeros(SIZE)]

    def fn(args: list[Any]) -> Sequence[Any]:
        drawn = torch.rand(SIZE) if draws else 0.0
        return [args[0] * 2 + scale * draw(SIZE), args[0] + drawn]

    def kernel(args: list[Any]) -> Sequence[Any]:
        outputs = list(fn(args))
        left.append(outputs[0])
        return [left.pop(0), outputs[1]]

    region, driver = unsteady_region(fn, kernel, written=())
    driver.random = draws
    for call in range(20):
        region([torch.linspace(-1, 1, SIZE) * 100 * (1 + call)])
    assert region.record.captures == 0
    assert str(region.record.reason).startswith("comparison-failed: "), region.record


def test_a_call_like_the_one_whose_replay_was_odd_is_no_other_comparison() -> None:
    record = lagging([0.1] * 20)
    assert (list(record.refusals), record.captures) == (["odd-replay"], 0)
    record = lagging([0.1] * 5 + [0.1 * call for call in range(20)])
    assert (list(record.refusals), record.captures) == (["odd-replay", "comparison-failed"], 0)


@pytest.mark.parametrize("module", [compare_module, life_module])
def test_calls_are_answered_where_there_is_no_memory_to_tell_their_arguments(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(args: Sequence[Any]) -> bytes:
        raise torch.OutOfMemoryError("as asked")

    monkeypatch.setattr(module, "fingerprint", short)
    record = lagging([0.05 * call for call in range(8)])
    assert list(record.refusals) == ["out-of-memory" if module is compare_module else "odd-replay"]
    assert record.captures == 0


def test_a_replay_that_lags_is_not_made_again_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scratch memory has no room for looking at it, ordinary memory might: the second one would be right."""
    real, looked = compare_module.observe, count()

    def short(*facts: Any) -> Any:
        if next(looked) == 0:
            raise torch.OutOfMemoryError("as asked")
        return real(*facts)

    monkeypatch.setattr(compare_module, "observe", short)
    record = lagging([0.05, 0.1])
    assert (list(record.refusals), record.captures) == (["out-of-memory"], 0)


def test_odd_replays_of_all_sizes_count() -> None:
    """A replay that is wrong in the lowest bit, for each of many sizes: two are enough."""
    fn = unsteady(1, 1e-2)
    region, driver = unsteady_region(fn, spoiled(fn, lambda outputs: outputs[1].view(torch.uint8)[8].bitwise_xor_(1)))
    driver.nondeterministic = 3
    for size in range(SIZE, SIZE + 10):
        for _ in range(3):
            region([torch.linspace(-1, 1, SIZE), torch.zeros(size)])
    assert str(region.record.reason).startswith("comparison-failed: twice in a row, non-deterministic: output 1")
    assert len(driver.executables) == 2


def test_a_right_replay_of_another_size_says_that_the_odd_one_was_chance() -> None:
    odd = {SIZE, 3 * SIZE}

    def spoil(outputs: list[Any]) -> None:
        size = outputs[0].numel()
        outputs[0][3] += 1e-6 * (size in odd)
        odd.discard(size)

    def fn(args: list[Any]) -> Sequence[Any]:
        return [args[0] + 1]

    region, _ = unsteady_region(fn, spoiled(fn, spoil))
    for size in (SIZE, 2 * SIZE, 3 * SIZE, 2 * SIZE):
        for _ in range(2):
            region([torch.ones(size)])
    assert (list(region.record.refusals), region.record.captures, region.record.replays) == (["odd-replay"], 1, 2)


class Verified:
    """A region that is known to vary, of which each call is compared. ``call`` says whether a replay was right, where
    the first one made for the call is the ``odd`` one, or none has memory (``short``)."""

    def __init__(self, *, odd: bool = False) -> None:
        """``odd``: it is captured twice, since the first replay was the odd one."""
        self._odd, self._short = odd, False
        self.region, driver = unsteady_region(self._fn, spoiled(self._fn, self._spoil), verify_every=1)
        for call in range(5 if odd else 2):
            self.region([torch.full((SIZE,), 1.0 + call)])
        assert (self.region.record.captures, len(driver.executables)) == (1, 1 + odd)

    def _fn(self, args: list[Any]) -> Sequence[Any]:
        return [args[0] + 1]

    def _spoil(self, outputs: list[Any]) -> None:
        if self._short:
            raise torch.OutOfMemoryError("as asked")
        outputs[0][3] += 1e-6 * self._odd
        self._odd = False

    def call(self, *, odd: bool = False, short: bool = False) -> bool:
        self._odd, self._short, before = odd, short, self.region.record.replays
        self.region([torch.ones(SIZE)])
        return self.region.record.replays > before


def test_a_verified_replay_that_is_the_odd_one_twice_is_wrong_whatever_another_size_does() -> None:
    draws = iter([0.0] * 8)

    def spoil(outputs: list[Any]) -> None:
        if outputs[0].numel() == SIZE and next(draws, 1.0):
            outputs[0].view(torch.uint8)[8].bitwise_xor_(1)

    def plus_one(args: list[Any]) -> Sequence[Any]:
        return [args[0] + 1]

    region, driver = unsteady_region(plus_one, None, verify_every=1)
    driver.kernel = spoiled(plus_one, spoil)

    def alternate() -> None:
        for _ in range(20):
            for size in (SIZE, 2 * SIZE):
                region([torch.ones(size)])

    with pytest.raises(ReplayError, match="twice in a row"):
        alternate()
    assert region.record.captures == 2


def test_a_verified_replay_that_is_the_odd_one_is_wrong_if_the_next_is_so_too() -> None:
    verified = Verified(odd=True)
    assert [verified.call(odd=odd) for odd in (True, False)] == [False, True]
    assert not verified.call(short=True), "nothing is compared, which says nothing"
    assert not verified.call(odd=True)
    assert "unverified: odd-replay: non-deterministic: output 0" in str(verified.region.record.refusals["unverified"])
    assert not verified.call(short=True), "nothing is compared, which says nothing"
    with pytest.raises(ReplayError, match="twice in a row, non-deterministic: output 0 has other values, though"):
        verified.call(odd=True)


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (20.0, False)])
def test_written_arguments_have_a_spread_too(factor: float, accepted: bool) -> None:
    draw = noise(3)

    def times(scale: float) -> Function:
        def fn(args: list[Any]) -> Sequence[Any]:
            x, state = args
            state.add_(x + 1e-3 * scale * draw(SIZE))
            return [x * 2]

        return fn

    region, _ = unsteady_region(times(1.0), times(factor))
    state = torch.zeros(SIZE)
    for _ in range(3):
        region([torch.ones(SIZE), state])
    assert torch.allclose(state, torch.full((SIZE,), 3.0), atol=3e-3 + 2e-2 * accepted)
    assert bool(region.record.replays) == accepted, region.record
    if not accepted:
        assert "non-deterministic: argument 1 is off by " in str(region.record.reason)


def test_a_written_argument_with_gaps_has_no_tolerance() -> None:
    draw = noise(3)

    def fn(args: list[Any]) -> Sequence[Any]:
        args[0].add_(1 + 1e-3 * draw(4))
        return []

    region, _ = unsteady_region(fn, written=(0,), outputs=0)
    for _ in range(3):
        region([torch.zeros(16)[0::4]])
    assert region.record.replays == 0
    assert "argument 0 has other values" in str(region.record.reason)


def test_uncaptured_runs_that_differ_in_integers_are_refused() -> None:
    draw = noise(6)

    def fn(args: list[Any]) -> Sequence[Any]:
        args[1].add_(1)
        return [args[0] + draw(SIZE), draw(SIZE).argmax()]

    record, _ = run(fn, outputs=2)
    words = "non-deterministic: in another uncaptured run, output 1 holds other integers"
    assert str(record.reason).startswith(f"comparison-failed: {words}")


def test_a_difference_that_no_known_launch_explains_is_refused_without_another_run() -> None:
    draw, runs = noise(8), list[int]()

    def fn(args: list[Any]) -> Sequence[Any]:
        runs.append(1)
        return [args[0] + 1e-6 * draw(SIZE)]

    driver = FakeDriver()
    region = Region(fn, driver, name="toy")
    for _ in range(3):
        region([torch.ones(SIZE)])
    assert str(region.record.reason).startswith("comparison-failed: replayed: output 0 has other values")
    assert len(runs) == 1 + 2 + 1, "uncaptured; replayed, uncaptured; uncaptured"


# -- one run of many that is further off than all others -----------------------------------------------------------


def odd(replays: Sequence[int], *, verify: bool = False) -> Region:
    """A region of which the ``replays`` with these numbers are off by 0.01 in one element of 64 near 1, where
    uncaptured runs are 1e-6 apart."""
    draw = noise(11)
    made: list[int] = []

    def fn(args: list[Any]) -> Sequence[Any]:
        return [args[0] + 1e-6 * draw(SIZE)]

    def spoil(outputs: list[Any]) -> None:
        made.append(1)
        outputs[0][3] += 1e-2 if len(made) in replays else 0.0

    return unsteady_region(fn, spoiled(fn, spoil), verify_every=int(verify))[0]


def called(region: Region) -> RegionRecord:
    for call in range(8):
        region([torch.ones(SIZE) + call / 8])
    return region.record


@pytest.mark.parametrize("replays", [(1,), (1, 2)])
def test_a_replay_that_is_far_off_is_captured_once_more_and_refused_if_it_is_so_again(replays: Sequence[int]) -> None:
    record = called(odd(replays))
    assert record.replays == (3 if replays == (1,) else 0), record
    assert ("twice in a row, non-deterministic: output 0 is off by 1.0" in str(record.reason)) == (len(replays) == 2)


@pytest.mark.parametrize("replays", [(3,), (3, 5), (3, 4)])
def test_a_verified_replay_that_is_far_off_is_wrong_if_the_next_is_so_too(replays: Sequence[int]) -> None:
    region = odd(replays, verify=True)
    if replays != (3, 4):
        assert called(region).replays == 6 - len(replays)
        return
    with pytest.raises(ReplayError, match="output 0 is off by"):
        called(region)


def rare(spoil: Callable[[torch.Tensor], Any]) -> RegionRecord:
    """The record of a region each run of which is off by 2**-8 in one of 16,384 elements, another one each time, as
    where a bfloat16 rounds to the other side. ``spoil`` changes the result of its replays."""
    generator = torch.Generator().manual_seed(5)

    def fn(args: list[Any]) -> Sequence[Any]:
        result = args[0] * 2
        result[int(torch.randint(1 << 14, (), generator=generator))] *= 1 + 2.0**-8
        return [result]

    region, _ = unsteady_region(fn, spoiled(fn, lambda outputs: spoil(outputs[0])))
    for _ in range(4):
        region([torch.ones(1 << 14)])
    return region.record


def test_where_each_run_is_off_at_a_place_of_its_own_a_replay_may_be_so_too() -> None:
    record = rare(lambda result: None)
    assert record.replays == 2, record


def test_a_run_that_is_far_off_at_one_place_counts_with_all_its_places() -> None:
    """Where sums nearly cancel, more than is let off: a replay that is so is refused, and others are not."""
    generator = torch.Generator().manual_seed(5)

    def times(*far: float) -> Function:
        def fn(args: list[Any]) -> Sequence[Any]:
            result = args[0] * 2
            for off in (*[2.0**-8] * 8, *far):
                result[int(torch.randint(1 << 14, (), generator=generator))] *= 1 + off
            return [result]

        return fn

    for replayed, accepted in ((times(), True), (times(0.5), False)):
        region, _ = unsteady_region(times(0.5), replayed, outputs=1)
        for _ in range(4):
            region([torch.ones(1 << 14)])
        assert bool(region.record.replays) == accepted, region.record


@pytest.mark.parametrize("chance", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("verify", [False, True])
def test_a_region_few_runs_of_which_are_off_is_refused_now_and_then_but_not_for_good(
    chance: float, verify: bool
) -> None:
    """By 2**-8 in one of 4096 elements: in most comparisons, no other run is."""
    for seed in range(2 if verify else 40):
        generator = torch.Generator().manual_seed(seed)

        def fn(args: list[Any], generator: torch.Generator = generator) -> Sequence[Any]:
            result = args[0] * 2
            if torch.rand((), generator=generator) < chance:
                result[int(torch.randint(1 << 12, (), generator=generator))] *= 1 + 2.0**-8
            return [result]

        region, _ = unsteady_region(fn, verify_every=int(verify))
        for call in range(50 if verify else 10):
            region([torch.ones(1 << 12) + call])
        assert region.record.captures == 1, (seed, region.record)


@pytest.mark.parametrize("size", [512, 768])
def test_small_results_may_each_be_off_at_a_few_places(size: int) -> None:
    """Such as gradients of biases that are rounded to bfloat16 on their way: fifty, each at one place in each run."""
    generator = torch.Generator().manual_seed(5)

    def fn(args: list[Any]) -> Sequence[Any]:
        results = [args[0] * 2 for _ in range(50)]
        for result in results:
            result[int(torch.randint(size, (), generator=generator))] *= 1 + 2.0**-8
        return results

    region, _ = unsteady_region(fn, outputs=50)
    for call in range(8):
        region([torch.ones(size) + call])
    assert region.record.captures == 1, region.record


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda result: result[7].mul_(1.05), "output 0 is off by 1.00e-01"),
        (lambda result: result.mul_(1 + 2.0**-8), "output 0 is off by "),
        (lambda result: result[:320].mul_(1 + 2.0**-8), "output 0 is off by "),
    ],
    ids=["further", "everywhere", "at more places"],
)
def test_a_replay_that_is_off_by_more_or_at_more_places_is_refused(
    spoil: Callable[[torch.Tensor], Any], words: str
) -> None:
    record = rare(spoil)
    assert record.replays == 0
    assert words in str(record.reason)


def test_what_one_result_does_rarely_and_another_everywhere_is_not_taken_together() -> None:
    """The first is off by 2**-8 at one place of its own in each run; the second, in one run of all, a little
    everywhere, and in the replay a lot."""
    generator, runs = torch.Generator().manual_seed(5), count(1)

    def fn(args: list[Any]) -> Sequence[Any]:
        results = [
            args[0] * 2,
            args[0] * 3 * (1 + 5e-5 * (next(runs) == 8)) + 1e-6 * torch.rand((), generator=generator),
        ]
        results[0][int(torch.randint(1 << 14, (), generator=generator))] *= 1 + 2.0**-8
        return results

    region, _ = unsteady_region(fn, spoiled(fn, lambda outputs: outputs[1].mul_(1.015)), outputs=2)
    for _ in range(4):
        region([torch.ones(1 << 14)])
    assert region.record.replays == 0
    assert "output 1 is off by 4.5" in str(region.record.reason)


@pytest.mark.parametrize(
    ("size", "many"), [(1, 1), (128, 200), (4096, 20), pytest.param(4096, 200, marks=pytest.mark.sweep)]
)
def test_what_one_large_result_does_rarely_lets_off_neither_small_ones_nor_many(size: int, many: int) -> None:
    """The others are noisy, and off by 1.5 % in the replay: where they are small, wholly; else in a block each."""
    generator = torch.Generator().manual_seed(5)

    def fn(args: list[Any]) -> Sequence[Any]:
        results = [args[0] * 2, *(torch.ones(size) + 1e-6 * torch.rand((), generator=generator) for _ in range(many))]
        results[0][int(torch.randint(1 << 14, (), generator=generator))] *= 1 + 2.0**-8
        return results

    def spoil(outputs: list[Any]) -> None:
        for output in outputs[1:]:
            output[:128].mul_(1.015)

    region, _ = unsteady_region(fn, spoiled(fn, spoil), outputs=1 + many)
    for _ in range(4):
        region([torch.ones(1 << 14)])
    assert region.record.replays == 0
    assert " is off by 1.50e-02" in str(region.record.reason)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_a_result_that_all_runs_agree_on_has_no_part_in_the_surprise_of_another(
    dtype: torch.dtype, verify: bool
) -> None:
    generator = torch.Generator().manual_seed(5)

    def fn(args: list[Any]) -> Sequence[Any]:
        results = [args[0] * 2, args[0].to(dtype, copy=True)]
        results[0][int(torch.randint(1 << 14, (), generator=generator))] *= 1 + 2.0**-8
        return results

    def spoil(outputs: list[Any]) -> None:
        outputs[1] = (outputs[1].to(torch.float64) * 1.05).to(dtype) if dtype is not torch.bool else ~outputs[1]

    region, driver = unsteady_region(fn, spoiled(fn, spoil), outputs=2, verify_every=int(verify))
    if verify:  # a right one at first: later, what agrees by chance has a tolerance, too
        driver.kernel = fn
    for _ in range(2):
        region([torch.ones(1 << 14)])
    if verify:
        driver.kernel = spoiled(fn, spoil)
        region([torch.ones(1 << 14)])
        with pytest.raises(ReplayError, match="output 1 "):
            region([torch.ones(1 << 14)])
        return
    for call in range(6):
        region([torch.ones(1 << 14) + call])
    assert region.record.captures == 0
    assert str(region.record.reason).startswith("comparison-failed: twice in a row, non-deterministic: output 1 ")


def test_booleans_of_other_bytes_are_no_surprise() -> None:
    """They are equal, and their bytes are not."""
    draw = noise(2)

    def fn(args: list[Any]) -> Sequence[Any]:
        byte = 1 + int(100 * abs(draw(1)))
        return [args[0] + 1e-3 * draw(SIZE), torch.full((SIZE,), byte, dtype=torch.uint8).view(torch.bool)]

    region, _ = unsteady_region(fn, spoiled(fn, lambda outputs: outputs[0][3].add_(5.0)), outputs=2)
    for _ in range(4):
        region([torch.ones(SIZE)])
    assert "output 0 is off by 5.0" in str(region.record.reason), "both series of runs were made"


def noisy_region() -> tuple[Region, FakeDriver]:
    """A captured region that is off by up to a tenth of its argument, and writes another argument."""
    draw = noise(0)

    def fn(args: list[Any]) -> Sequence[Any]:
        x, state = args
        state.add_(1)
        return [x * (10 + draw(64)), x * 2]

    region, driver = unsteady_region(fn, outputs=2, verify_every=1)
    for _ in range(2):
        region([torch.ones(64), torch.zeros(4)])
    assert region.record.captures == 1, region.record
    return region, driver


@pytest.mark.parametrize(
    ("index", "off", "accepted"), [(0, 0, True), (0, 20, False), (1, 1e-6, True), (1, 1e-4, False)]
)
def test_verify_always_allows_what_uncaptured_runs_differ_by_and_no_more(
    index: int, off: float, accepted: bool
) -> None:
    """The second output is the same in all runs of this test, and is not known to be so in all others."""
    region, driver = noisy_region()

    def replay(args: list[Any]) -> Sequence[Any]:
        outputs = list(region._lives.subject.fn(args))
        outputs[index][3] += off
        return outputs

    driver.kernel = replay
    with contextlib.nullcontext() if accepted else pytest.raises(ReplayError, match=f"toy: .*output {index} is off by"):
        for _ in range(2):
            region([torch.ones(64), torch.zeros(4)])
    assert region.record.replays == 2 * accepted


def test_verify_always_sees_what_no_tolerance_is_for() -> None:
    region, driver = noisy_region()
    driver.kernel, driver.random = lambda args: [*region._lives.subject.fn(args), torch.rand(1)][:2], True
    with pytest.raises(ReplayError, match="the random state afterwards is another one"):
        region([torch.ones(64), torch.zeros(4)])


def test_runs_are_not_alive_together() -> None:
    draw = noise(7)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def fn(args: list[Any]) -> Sequence[Any]:
        args[1].add_(1)
        alive.append(len({id(tensor) for ref in made if (tensor := ref()) is not None}))
        output = args[0] + draw(SIZE)
        made.extend((weakref.ref(output), weakref.ref(args[1])))
        return [output]

    record, _ = run(fn, calls=2, outputs=1)
    assert record.captures == 1, record
    assert len(alive) == 1 + 2 + RUNS[0], "uncaptured; replayed, uncaptured; uncaptured on copies"
    nothing, state, replay, answer = 0, 1, 2, 1
    assert alive == [nothing, state, state + replay, *[state + replay + answer] * RUNS[0]]


# -- ranks that compare together ---------------------------------------------------------------------------------------

RIGHT, NEAR, WRONG, DECLINES = 0.0, 1e-7, 1e6, None
EVERYTHING = ["replay", *["run"] * (1 + sum(RUNS))]
"""What all ranks run where a launch varies, before they answer the call."""


class Joint:
    """One rank's part of a comparison of all: a region whose runs differ by ``scale``, and a ``replay`` that is off by
    so much; what it ``ran``, and what it ``told`` the others. ``draws``: it draws numbers. ``raises``: its answer does.
    ``spare``: bytes for copies. ``more``: outputs of the replay that no run has."""

    def __init__(
        self,
        scale: float,
        replay: float | None,
        *,
        raises: Exception | None = None,
        answer_off: float = 0.0,
        draws: bool = False,
        spare: int = 1 << 30,
        more: int = 0,
    ) -> None:
        self.scale, self.replay, self.raises, self.answer_off, self.draws = scale, replay, raises, answer_off, draws
        self.spare, self.more = spare, more
        self.ran: list[str] = []
        self.told: list[str | None] = []
        self.alive: list[int] = []
        """Outputs of earlier runs, when one begins."""
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._draw = noise(3)

    def _result(self, name: str, args: list[Any], off: float) -> list[Any]:
        self.ran.append(name)
        self.alive.append(sum(made() is not None for made in self._made))
        drawn = torch.rand(SIZE) if self.draws else 0.0
        output = args[0] * 3 + drawn + self.scale * self._draw(SIZE) + off
        self._made.append(weakref.ref(output))
        return [output]

    def _answer(self, args: list[Any]) -> Sequence[Any]:
        outputs = self._result("answer", args, self.answer_off)
        if self.raises is not None:
            raise self.raises
        return outputs

    def _replay(self, args: list[Any]) -> Sequence[Any]:
        return self._result("replay", args, self.replay or 0.0) * (1 + self.more)

    def compare(self) -> Verdict | None:
        """The verdict; None where the answer has raised, as asked."""

        def fn(args: list[Any]) -> Sequence[Any]:
            return self._result("run", args, 0.0)

        def together(runs: str | None) -> bool:
            self.told.append(runs)
            return runs is not None

        driver = FakeDriver(self._replay, (0,))
        driver.spare = self.spare
        driver.nondeterministic, driver.random = 1, self.draws
        driver.declines = lambda args: self.replay is DECLINES
        args = [torch.linspace(-1, 1, SIZE)]
        made = capture(fn, driver, list(args))
        assert isinstance(made, Captured)
        try:
            return compare(fn, driver, made.executable, args, made.program, self._answer, together=together)
        except ArithmeticError:
            return None


@pytest.mark.parametrize(
    ("scale", "replay", "reason"),
    [
        (0.0, RIGHT, None),
        (0.0, NEAR, "odd-replay"),
        (0.0, WRONG, "odd-replay"),
        (1.0, RIGHT, None),
        (1.0, WRONG, "odd-replay"),
    ],
)
@pytest.mark.parametrize("raises", [False, True])
def test_ranks_make_the_same_runs_whatever_they_find(
    scale: float, replay: float, reason: str | None, raises: bool
) -> None:
    """Before the call is answered, which may raise."""
    joint = Joint(scale, replay, raises=ArithmeticError("as asked") if raises else None)
    found = joint.compare()
    assert (joint.ran, joint.told) == ([*EVERYTHING, "answer"], ["rounds"])
    if found is not None:
        assert (found.refusal and found.refusal.reason) == reason
        assert found.tolerant == (reason is None and scale > 0)
        assert found.runs == joint.ran.count("run")


def test_a_rank_that_cannot_make_its_runs_raises_before_it_sends_anything_else() -> None:
    joint = Joint(1.0, DECLINES)
    with pytest.raises(ReplayError, match="this one could not: replay-declined"):
        joint.compare()
    assert joint.ran == []


@pytest.mark.parametrize("number", [1, 2, 5, sum(RUNS) + 1])
def test_what_raises_when_runs_are_judged_ends_none_of_them(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Such as a lack of memory: nothing is sent for it, and other ranks go on."""
    asked: list[int] = []

    def short(*facts: Any) -> Any:
        asked.append(len(asked) + 1)
        if asked[-1] == number:
            raise torch.OutOfMemoryError("as asked")
        return distance(*facts)

    monkeypatch.setattr(judge_module, "distance", short)
    joint = Joint(1.0, RIGHT)
    found = joint.compare()
    assert joint.ran == [*EVERYTHING, "answer"]
    assert found is not None
    assert found.refusal is not None
    assert found.refusal.reason == "out-of-memory"


@pytest.mark.parametrize(
    ("tensors", "scale", "told", "reason"),
    [
        (5, 1.0, "rounds", None),
        (4, 0.0, "rounds", None),
        (4, 1.0, "rounds", "comparison-budget"),
        (3, 1.0, None, "comparison-budget"),
    ],
)
def test_a_rank_without_memory_for_all_runs_says_so_before(
    tensors: int, scale: float, told: str | None, reason: str | None
) -> None:
    """Copies of what a call writes as it was, and as a replay and two runs left it; and results of the replay, where
    bits do not tell."""
    joint = Joint(scale, RIGHT, spare=tensors * 4 * SIZE)
    found = joint.compare()
    assert (joint.told, joint.ran[-1]) == ([told], "answer")
    assert found is not None
    assert (found.refusal and found.refusal.reason) == reason
    assert (len(joint.ran) == 1) == (told is None)


def test_all_runs_of_ranks_are_not_alive_together() -> None:
    joint = Joint(1.0, RIGHT)
    assert joint.compare() is not None
    first, reference = 1, 1
    assert joint.alive == [0, first, *[first + reference] * (len(EVERYTHING) - 2), first]


def test_ranks_make_the_same_runs_though_a_replay_returns_something_else() -> None:
    joint = Joint(1.0, RIGHT, more=1)
    found = joint.compare()
    assert joint.ran == [*EVERYTHING, "answer"]
    assert found is not None
    assert found.refusal is not None
    assert (found.refusal.reason, found.refusal.detail) == ("comparison-failed", "replayed: 2 outputs instead of 1")


def test_the_answering_run_may_be_the_one_that_differs() -> None:
    """Then the replay is the odd one of both."""
    found = Joint(0.0, RIGHT, answer_off=1e-7).compare()
    assert found is not None
    assert found.refusal is not None
    assert found.refusal.reason == "odd-replay"


@pytest.mark.parametrize("raises", [False, True])
def test_runs_of_all_ranks_draw_as_one(raises: bool) -> None:
    """The generator advances by the draws of one call, whatever is run besides; other runs draw other numbers."""
    joint = Joint(0.0, RIGHT, raises=ArithmeticError("as asked") if raises else None, draws=True)
    torch.manual_seed(5)
    torch.rand(SIZE)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = joint.compare()
    assert torch.equal(torch.rand(3), expected)
    assert joint.ran == [*EVERYTHING, "answer"]
    assert raises or (found is not None and found.refusal is None)


@pytest.mark.parametrize(
    ("scale", "replay", "reason"),
    [
        (1.0, RIGHT, None),
        (0.0, RIGHT, None),
        (0.0, WRONG, "odd-replay"),
        (0.0, NEAR, "odd-replay"),
        (1.0, WRONG, "odd-replay"),
    ],
)
def test_a_first_replay_that_draws_is_held_against_the_answer(scale: float, replay: float, reason: str | None) -> None:
    """The other runs draw other numbers."""
    found = Joint(scale, replay, draws=True).compare()
    assert found is not None
    assert (found.refusal and found.refusal.reason) == reason


# -- operators that are written in Python ------------------------------------------------------------------------------

COUNTER = PythonCall("lib.counter.default", ("counter",), "model.py:3")


@pytest.mark.parametrize("nondeterministic", [False, True])
def test_an_operator_that_counts_is_named_and_called_by_each_replay_from_then_on(nondeterministic: bool) -> None:
    """A replay repeats the number of the run that was captured, here the first."""
    runs = list[int]()

    def fn(args: list[Any]) -> Sequence[Any]:
        runs.append(1)
        return [args[0] + len(runs)]

    driver = FakeDriver(lambda args: [args[0] + 1])
    driver.python, driver.nondeterministic = (COUNTER,), 1 if nondeterministic else None
    region = Region(fn, driver, name="toy")
    if nondeterministic:
        driver.edits = [lambda capture, n=n: set_number(capture, n) for n in (2, 3)]
    outputs = [float(region([torch.zeros(1)])[0]) for _ in range(4)]
    assert outputs == [1, 2, 3, 4], "each call ran once"
    reason = "unstable-number" if nondeterministic else "stateful-operator"
    refusal = region.record.refusals[reason]
    assert (refusal.nodes, refusal.operators) == (("counter",), ("lib.counter.default",))
    assert region.record.eager_since == {"lib.counter": str(refusal)}
    assert driver.eager[-1] == ("lib.counter",)
    assert region.record.replays == 0


@pytest.mark.parametrize("whole", [False, True])
def test_an_operator_that_counts_is_named_though_results_vary(whole: bool) -> None:
    """Integers that count differ in another uncaptured run, too; other numbers, in a replay twice in a row."""
    runs, draw = count(), noise(3)

    def fn(args: list[Any]) -> Sequence[Any]:
        return [args[0] + 1e-3 * draw(SIZE), torch.tensor(next(runs) if whole else 1.0)]

    driver = FakeDriver(lambda args: [args[0] + 1e-3 * draw(SIZE), torch.tensor(0 if whole else 2.0)])
    driver.python, driver.nondeterministic, driver.random = (COUNTER,), 2, False
    region = Region(fn, driver, name="toy")
    for call in range(8):
        region([torch.ones(SIZE) + call])
    assert region.record.eager_since.keys() == {"lib.counter"}


@pytest.mark.parametrize("counts", [False, True])
def test_a_number_that_an_operator_gave_to_aten_is_told_from_bytes_that_nobody_set(counts: bool) -> None:
    """Two captures differ in a word. By what the body called, that is its number, or bytes that nobody set."""
    driver = FakeDriver()

    def edit(capture: Capture, n: int) -> None:
        set_number(capture, n)
        calls = (f"aten.add.Tensor(tensor, {n if counts else 1})",)
        driver.python = (replace(COUNTER, calls=calls, explained=(range(1),)),)

    driver.edits = [lambda capture, n=n: edit(capture, n) for n in (2, 3)]
    region = Region(lambda args: [args[0] + 1], driver, name="toy")
    for _ in range(4):
        region([torch.zeros(1)])
    assert region.record.replays == (0 if counts else 2)
    said = "calls aten.add.Tensor(tensor, 2), then aten.add.Tensor(tensor, 3)"
    assert (said in str(region.record.refusals.get("unstable-number"))) == counts


def set_number(capture: Capture, number: int) -> None:
    """Give the launch a word more, which is no address."""
    launch = capture.launches[0]
    capture.launches[0] = replace(launch, words=(*launch.words, number), uses=None)
