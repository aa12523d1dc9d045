"""Loops and branches: the native half runs bodies as often as memory says."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.loops import LoopPasses, looped
from pygraph.program.recording import LaunchKind
from pygraph.program.text import parse_program
from pygraph.program.verify import verify
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.host import HostDriver

DRIVER = HostDriver()


def iteration(args: list[Any]) -> Sequence[Any]:
    """x = tanh(x @ w) + 1, to be stopped where that is large."""
    x, w, control = args
    args.clear()
    x.copy_(torch.tanh(torch.mm(x, w)) + 1)
    control[2:].copy_(x.max().reshape(1) > 5)
    return []


def given(count: int, stop: int = 0) -> list[Any]:
    return [torch.randn(4, 4), torch.randn(4, 4), torch.tensor([0, count, stop])]


def expected(args: Sequence[torch.Tensor]) -> torch.Tensor:
    x, w, control = args
    for _ in range(int(control[1]) * (not control[2])):
        x = torch.tanh(torch.mm(x, w)) + 1
    return x


def captured(fn: Any, args: Sequence[Any], control: int, order: str = "program") -> Captured:
    found = capture(fn, DRIVER, list(args), None, (), order, LoopPasses(control))
    assert isinstance(found, Captured), found
    return found


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_a_loop_runs_as_often_as_it_is_told_at_any_address(order: str) -> None:
    made = captured(iteration, given(3), 2, order=order)
    for count, stop in ((3, 0), (1, 0), (0, 0), (2, 0), (5, 1), (-4, 0), (100, 0)):
        args = given(count, stop)
        right = expected(args)
        assert made.executable.replay(list(args)) == []
        assert torch.equal(args[0], right)
        assert args[2].tolist() == [max(count, 0) * (not stop), count, stop]


def doubles(args: list[Any]) -> Sequence[Any]:
    x, control = args
    args.clear()
    x.mul_(2)
    control[2:].copy_(x > 60)
    return []


def test_a_loop_ends_where_its_body_says_so() -> None:
    made = captured(doubles, [torch.ones(1), torch.tensor([0, 9, 0])], 1)
    for count, end, ran in ((9, 64, 6), (6, 64, 6), (5, 32, 5)):
        x, control = torch.ones(1), torch.tensor([0, count, 0])
        made.executable.replay([x, control])
        assert (x.item(), control.tolist()) == (end, [ran, count, int(end > 60)])


def test_a_branch_runs_one_of_its_bodies() -> None:
    def halved(args: list[Any]) -> Sequence[Any]:
        x, _, control = args
        args.clear()
        torch.mul(x, 0.5, out=x)
        control.clone()
        return []

    then, other = (captured(fn, given(3), 2).program for fn in (iteration, halved))
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
            kept = args[0] * 0.5 if count == 2 else args[0].clone()
            right = expected(args) if holds else kept
            args[2][0] = holds
            assert replay(list(args)) == []
            assert torch.equal(args[0], right)


def test_a_loop_within_a_loop() -> None:
    def step(args: list[Any]) -> Sequence[Any]:
        x, _, inner = args
        args.clear()
        x.add_(1)
        inner.clone()
        return []

    zeros, counts = (
        (lambda: torch.zeros(1)),
        (lambda inner, outer: (torch.tensor([0, outer, 0]), torch.tensor([0, inner, 0]))),
    )
    program = looped(captured(step, [zeros(), *counts(3, 4)], 2).program, 1)
    verify(program)
    assert str(parse_program(str(program))) == str(program)
    assert [launch.count for launch in program.recording.launches] == [2]
    x, (outer, inner) = zeros(), counts(3, 4)
    DRIVER.instantiate(program).replay([x, outer, inner])
    assert (x.item(), outer.tolist(), inner.tolist()) == (3, [4, 4, 0], [3, 3, 0])  # nobody sets the inner count back


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
            capture(fn, DRIVER, [torch.ones(4), torch.ones(4)], None, eager, "program", LoopPasses(0))
        assert caught.value.reason == "host-loop"


def test_an_endless_loop_is_interrupted() -> None:
    def endless(args: list[Any]) -> Sequence[Any]:
        args[0].add_(1)
        args.clear()
        return []

    made = captured(endless, [torch.zeros(1), torch.tensor([0, 9, 0])], 1)
    x = torch.zeros(1)
    threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        made.executable.replay([x, torch.tensor([0, 1 << 60, 0])])
    assert x.item() > 0
    assert made.executable.replay([x, torch.tensor([0, 0, 0])]) == []
