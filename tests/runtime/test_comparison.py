"""Comparison before the first replay, and of every replay where that is asked for: every wrong replay is found out, and
no caller's tensor notices."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pygraph.errors import ReplayError
from pygraph.program.recording import Output, OutputKind
from pygraph.runtime.compare import observe
from pygraph.runtime.contract import ScratchPool
from pygraph.runtime.judge import RUNS
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.fake import FakeDriver

Function = Callable[[list[Any]], Sequence[Any]]


def mixed(args: list[Any]) -> Sequence[Any]:
    """Fresh outputs (two in one storage), a view, an argument, a scalar; the second argument is mutated."""
    x, state, n = args
    args.clear()
    state.mul_(2).add_(x)
    both = torch.stack((x + n, state))
    return [both[0], both[1], state[1:], state, n, None]


class Case:
    """A region about to be captured; replays compute ``kernel``."""

    def __init__(
        self, kernel: Function | None, fn: Function = mixed, written: Sequence[int] | None = (1,), **options: Any
    ) -> None:
        self.driver = FakeDriver(kernel, written)
        self.fn = fn
        self.region = Region(fn, self.driver, name="toy", options=RegionOptions(**options))
        self.state = torch.arange(4.0)
        self.reference = torch.arange(4.0)
        self.call()

    def call(self) -> None:
        """One call, whose results, mutation and random state must be those of one uncaptured run."""
        x = torch.full((4,), 0.5)
        before = torch.get_rng_state()
        expected = list(self.fn([x.clone(), self.reference, 3]))
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        outputs = list(self.region([x, self.state, 3]))
        assert torch.equal(torch.get_rng_state(), after)
        assert x.tolist() == [0.5] * 4
        for out, want in zip([self.state, *outputs], [self.reference, *expected], strict=True):
            assert torch.equal(out, want) if isinstance(want, torch.Tensor) else out == want

    @property
    def reason(self) -> str | None:
        return self.region.record.reason


def test_the_replay_ran_on_other_addresses_with_the_same_layout() -> None:
    """And what it returns may hold NaNs."""
    seen: list[Any] = []

    def look(args: list[Any]) -> Sequence[Any]:
        seen.append([(a.data_ptr(), a.stride(), a.data_ptr() % 64, float(a.sum())) for a in args])
        base, view, same = args
        return [base + view.sum(), same, base / 0 * 0]

    base = torch.arange(32.0)
    case = Region(look, FakeDriver(None, (0,)), name="toy")
    for _ in range(2):
        case([base[4:], base[6:14:2], base[4:]])
    _, replayed, real = seen
    assert [r[1:] for r in replayed] == [r[1:] for r in real]
    assert {r[0] for r in replayed}.isdisjoint(r[0] for r in real)
    assert replayed[1][0] - replayed[0][0] == real[1][0] - real[0][0]
    assert case.record.captures == 1


def wrong_byte(args: list[Any]) -> Sequence[Any]:
    outputs = list(mixed(args))
    outputs[1].view(torch.uint8)[9] ^= 1
    return outputs


def _draws(args: list[Any]) -> Sequence[Any]:
    torch.rand(1)
    return mixed(args)


def _raises(args: list[Any]) -> Sequence[Any]:
    args[1].zero_()
    torch.rand(1)
    raise RuntimeError("launch failed")


def _no_mutation(args: list[Any]) -> Sequence[Any]:
    x, state, n = args
    return mixed([x, state.clone(), n])


def _spoiled(spoil: Callable[[list[Any], list[Any]], Any]) -> Function:
    """A kernel whose arguments and outputs ``spoil`` changes afterwards."""

    def kernel(args: list[Any]) -> Sequence[Any]:
        given = list(args)
        outputs = list(mixed(args))
        spoil(given, outputs)
        return outputs

    return kernel


def beside(tensor: torch.Tensor, at: int) -> torch.Tensor:
    """The memory at an index that the tensor does not have."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + at)


def _set(index: int, change: Callable[[Any], Any]) -> Function:
    """A kernel that returns something else at one place."""
    return _spoiled(lambda given, outputs: outputs.__setitem__(index, change(outputs[index])))


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (wrong_byte, "output 1 has other values"),
        (_spoiled(lambda given, outputs: given[1][3].add_(1)), "output 2 has other values"),
        (_no_mutation, "output 2"),
        (_spoiled(lambda given, outputs: given[0][0].fill_(9)), "an argument is written"),
        (_set(0, lambda out: torch.stack((out, out), 1)[:, 0]), "output 0 is"),
        (_set(0, lambda out: out.double()), "output 0 is"),
        (_set(1, lambda out: out.clone()), "output 1 is"),
        (_set(2, lambda out: out.clone()), "output 2 is"),
        (_set(3, lambda out: out.view(4)), "output 3 is"),
        (_set(4, lambda out: True), "output 4 is"),
        (_spoiled(lambda given, outputs: beside(given[1], 4).fill_(7)), "bytes beside an argument were written"),
        (_spoiled(lambda given, outputs: beside(given[1], -1).fill_(7)), "bytes beside an argument were written"),
        (_raises, "RuntimeError: launch failed"),
    ],
)
def test_a_wrong_replay_is_refused_and_named(kernel: Function, words: str) -> None:
    case = Case(kernel)
    case.call()
    assert case.reason is not None
    assert case.reason.startswith("replay-raised: " if kernel is _raises else "comparison-failed: replayed: ")
    assert words in case.reason
    assert case.driver.executables[0].closed
    case.call()
    assert case.region.record.replays == 0


def test_a_replay_that_draws_otherwise_is_refused_this_time() -> None:
    case = Case(_draws)
    case.call()
    assert case.reason == "random-state: the random state afterwards is another one"
    case.driver.kernel = None
    for _ in range(5):
        case.call()
    assert case.region.record.replays > 0


def test_a_write_that_the_replay_leaves_out_is_refused_although_no_launch_admits_it() -> None:
    def touch(args: list[Any]) -> Sequence[Any]:
        args[1].add_(1)
        return [args[0] + 1]

    region = Region(touch, FakeDriver(lambda args: [args[0] + 1], ()), name="toy")
    state = torch.zeros(4)
    for _ in range(3):
        region([torch.ones(4), state])
    assert state.tolist() == [3.0] * 4
    assert region.record.reason is not None
    assert region.record.reason.startswith("comparison-failed: an argument is written")


def test_random_state_is_that_of_one_run_after_a_wrong_replay_too() -> None:
    def draw(args: list[Any]) -> Sequence[Any]:
        return [*mixed(args), torch.rand(3)]

    case = Case(lambda args: [*mixed(args), torch.rand(3) + 1], fn=draw)
    case.call()
    assert case.reason is not None
    assert "output 6 has other values" in case.reason


def test_over_budget_only_written_arguments_are_copied() -> None:
    addresses: list[tuple[int, int]] = []

    def look(args: list[Any]) -> Sequence[Any]:
        addresses.append((args[0].data_ptr(), args[1].data_ptr()))
        args[1].add_(1)
        return [args[0].sum()]

    big, small = torch.ones(1000), torch.zeros(4)
    driver = FakeDriver(written=(1,))
    driver.spare = 100
    region = Region(look, driver, name="toy")
    for _ in range(2):
        region([big, small])
    replayed, real = addresses[1:]
    assert replayed[0] == real[0]
    assert replayed[1] != real[1]
    assert region.record.captures == 1


@pytest.mark.parametrize("always", [False, True])
def test_over_budget_even_so_is_refused_or_runs_uncaptured(always: bool) -> None:
    case = Case(None, verify_every=int(always))
    if always:
        case.call()
    case.driver.spare = 31
    case.call()
    refusal = case.region.record.refusals["unverified" if always else "comparison-budget"]
    assert "exceed 31 bytes" in str(refusal)
    assert case.region.record.replays == 0
    assert case.driver.executables[0].replays == always, "the one that was compared before"


def test_damage_to_an_argument_read_in_place_is_said() -> None:
    def kernel(args: list[Any]) -> Sequence[Any]:
        args[0][5] = 0
        return [args[0].sum()]

    driver = FakeDriver(kernel)
    driver.spare = 100
    region = Region(lambda args: [args[0].sum()], driver, name="toy")
    region([torch.ones(1000)])
    with pytest.raises(ReplayError, match="only reads"):
        region([torch.ones(1000)])
    assert region.record.state == "uncaptured"


@pytest.mark.parametrize("room", [True, False])
def test_only_the_run_that_answers_uses_memory_that_is_kept(room: bool) -> None:
    """Unless there is no room for transient memory: then ordinary memory is used."""
    driver, within = FakeDriver(written=(1,)), list[bool]()

    def look(args: list[Any]) -> Sequence[Any]:
        within.append(driver.within)
        if driver.within and not room:
            raise torch.OutOfMemoryError("out of memory\nmore")
        args[1].add_(1)
        return [args[0].sum()]

    region = Region(look, driver, name="toy")
    for _ in range(3):
        region([torch.ones(4), torch.zeros(4)])
    again = [] if room else [False]
    assert within == [False, True, *again, False, False], "uncaptured; replayed, uncaptured; replayed"
    assert (region.record.captures, region.record.replays, driver.given_back) == (1, 1, 1)


def test_results_that_bits_decide_take_no_room() -> None:
    """Here, a view of a small argument, whose copy shares memory with that of a large one."""
    own = torch.Generator().manual_seed(0)

    def look(args: list[Any]) -> Sequence[Any]:
        small, large = args
        return [small + large.sum() + torch.rand(4, generator=own) / 1000, small[1:]]

    driver = FakeDriver()
    driver.nondeterministic, driver.random, driver.spare = 1, False, 5000
    driver.edits = [lambda capture: capture.outputs.append(Output(OutputKind.VIEW, 0))] * 3
    region = Region(look, driver, name="toy")
    for _ in range(2):
        region([torch.ones(4), torch.ones(1000)])
    assert region.record.captures == 1, region.record


@pytest.mark.parametrize("dtype", [torch.bool, torch.int4])
def test_arguments_may_hold_any_bytes(dtype: torch.dtype) -> None:
    region = Region(lambda args: [args[1] * 2], FakeDriver(), name="toy")
    odd = torch.tensor([1, 0, 2, 255], dtype=torch.uint8).view(dtype)
    for _ in range(2):
        region([odd, torch.ones(4)])
    assert region.record.captures == 1, region.record


def test_nothing_of_a_comparison_outlives_its_memory() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watching(FakeDriver):
        @contextlib.contextmanager
        def scratch_pool(self, args: Sequence[Any]) -> Iterator[ScratchPool]:
            with super().scratch_pool(args) as transient:
                yield transient
            assert not [ref for ref in alive if ref() is not None]

    driver = Watching(written=(1,))

    def look(args: list[Any]) -> Sequence[Any]:
        outputs = [args[0] + torch.rand((), generator=own), args[1].add_(1)]
        if driver.within:
            alive.extend(weakref.ref(tensor) for tensor in (*args, *outputs))
        return outputs

    def wrong(args: list[Any]) -> Sequence[Any]:
        first, second = look(args)
        return [first + 100, second]

    own = torch.Generator().manual_seed(0)
    driver.nondeterministic, driver.random = 2, False
    for kernel in (look, wrong):
        region = Region(look, driver, name="toy")
        driver.kernel = kernel
        for _ in range(2):
            region([torch.ones(64), torch.zeros(4)])
        assert bool(region.record.captures) == (kernel is look), region.record
    assert driver.given_back == 2
    replays_and_runs = (1 + RUNS[0]) + (1 + sum(RUNS))
    assert len(alive) == replays_and_runs * 4, "two regions, the second of which is wrong; two arguments, two outputs"


# -- of every replay ---------------------------------------------------------------------------------------------------


def test_verify_always_compares_each_call() -> None:
    case = Case(None, verify_every=1)
    for _ in range(4):
        case.call()
    assert case.region.record.replays == 3
    case.driver.kernel = wrong_byte
    with pytest.raises(
        ReplayError, match=r"region toy: a replay differs from an uncaptured run: replayed: output 1 has other values"
    ):
        case.region([torch.ones(4), torch.ones(4), 3])
    assert case.region.record.state == "uncaptured"


@pytest.mark.parametrize("scalar", [3, 2.5], ids=["shortcut", "floats"])
def test_one_replay_of_many_is_compared(scalar: float) -> None:
    seen, kinds = list[int](), list[bool]()

    def counted(args: list[Any]) -> Sequence[Any]:
        seen.append(1)
        return mixed(args)

    case = Case(mixed, counted, verify_every=5)

    def call(region: Region) -> None:
        before = len(seen)
        region([torch.ones(4), torch.ones(4), scalar])
        kinds.append(len(seen) > before)

    while not case.region.record.captures:
        call(case.region)
    kinds.clear()
    for _ in range(15):
        call(case.region)
    assert kinds == [False, False, False, False, True] * 3
    assert case.region.record.replays == 15
    case.driver.kernel = wrong_byte
    for _ in range(4):
        call(case.region)
    with pytest.raises(ReplayError, match="a replay differs from an uncaptured run"):
        call(case.region)
    assert case.region.record.state == "uncaptured"


@pytest.mark.parametrize("fails", ["replays", "all runs", "comparison"])
def test_verify_always_tells_of_a_call_that_it_could_not_verify(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """It is answered all the same, unless its function raises."""
    failing: list[bool] = []

    def fn(args: list[Any]) -> Sequence[Any]:
        if failing and failing.pop():
            raise MemoryError("short")
        return [args[0] + 1]

    region = Region(fn, FakeDriver(), name="toy", options=RegionOptions(verify_every=1))
    for _ in range(3):
        region([torch.ones(2)])
    assert "unverified" not in region.record.refusals
    failing += [True] * {"replays": 2, "all runs": 3, "comparison": 0}[fails]
    if fails == "comparison":
        broken = Mock(side_effect=MemoryError("short"))
        monkeypatch.setattr("pygraph.runtime.judge.Outcome.drew_otherwise", broken)
    with pytest.raises(MemoryError) if fails == "all runs" else contextlib.nullcontext():
        assert region([torch.ones(2)])[0].tolist() == [2, 2]
        assert "MemoryError" in str(region.record.refusals["unverified"])
    assert region.record.replays == 1


def test_verify_always_tells_calls_of_other_sizes_apart() -> None:
    region = Region(lambda args: [args[0] + 1], FakeDriver(), name="toy", options=RegionOptions(verify_every=1))
    for size in (2, 3, 2, 3, 2, 3):
        assert region([torch.ones(size)])[0].tolist() == [2.0] * size
    assert (region.record.captures, region.record.replays, region.record.refusals) == (2, 2, {})


@pytest.mark.parametrize(
    ("size", "stride", "other", "same"),
    [((1, 3), (3, 1), (9, 1), True), ((0, 3), (1, 1), (1, 3), True), ((2, 3), (3, 1), (1, 2), False)],
)
def test_strides_count_where_they_lead_to_elements(size: Any, stride: Any, other: Any, same: bool) -> None:
    found = [observe([torch.empty_strided(size, each).fill_(0)], []) for each in (stride, other)]
    assert (found[0].structure == found[1].structure) is same


@pytest.mark.parametrize("mark", [torch.conj, torch._neg_view])
def test_an_output_that_is_a_lazy_view_is_another(mark: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Though it has the same bytes."""
    plain = torch.randn(4, dtype=torch.complex64)
    marked = mark(plain)
    assert marked.data_ptr() == plain.data_ptr()
    difference = observe([plain], []).other_structure(observe([marked], []))
    assert difference is not None
    assert "output 0" in difference
