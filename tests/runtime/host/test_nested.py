"""Loops and branches: the native half runs bodies for as long as the byte that they are told of is not 0."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.loops import Looped, looped
from pygraph.program.recording import LaunchKind
from pygraph.program.text import parse_program
from pygraph.program.verify import verify
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.host import HostDriver

DRIVER = HostDriver()


def iteration(args: list[Any]) -> Sequence[Any]:
    """x = tanh(x @ w) + 1, so many times as ``left`` says."""
    x, w, left, goes = args
    args.clear()
    x.copy_(torch.tanh(torch.mm(x, w)) + 1)
    left.sub_(1)
    torch.gt(left, 0, out=goes)
    return []


def given(count: int) -> list[Any]:
    return [torch.randn(4, 4), torch.randn(4, 4), torch.tensor([count]), torch.tensor([count > 0])]


def expected(args: Sequence[torch.Tensor]) -> torch.Tensor:
    x, w, left, _ = args
    for _ in range(int(left)):
        x = torch.tanh(torch.mm(x, w)) + 1
    return x


def captured(fn: Any, args: Sequence[Any], predicate: int, order: str = "program") -> Captured:
    found = capture(fn, DRIVER, list(args), None, (), order, Looped(predicate))
    assert isinstance(found, Captured), found
    return found


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_a_loop_runs_as_often_as_its_predicate_says_at_any_address(order: str) -> None:
    made = captured(iteration, given(3), 3, order=order)
    for count in (3, 1, 0, 2, 100):
        args = given(count)
        right = expected(args)
        assert made.executable.replay(list(args)) == []
        assert torch.equal(args[0], right)
        assert args[2].item() == 0
        assert not args[3]


def test_a_branch_runs_one_of_its_bodies() -> None:
    def halved(args: list[Any]) -> Sequence[Any]:
        x, _, left, goes = args
        args.clear()
        torch.mul(x, 0.5, out=x)
        left.sub_(10)
        goes.clone()
        return []

    then, other = (captured(fn, given(3), 3).program for fn in (iteration, halved))
    (launch,) = then.recording.launches
    bodies = (*launch.bodies, *other.recording.launches[0].bodies)
    for count in (1, 2):
        branch = replace(launch, kind=LaunchKind.IF, bodies=bodies[:count])
        program = replace(then, recording=replace(then.recording, launches=(branch,)))
        verify(program)
        assert str(parse_program(str(program))) == str(program)
        replay = DRIVER.instantiate(program).replay
        for holds in (True, False, True):
            args = given(1)
            args[3].fill_(holds)
            x = args[0].clone()
            kept = x * 0.5 if count == 2 else x
            right = expected(args) if holds else kept
            assert replay(list(args)) == []
            assert torch.equal(args[0], right)
            assert args[2].item() == (0 if holds else 1 - 10 * (count == 2))


def test_a_loop_within_a_loop() -> None:
    inner = captured(iteration, given(3), 3).program
    outer = looped(inner, 3)
    verify(outer)
    assert str(parse_program(str(outer))) == str(outer)
    args = given(5)
    right = expected(args)
    DRIVER.instantiate(outer).replay(list(args))
    assert torch.equal(args[0], right)
    assert [launch.count for launch in outer.recording.launches] == [6]


def test_what_needs_the_host_is_refused() -> None:
    def calls(args: list[Any]) -> Sequence[Any]:
        args[0].mul_(2).cos_()
        args.clear()
        return []

    def returns(args: list[Any]) -> Sequence[Any]:
        return [args.pop() + 1]

    for fn, eager, said in (
        (calls, ("aten.cos_",), "aten.cos_.default is called by the host"),
        (returns, (), "memory"),
    ):
        with pytest.raises(CaptureError, match=said) as caught:
            capture(fn, DRIVER, [torch.ones(4), torch.ones(4)], None, eager, "program", Looped(0))
        assert caught.value.reason == "host-loop"


def test_an_endless_loop_is_interrupted() -> None:
    def endless(args: list[Any]) -> Sequence[Any]:
        args[0].add_(1)
        args.clear()
        return []

    made = captured(endless, [torch.zeros(1), torch.tensor([True])], 1)
    x = torch.zeros(1)
    sent = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
    sent.start()
    with pytest.raises(KeyboardInterrupt):
        made.executable.replay([x, torch.tensor([True])])
    assert x.item() > 0
    assert made.executable.replay([x, torch.tensor([False])]) == []
