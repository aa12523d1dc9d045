"""Custom operators with a state of their own: they run once for each call, as they do uncaptured."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from tests.small import UNFUSED

pytestmark = pytest.mark.usefixtures("fresh")

EVERYTHING = {"passes": "legality,placement,partitioning,indirection", **UNFUSED}
CALLS = 8

_library = torch.library.Library("pygraph_custom", "DEF")
_runs: list[str] = []


@torch.library.custom_op("pygraph_custom::counter", mutates_args=())
def counter(x: torch.Tensor) -> torch.Tensor:
    _runs.append("counter")
    return x + len(_runs)


@counter.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_custom::chance", mutates_args=("x",))
def chance(x: torch.Tensor) -> None:
    x.mul_(random.random())


def _accumulate(x: torch.Tensor) -> torch.Tensor:
    _total.add_(x)
    return _total.clone()


_total = torch.zeros(4)
_library.define("accumulate(Tensor x) -> Tensor")
_library.impl("accumulate", _accumulate, "CPU")
_library.impl("accumulate", lambda x: torch.empty_like(x), "Meta")
_library.define("noise(Tensor x) -> Tensor")
_library.impl("noise", lambda x: x + torch.rand_like(x), "CPU")
_library.impl("noise", lambda x: torch.empty_like(x), "Meta")


def counted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(counter(torch.relu(x) * 2) - 1) + 1


def by_chance(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) * 2
    chance(y)
    return torch.relu(y) + 1


def accumulated(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.ops.pygraph_custom.accumulate(torch.relu(x) * 2)) + 1


@pytest.mark.parametrize("fn", [counted, by_chance, accumulated])
def test_an_operator_with_a_state_runs_once_a_call(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ours = torch.compile(fn, backend="pygraph", options=EVERYTHING)
    found: list[list[torch.Tensor]] = []
    for run in (fn, ours):
        _runs.clear()
        _total.zero_()
        random.seed(0)
        found.append([run(torch.full((4,), float(i))).clone() for i in range(CALLS)])
        assert len(_runs) in (0, CALLS)
    for call, (eager, captured) in enumerate(zip(*found, strict=True)):
        assert torch.equal(eager, captured), f"call {call}: {eager} and {captured}"
    (report,) = pygraph.reports()
    (region,) = report.regions
    assert region.state == "replay", report
    assert region.record is not None
    assert (region.record.segments, [call.count for call in region.record.eager]) == (2, [1])
    (left,) = report.uncaptured()
    assert (left.reason, "pygraph_custom" in left.detail) == ("opaque-operator", True)
    assert left.loc is not None
    assert "test_custom_operators.py" in left.loc


def test_a_region_neither_begins_nor_ends_with_a_call() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x = counter(x)
        x = torch.relu(counter(torch.relu(x) * 2) - 1)
        return counter(x + 1)

    ours = torch.compile(fn, backend="pygraph", options=EVERYTHING)
    found: list[list[float]] = []
    for run in (fn, ours):
        _runs.clear()
        found.append([float(run(torch.full((4,), float(i)))[0]) for i in range(CALLS)])
    assert found[0] == found[1]
    (report,) = pygraph.reports()
    (region,) = report.regions
    assert region.record is not None
    assert report.emitted is not None
    assert report.emitted.outside == ("pygraph_custom.counter.default",) * 2
    assert (region.record.segments, [call.count for call in region.record.eager]) == (2, [1])
    assert [left.reason for left in report.uncaptured()] == ["opaque-operator"] * 3


@pytest.mark.parametrize("second", [counter, torch.rand_like], ids=["operator", "draw"])
def test_operators_and_draws_keep_their_order_where_fewer_regions_are_to_be_had(second: Callable[..., Any]) -> None:
    """No data leads from the first operator to the second draw: a region fewer would be had if they changed places."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x @ x
        first = counter(torch.ops.pygraph_custom.noise(torch.nonzero(hidden).float()))
        total = y @ y + first.sum()
        other = torch.nonzero(y)
        drawn = second(hidden) + hidden
        return total @ total, drawn @ drawn, other

    keep = {"fallback_random": True, "reorder_for_locality": False, "reorder_for_peak_memory": False}
    found: list[list[Any]] = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for run in (
            fn,
            torch.compile(fn, backend="pygraph", options={**EVERYTHING, "inductor": {**UNFUSED["inductor"], **keep}}),
        ):
            _runs.clear()
            torch.manual_seed(0)
            found.append([run(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(CALLS)])
    torch.testing.assert_close(found[1], found[0])
    assert pygraph.counters()["replays"] > 0
