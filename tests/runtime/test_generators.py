"""Random numbers: a region leaves alone what it does not draw from, and undoes nobody else's draws."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pygraph.errors import ReplayError
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region
from tests.runtime.fake import FakeDriver, noisy

Function = Callable[[list[Any]], Sequence[Any]]


def draw() -> int:
    return int(torch.randint(1 << 62, ()))


def test_a_region_that_draws_nothing_touches_no_generator() -> None:
    """While it is captured, compared or run uncaptured, another thread draws, and no number comes twice."""
    drawn: list[int] = []

    class Untouched(HostDriver):
        def exchange_state(self, *_: Any) -> torch.Tensor:
            raise AssertionError("this region draws nothing")

    def fn(args: list[Any]) -> Sequence[Any]:
        thread = threading.Thread(target=lambda: drawn.append(draw()))
        thread.start()
        thread.join()
        return [args[0] * 2]

    region = Region(fn, Untouched(), name="toy")
    for _ in range(4):
        region([torch.ones(4)])
        drawn.append(draw())
    assert region.record.replays == 2, region.record
    assert len(set(drawn)) == len(drawn) == 4 + 2 + 2, "after each call; uncaptured; captured"


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bernoulli": lambda x: torch.bernoulli(x),
    "dropout": lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "normal": lambda x: torch.normal(x, 1.0),
    "poisson": lambda x: torch.poisson(x),
    "randint": lambda x: torch.randint(9, (4,)),
    "randperm": lambda x: torch.randperm(7),
    "uniform": lambda x: torch.rand_like(x),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_region_that_draws_goes_on_as_it_would_uncaptured(name: str) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        return [RANDOM[name](args[0])]

    region, x = Region(fn, HostDriver(), name="toy"), torch.rand(4)
    torch.manual_seed(0)
    expected = [(fn([x])[0], draw()) for _ in range(5)]
    torch.manual_seed(0)
    for value, after in expected:
        assert torch.equal(region([x])[0], value)
        assert draw() == after
    assert region.record.replays == 3, region.record


class Interrupted(FakeDriver):
    """A driver of a region that draws; another thread draws right before a replay is undone, ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.drawn = times, list[int]()

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        if expected is not None and self.times:
            self.times -= 1
            self.drawn.append(draw())
        return super().exchange_state(generator, to, expected)


def test_a_draw_of_another_thread_is_not_undone() -> None:
    driver = Interrupted(times=1)
    region = Region(noisy, driver, name="toy")
    for _ in range(6):
        region([torch.zeros(4)])
        driver.drawn.append(draw())
    assert len(set(driver.drawn)) == len(driver.drawn) == 7
    assert list(region.record.refusals) == ["random-state"]
    assert region.record.replays > 0, "captured later"


def test_a_state_that_cannot_be_brought_back_is_raised() -> None:
    """Else the call would be answered with other numbers."""

    class Failing(FakeDriver):
        def exchange_state(self, *_: Any) -> torch.Tensor:
            raise MemoryError("no room for a state")

    runs: list[int] = []

    def counted(args: list[Any]) -> Sequence[Any]:
        runs.append(1)
        return noisy(args)

    driver = Failing()
    driver.kernel = noisy
    region = Region(counted, driver, name="toy")
    region([torch.zeros(4)])
    with pytest.raises(ReplayError, match="the random state could not be brought back: MemoryError"):
        region([torch.zeros(4)])
    assert len(runs) == 1
    assert region.record.state == "uncaptured"


@pytest.mark.parametrize("disturbed", [False, True])
def test_runs_for_a_spread_draw_apart_from_everybody_else(disturbed: bool) -> None:
    """A region that draws and is non-deterministic besides. Somebody else may draw in one of its runs on copies."""
    own, runs, others = torch.Generator().manual_seed(1), list[int](), list[int]()

    def fn(args: list[Any]) -> Sequence[Any]:
        runs.append(1)
        drawn = torch.rand(64)
        outputs = [args[0] + drawn, args[0] + drawn + 1e-3 * torch.rand(64, generator=own)]
        if disturbed and len(runs) == 5:
            others.append(draw())
        return outputs

    driver = FakeDriver()
    driver.nondeterministic = 2
    region = Region(fn, driver, name="toy")
    found = []
    for run in (lambda: region([torch.zeros(64)]), lambda: torch.rand(64)):
        torch.manual_seed(3)
        found.append([(run(), draw())[1] for _ in range(2)])
    assert found[0] == found[1], "nothing of a comparison is left in the state"
    assert len(others) == disturbed
    assert not set(others) & set(found[0])
    assert list(region.record.refusals) == (["random-state"] if disturbed else [])
    assert region.record.captures == (0 if disturbed else 1)
