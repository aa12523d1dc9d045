"""Operators written in Python: replayed through the dispatcher, they may raise, replay and close as they like."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.runtime.host import HostDriver
from tests.runtime.host.replays import make_executable, replay_and_compare
from tests.runtime.regions import RegionCall


@torch.library.custom_op("pygraph_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return _twice(x)


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor, by: list[int]) -> None:
    x.add_(sum(by))


def _plain_twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_twice = _plain_twice


def python_operators(args: list[Any]) -> tuple[Any, ...]:
    x = args[0]
    torch.ops.pygraph_tests.bump(x, [1, 2])
    return (torch.ops.pygraph_tests.twice(x),)


def test_operators_written_in_python(driver: HostDriver) -> None:
    call = RegionCall(python_operators, [torch.randn(5)])
    executable, recording = make_executable(driver, call)
    assert [launch.accesses for launch in recording.launches] == [None, None]
    argument = recording.allocations[0].key
    assert [argument in launch.read_only for launch in recording.launches] == [False, True]
    for _ in range(3):
        replay_and_compare(driver, call, executable, call.fresh(seed=4))


def test_a_python_operator_that_raises(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = RegionCall(python_operators, [torch.randn(5)])
    executable, _ = make_executable(driver, call)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise LookupError("no such thing")

    with monkeypatch.context() as patch:
        patch.setitem(globals(), "_twice", broken)
        with pytest.raises(LookupError, match="no such thing"):
            executable.replay(call.fresh())
    replay_and_compare(driver, call, executable, call.args)


def test_a_replay_inside_a_replay_is_turned_away(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = RegionCall(python_operators, [torch.randn(5)])
    executable, _ = make_executable(driver, call)
    inner: list[Any] = []

    def reenter(x: torch.Tensor) -> torch.Tensor:
        inner.append(executable.replay(call.fresh()))
        return x * 2

    monkeypatch.setitem(globals(), "_twice", reenter)
    assert executable.replay(call.fresh()) is not None
    assert inner == [None]


def test_closing_during_a_replay(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = RegionCall(python_operators, [torch.randn(5)])
    executable, _ = make_executable(driver, call)

    def close(x: torch.Tensor) -> torch.Tensor:
        executable.close()
        return x * 2

    monkeypatch.setitem(globals(), "_twice", close)
    args = call.fresh()
    outputs = executable.replay(args)
    assert outputs is not None
    assert torch.equal(outputs[0], args[0] * 2)
    assert executable.replay(call.fresh()) is None
