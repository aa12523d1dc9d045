"""Conditional nodes: loops and branches that the device runs, with addresses that move, against loops of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.loops import Looped, looped
from pygraph.program.recording import LaunchKind
from pygraph.runtime.contract import Driver
from pygraph.runtime.discover import Captured, capture


def iteration(args: list[Any]) -> Sequence[Any]:
    """Kernels, a product of a library's, a copy and a fill, so many times as ``left`` says."""
    x, w, left, goes = args
    args.clear()
    x.copy_(torch.tanh(torch.mm(x, w)) + torch.sin(w))
    left.sub_(1)
    goes.zero_()
    goes.logical_or_(left > 0)
    return []


def given(count: int) -> list[Any]:
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    return [x, w, torch.tensor([count], device="cuda"), torch.tensor([count > 0], device="cuda")]


def expected(args: Sequence[Any]) -> Any:
    args = [arg.clone() for arg in args]
    while args[3]:
        iteration(list(args))
    return args[0]


def captured(driver: Driver, fn: Any, args: Sequence[Any], predicate: int, order: str = "program") -> Captured:
    fn([arg.clone() for arg in args])
    torch.cuda.synchronize()
    found = capture(fn, driver, list(args), None, (), order, Looped(predicate))
    assert isinstance(found, Captured), found
    return found


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_a_loop_runs_as_often_as_its_predicate_says_at_any_address(driver: Driver, order: str) -> None:
    made = captured(driver, iteration, given(3), 3, order)
    held = []
    for count in (3, 1, 0, 2, 100):
        args = given(count)
        held.append(args)
        right = expected(args)
        assert made.executable.replay(list(args)) == []
        assert torch.equal(args[0], right)
        assert args[2].item() == 0
        assert not args[3]


def test_replays_in_flight_do_not_share_anything(driver: Driver) -> None:
    made = captured(driver, iteration, given(3), 3)
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
        x, _, left, goes = args
        args.clear()
        torch.mul(x, 0.5, out=x)
        left.sub_(10)
        goes.clone()
        return []

    both_captured = [captured(driver, fn, given(3), 3, "dependences") for fn in (iteration, halved)]
    then, other = (each.program for each in both_captured)  # nodes are copied from graphs that they own
    (launch,) = then.recording.launches
    both = (*launch.bodies, *other.recording.launches[0].bodies)
    branch = replace(launch, kind=LaunchKind.IF, bodies=both[:bodies])
    made = driver.instantiate(replace(then, recording=replace(then.recording, launches=(branch,))))
    for holds in (True, False, True):
        args = given(1)
        args[3].fill_(holds)
        kept = args[0] * 0.5 if bodies == 2 else args[0].clone()
        right = expected(args) if holds else kept
        assert made.replay(list(args)) == []
        assert torch.equal(args[0], right)


def test_a_loop_within_a_loop(driver: Driver) -> None:
    inner = captured(driver, iteration, given(3), 3, "dependences")
    made = driver.instantiate(looped(inner.program, 3))
    for count in (5, 0, 1):
        args = given(count)
        right = expected(args)
        made.replay(list(args))
        assert torch.equal(args[0], right)


def drawing(args: list[Any]) -> Sequence[Any]:
    x, left, goes = args
    args.clear()
    x.add_(torch.rand_like(x)).mul_(torch.bernoulli(torch.full_like(x, 0.5)) + 1)
    left.sub_(1)
    torch.gt(left, 0, out=goes)
    return []


def test_random_numbers_are_those_of_the_host(driver: Driver) -> None:
    def args_of(count: int) -> list[Any]:
        more = [torch.tensor([count], device="cuda"), torch.tensor([count > 0], device="cuda")]
        return [torch.zeros(1000, device="cuda"), *more]

    made = captured(driver, drawing, args_of(3), 2)
    for count in (3, 1, 0, 20):
        torch.manual_seed(count)
        theirs, ours = args_of(count), args_of(count)
        while theirs[2]:
            drawing(list(theirs))
        after = torch.rand(4, device="cuda")
        torch.manual_seed(count)
        assert made.executable.replay(list(ours)) == []
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(torch.rand(4, device="cuda"), after)


def test_a_loop_within_a_loop_that_draws_needs_the_host(driver: Driver) -> None:
    inner = captured(driver, drawing, [torch.zeros(4, device="cuda"), *given(1)[2:]], 2).program
    with pytest.raises(CaptureError, match="draws random numbers") as caught:
        driver.instantiate(looped(inner, 2))
    assert caught.value.reason == "host-loop"
