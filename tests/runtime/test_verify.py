"""Every replay compared with an uncaptured run, where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pygraph.errors import ReplayError
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.region import Region
from tests.runtime.fake import FakeDriver
from tests.runtime.test_comparison import Case, jitter, wrong_byte


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
    case.region._options = RegionOptions(verify_always=True, comparison_budget=0)
    case.call()
    assert case.region.record.replays == 0


def test_verify_always_holds_non_deterministic_regions_to_the_tolerance() -> None:
    options = RegionOptions(verify_always=True)
    region = Region(jitter(1e-6), FakeDriver(written=(1,)), name="toy", options=options)
    state = torch.zeros(4)
    for _ in range(4):
        region([torch.ones(4), state, 3])
    assert region.record.replays == 2
    assert state.tolist() == [4.0] * 4
