"""Random numbers on a device: regions touch the generators that they draw from, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pygraph.runtime.contract import Driver
from pygraph.runtime.region import Region

pytestmark = pytest.mark.usefixtures("fresh")


def plain(args: list[Any]) -> Sequence[Any]:
    return [torch.relu(args[0][:64] @ args[0][:64]).sum(0)]


def drawing(args: list[Any]) -> Sequence[Any]:
    return [torch.relu(args[0]) + torch.rand_like(args[0]), torch.nn.functional.dropout(args[0], 0.5)]


def scattered(args: list[Any]) -> Sequence[Any]:
    """Draws, and adds atomically."""
    x, index = args
    return [torch.zeros(4, x.shape[1], device="cuda").index_add_(0, index, torch.nn.functional.dropout(x, 0.5))]


def states() -> list[torch.Tensor]:
    """Of the CPU's generator, then of each device's."""
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


class Recorded:
    """A driver, and the generators whose states it set."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.touched = driver, list[torch.Generator]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def exchange_state(self, generator: torch.Generator, *states: Any) -> torch.Tensor:
        self.touched.append(generator)
        return self._driver.exchange_state(generator, *states)


@pytest.mark.parametrize("fn", [plain, drawing, scattered])
def test_a_region_goes_on_as_it_would_uncaptured_and_touches_only_the_generators_that_it_draws_from(
    driver: Driver, fn: Callable[[list[Any]], Sequence[Any]]
) -> None:
    noted: Any = Recorded(driver)
    x, index = torch.randn(20000, 64, device="cuda"), torch.randint(0, 4, (20000,), device="cuda")
    args = [x, index] if fn is scattered else [x]
    region, others = Region(fn, noted, name="toy"), states()
    torch.cuda.manual_seed(1)
    expected = []
    for _ in range(5):
        out = fn(list(args))[0]
        expected.append((out, float(torch.rand((), device="cuda"))))
    torch.cuda.manual_seed(1)
    for value, after in expected:
        torch.testing.assert_close(region(list(args))[0], value, rtol=1e-3, atol=1e-2)
        assert float(torch.rand((), device="cuda")) == after
    assert region.record.replays == 3, region.record
    current = torch.cuda.current_device()
    own = set() if fn is plain else {id(torch.cuda.default_generators[current])}
    assert set(map(id, noted.touched)) == own
    for number, (now, then) in enumerate(zip(states(), others, strict=True)):
        assert number == current + 1 or torch.equal(now, then)
