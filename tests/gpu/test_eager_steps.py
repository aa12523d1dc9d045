"""Eager steps on a device: once a call, in the order of the stream and of the generator, with memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pygraph
from pygraph.runtime.contract import Driver
from pygraph.runtime.region import Region, RegionOptions

Function = Callable[[list[Any]], Sequence[Any]]

CALLS = 6
runs: list[torch.Tensor] = []


def _keeps(x: torch.Tensor) -> torch.Tensor:
    runs.append(x)
    return x + len(runs)


def _waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x * (2.0 if float(x.sum()) < 1e30 else 3.0)


def _aside(x: torch.Tensor) -> torch.Tensor:
    """Computes on a stream of its own, which the caller's stream waits for."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        y = x * 2
    current.wait_stream(side)
    y.record_stream(current)
    return y


_library = torch.library.Library("pygraph_eager_gpu", "DEF")
for _schema, _run, _fake in (
    ("keeps(Tensor x) -> Tensor", _keeps, torch.empty_like),
    ("waits(Tensor x) -> Tensor", _waits, torch.empty_like),
    ("aside(Tensor x) -> Tensor", _aside, torch.empty_like),
    ("noise(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x), torch.empty_like),
    ("turned(Tensor x) -> Tensor", lambda x: (x * 3).t().contiguous().t(), torch.empty_like),
    ("add_into(Tensor(a!) x, Tensor y) -> ()", lambda x, y: [x.add_(y)].clear(), lambda x, y: None),
    ("rows(Tensor(a) x, int n) -> Tensor(a)", lambda x, n: x[n:], lambda x, n: x[n:]),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))
    _library.impl(_name, _run, "CUDA")
    _library.impl(_name, _fake, "Meta")
ops = torch.ops.pygraph_eager_gpu


def randn(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda")


def check(fn: Function, make: Callable[[], list[Any]], driver: Driver, **options: Any) -> Region:
    """A region around ``fn`` does what ``fn`` does, call by call: outputs, arguments, draws."""
    found: list[list[Any]] = []
    region = Region(fn, driver, name="toy", options=RegionOptions(**options))
    with torch.no_grad():
        for run in (fn, region):
            torch.manual_seed(0)
            runs.clear()
            results: list[Any] = []
            for _ in range(CALLS):
                args = make()
                outputs = run(list(args))
                results.append(([t.clone() for t in (*outputs, *args)], torch.cuda.get_rng_state()))
            found.append(results)
    for call, (expected, ours) in enumerate(zip(*found, strict=True)):
        for number, (a, b) in enumerate(zip(expected[0], ours[0], strict=True)):
            assert torch.equal(a, b), f"call {call}, tensor {number}: {region.record}"
        assert torch.equal(expected[1], ours[1]), f"call {call}: the generator"
    assert region.record.replays == CALLS - 2, region.record
    return region


@pytest.mark.parametrize("options", [{}, {"verify_every": 1}])
def test_memory_that_an_operator_keeps_and_how_often_it_runs(driver: Driver, options: dict[str, Any]) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        hidden = torch.mm(x, x)
        for _ in range(3):
            hidden = torch.tanh(torch.mm(ops.keeps(hidden), x))
        return [hidden]

    kept: list[torch.Tensor] = []
    region = check(fn, lambda: [randn(64, 64)], driver, **options)
    assert len(runs) == 3 * CALLS
    kept = [memory.clone() for memory in runs]
    with torch.no_grad():
        for _ in range(3):
            region([randn(64, 64)])
    assert all(torch.equal(memory, copy) for memory, copy in zip(runs, kept, strict=False))
    assert region.record.segments == 4


@pytest.mark.parametrize("name", ["waits", "aside", "turned"])
def test_order_on_streams_and_layouts(driver: Driver, name: str) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, w = args
        args.clear()
        hidden = x
        for _ in range(4):
            hidden = torch.tanh(torch.mm(getattr(ops, name)(torch.mm(hidden, w)), w))
        return [hidden, x.sum(0)]

    check(fn, lambda: [randn(512, 512), randn(512, 512) / 20], driver)


def test_mutation_of_intermediates_and_arguments(driver: Driver) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        hidden = torch.relu(x)
        ops.add_into(hidden, y)
        ops.add_into(x, hidden)
        ops.add_into(y[1:], x[:-1])
        part = ops.rows(hidden, 2)
        part.mul_(2)
        return [torch.mm(hidden, y), part + 1, torch.relu(x)]

    check(fn, lambda: [randn(64, 64), randn(64, 64)], driver)


@pytest.mark.parametrize("options", [{}, {"verify_every": 1}])
def test_draws_come_in_program_order(driver: Driver, options: dict[str, Any]) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        first = x + torch.rand(64, device="cuda")
        second = ops.noise(first)
        third = second + torch.rand(64, device="cuda")
        fourth = ops.noise(third)
        return [first, second, third, fourth, fourth * torch.randn(64, device="cuda")]

    check(fn, lambda: [randn(64)], driver, **options)


def test_draws_of_calls_alone_and_before_the_first_launch_that_draws(driver: Driver) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        first = ops.noise(x)
        second = torch.relu(first)
        return [first, ops.noise(second) + torch.rand(64, device="cuda")]

    check(fn, lambda: [randn(64)], driver)


def test_an_operator_in_the_middle_of_each_layer_is_one_region() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.relu(ops.waits(torch.tanh(x @ w)) @ w)
        return x.sum(0)

    torch._dynamo.reset()
    pygraph.reset()
    ours, w = torch.compile(model, backend="pygraph"), randn(64, 64) / 8
    with torch.no_grad():
        for _ in range(CALLS):
            x = randn(32, 64)
            torch.testing.assert_close(ours(x, w), model(x, w))
    (report,) = pygraph.reports()
    (region,) = report.regions
    assert region.state == "replay", report.notes
    assert region.record is not None
    assert (region.record.segments, [call.count for call in region.record.eager]) == (6, [5])
    assert {u.reason for u in report.uncaptured()} == {"cudagraph-unsafe-tag"}
