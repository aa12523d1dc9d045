"""Conditional nodes: loops and branches that the device runs, with addresses that move, against loops of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.loops import LoopPasses, looped
from pygraph.program.recording import LaunchKind
from pygraph.runtime.contract import Driver
from pygraph.runtime.discover import Captured, capture
from tests.runtime.host.test_nested import doubles


def iteration(args: list[Any]) -> Sequence[Any]:
    """Kernels, a product of a library's, a copy and a fill."""
    x, w, control = args
    args.clear()
    x.copy_(torch.tanh(torch.mm(x, w)) + torch.sin(w))
    filled = torch.zeros_like(x)
    x.add_(filled)
    control[2:].copy_(x.max().reshape(1) > 5)
    return []


def given(count: int, stop: int = 0) -> list[Any]:
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    return [x, w, torch.tensor([0, count, stop], device="cuda")]


def expected(args: Sequence[Any], once: Any = iteration) -> Any:
    """First argument as a loop of the host leaves it."""
    args = [arg.clone() for arg in args]
    control = args[-1]
    while control[0] < control[1] and not control[2]:
        once(list(args))
        control[0] += 1
    return args[0]


def captured(driver: Driver, fn: Any, args: Sequence[Any], control: int, order: str = "program") -> Captured:
    fn([arg.clone() for arg in args])
    torch.cuda.synchronize()
    found = capture(fn, driver, list(args), None, (), order, LoopPasses(control))
    assert isinstance(found, Captured), found
    return found


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_a_loop_runs_as_often_as_it_is_told_at_any_address(driver: Driver, order: str) -> None:
    made = captured(driver, iteration, given(3), 2, order)
    held = []
    for count, stop in ((3, 0), (1, 0), (0, 0), (2, 0), (5, 1), (-4, 0), (100, 0)):
        args = given(count, stop)
        held.append(args)
        right = expected(args)
        assert made.executable.replay(list(args)) == []
        assert torch.equal(args[0], right)
        assert args[2].tolist() == [max(count, 0) * (not stop), count, stop]


def test_a_loop_ends_where_its_body_says_so(driver: Driver) -> None:
    made = captured(driver, doubles, [torch.ones(1, device="cuda"), torch.tensor([0, 9, 0], device="cuda")], 1)
    for count, end, ran in ((9, 64, 6), (6, 64, 6), (5, 32, 5)):
        x, control = torch.ones(1, device="cuda"), torch.tensor([0, count, 0], device="cuda")
        made.executable.replay([x, control])
        assert (x.item(), control.tolist()) == (end, [ran, count, int(end > 60)])


def test_replays_in_flight_do_not_share_anything(driver: Driver) -> None:
    made = captured(driver, iteration, given(3), 2)
    rounds = [given(count) for count in (50, 3, 0, 20)]
    right = [expected(args) for args in rounds]
    torch.cuda.synchronize()
    for args in rounds:
        made.executable.replay(list(args))
    for args, one in zip(rounds, right, strict=True):
        assert torch.equal(args[0], one)


@pytest.mark.parametrize("bodies", [1, 2])
def test_a_branch_runs_one_of_its_bodies(driver: Driver, bodies: int) -> None:
    def halved(args: list[Any]) -> Sequence[Any]:
        x, _, control = args
        args.clear()
        torch.mul(x, 0.5, out=x)
        control.clone()
        return []

    both_captured = [captured(driver, fn, given(3), 2, "dependences") for fn in (iteration, halved)]
    then, other = (each.program for each in both_captured)  # nodes are copied from graphs that they own
    (launch,) = then.recording.launches
    both = (*launch.bodies, *other.recording.launches[0].bodies)
    branch = replace(launch, kind=LaunchKind.IF, bodies=both[:bodies])
    made = driver.instantiate(replace(then, recording=replace(then.recording, launches=(branch,))))
    for holds in (True, False, True):
        args = given(1)
        kept = args[0] * 0.5 if bodies == 2 else args[0].clone()
        right = expected(args) if holds else kept
        args[2][0] = holds
        assert made.replay(list(args)) == []
        assert torch.equal(args[0], right)


def test_a_loop_within_a_loop(driver: Driver) -> None:
    def step(args: list[Any]) -> Sequence[Any]:
        x, _, inner = args
        args.clear()
        x.add_(1)
        inner.clone()
        return []

    def args_of() -> list[Any]:
        counts = (torch.tensor([0, outer, 0], device="cuda") for outer in (4, 3))
        return [torch.zeros(1, device="cuda"), *counts]

    inside = captured(driver, step, args_of(), 2, "dependences")
    made = driver.instantiate(looped(inside.program, 1))
    x, outer, inner = args_of()
    made.replay([x, outer, inner])
    assert (x.item(), outer.tolist(), inner.tolist()) == (3, [4, 4, 0], [3, 3, 0])  # nobody sets the inner count back


def drawing(args: list[Any]) -> Sequence[Any]:
    x, control = args
    args.clear()
    x.add_(torch.rand_like(x)).mul_(torch.bernoulli(torch.full_like(x, 0.5)) + 1)
    control.clone()
    return []


def drawn(count: int) -> list[Any]:
    return [torch.zeros(1000, device="cuda"), torch.tensor([0, count, 0], device="cuda")]


def test_random_numbers_are_those_of_the_host(driver: Driver) -> None:
    made = captured(driver, drawing, drawn(3), 1)
    for count in (3, 1, 0, 20):
        torch.manual_seed(count)
        right = expected(drawn(count), drawing)
        after = torch.rand(4, device="cuda")
        torch.manual_seed(count)
        args = drawn(count)
        assert made.executable.replay(list(args)) == []
        assert torch.equal(args[0], right)
        assert torch.equal(torch.rand(4, device="cuda"), after)


def test_a_loop_within_a_loop_that_draws_needs_the_host(driver: Driver) -> None:
    inner = captured(driver, drawing, drawn(3), 1, "dependences")
    with pytest.raises(CaptureError, match="draws random numbers") as caught:
        driver.instantiate(looped(inner.program, 1))
    assert caught.value.reason == "host-loop"
