"""Every replay compared with an uncaptured run, where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pygraph.errors import ReplayError
from pygraph.runtime.region import Region, RegionOptions, counts
from tests.runtime.fake import FakeDriver
from tests.runtime.test_comparison import Case, wrong_byte
from tests.runtime.test_unsteady import noise, unsteady_region


def test_verify_always_compares_each_call() -> None:
    case = Case(None, verify_always=True)
    for _ in range(4):
        case.call()
    assert case.region.record.replays == 3
    case.driver.kernel = wrong_byte
    with pytest.raises(
        ReplayError, match=r"region toy: a replay differs from an uncaptured run: output 1 has other values"
    ):
        case.region([torch.ones(4), torch.ones(4), 3])
    assert case.region.record.state == "uncaptured"


def test_verify_always_lets_the_functions_own_error_through() -> None:
    def fragile(args: list[Any]) -> Sequence[Any]:
        x = args[0]
        args.clear()
        if float(x[0]) < 0:
            raise ValueError("negative")
        return [x + torch.rand(2)]

    region = Region(fragile, FakeDriver(), name="toy", options=RegionOptions(verify_always=True))
    for _ in range(3):
        region([torch.ones(2)])
    with pytest.raises(ValueError, match="negative"):
        region([-torch.ones(2)])
    assert region.record.replays == 1


def test_verify_always_without_room_runs_uncaptured() -> None:
    case = Case(None, verify_always=True)
    case.call()
    case.driver.spare = 0
    case.call()
    assert case.region.record.replays == 0
    assert "exceed 0 bytes" in str(case.region.record.refusals["unverified"])


@pytest.mark.parametrize("when", ["uncaptured", "compared"])
def test_verify_always_counts_the_calls_that_it_could_not_verify(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    counts.clear()
    failing: list[int] = []

    def fn(args: list[Any]) -> Sequence[Any]:
        if failing and failing.pop():
            raise MemoryError("short")
        return [args[0] + 1]

    region = Region(fn, FakeDriver(), name="toy", options=RegionOptions(verify_always=True))
    for _ in range(3):
        region([torch.ones(2)])
    assert "unverified" not in region.record.refusals
    failing.extend([0, 1] if when == "uncaptured" else [])
    if when == "compared":
        monkeypatch.setattr("pygraph.runtime.compare._Outcome.drew_otherwise", fn_that_raises)
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert counts["refused.unverified"] == 1
    assert "MemoryError" in str(region.record.refusals["unverified"])
    assert region.record.replays == (2 if when == "compared" else 1)


def fn_that_raises(*_: Any, **__: Any) -> Any:
    raise MemoryError("short")


def noisy_region() -> tuple[Region, FakeDriver]:
    """A captured region that is off by up to a tenth of its argument, and writes another argument."""
    draw = noise(0)

    def fn(args: list[Any]) -> Sequence[Any]:
        x, state = args
        state.add_(1)
        return [x * (10 + draw(64)), x * 2]

    region, driver = unsteady_region(fn, outputs=2, verify_always=True)
    for _ in range(2):
        region([torch.ones(64), torch.zeros(4)])
    assert region.record.captures == 1, region.record
    return region, driver


def test_verify_always_allows_what_uncaptured_runs_differ_by_at_any_magnitude() -> None:
    region, _ = noisy_region()
    state = torch.zeros(4)
    for power in range(-6, 7):
        region([torch.ones(64) * 10.0**power, state])
    assert region.record.replays == 13
    assert state.tolist() == [13.0] * 4


@pytest.mark.parametrize(("index", "off"), [(0, 20), (1, 1e-4)])
def test_verify_always_allows_no_more_than_that(index: int, off: float) -> None:
    region, driver = noisy_region()

    def wrong(args: list[Any]) -> Sequence[Any]:
        outputs = list(region._fn(args))
        outputs[index][3] += off
        return outputs

    driver.kernel = wrong
    with pytest.raises(ReplayError, match=f"region toy: .*output {index} is off by"):
        region([torch.ones(64), torch.zeros(4)])


def test_verify_always_sees_what_no_tolerance_is_for() -> None:
    region, driver = noisy_region()
    driver.kernel, driver.random = lambda args: [*region._fn(args), torch.rand(1)][:2], True
    with pytest.raises(ReplayError, match="the random state afterwards is another one"):
        region([torch.ones(64), torch.zeros(4)])
