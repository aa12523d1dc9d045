"""What a script gets in the place of torch.compile: which calls count, and that modules stay what they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pygraph.bench.script import Gate


class Serving:
    """Notes calls that count, and wants the results of those that are odd."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.entries = 1  # the process was told to go before the script began
        self.calls: Iterator[bool] = self._calls()

    def _calls(self) -> Iterator[bool]:
        while True:
            self.entries += 1
            yield self.entries % 2 == 1

    def keep(self, result: Any) -> None:
        self.kept.append(float(result.sum()))


@pytest.fixture
def serving() -> Serving:
    return Serving()


@pytest.fixture
def gate(serving: Serving) -> Gate:
    return Gate("eager", serving)  # type: ignore[arg-type]


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice as much."""
    return x * 2


def test_every_way_of_compiling_a_function(gate: Gate, serving: Serving) -> None:
    x = torch.ones(2)
    ways = [gate.compile(double), gate.compile(double, mode="max-autotune"), gate.compile(fullgraph=True)(double)]
    for number, call in enumerate(ways, 1):
        assert call(x).tolist() == [2.0, 2.0]
        assert serving.entries == number
        assert call.__doc__ == "Twice as much."
    assert gate.compile(double, disable=True) is double
    assert serving.kept == [4.0, 4.0]


def test_a_call_within_a_call_does_not_count_and_one_that_raises_does(gate: Gate, serving: Serving) -> None:
    inner = gate.compile(double)
    outer = gate.compile(lambda x: inner(inner(x)).view(1))
    for entries, size in enumerate((1, 2, 1), 1):
        with contextlib.nullcontext() if size == 1 else pytest.raises(RuntimeError):
            assert outer(torch.ones(size)).item() == 4.0
        assert serving.entries == entries


def test_a_module_is_still_the_module(gate: Gate, serving: Serving) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    compiled = gate.compile(module)
    assert isinstance(compiled, nn.Module)
    assert [id(each) for each in compiled.parameters()] == [id(each) for each in module.parameters()]
    compiled.eval()
    assert not compiled.training
    assert not module[1].training
    compiled.mark = 3
    assert module.mark == 3
    assert compiled._orig_mod is module
    x = torch.ones(1, 2)
    assert torch.equal(compiled(x), module(x))
    assert torch.equal(compiled.forward(x), module(x))
    assert serving.entries == 2


def test_a_module_that_is_compiled_in_place(gate: Gate, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", gate.compile)
    module = nn.Linear(2, 2)
    expected = module(torch.ones(1, 2))
    module.compile()
    assert torch.equal(module(torch.ones(1, 2)), expected)
    assert serving.entries == 1
