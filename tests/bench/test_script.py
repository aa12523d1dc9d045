"""``Gate``, which stands in for torch.compile in a script: outermost calls count, and modules stay themselves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pygraph.bench.causes import read
from pygraph.bench.process import CALL
from pygraph.bench.script import Gate
from pygraph.bench.sides import OURS, UNCAPTURED


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


@pytest.mark.parametrize(("side", "replays"), [("eager", 0), (UNCAPTURED, 0), (OURS, 3)])
def test_a_captured_step_is_captured_on_our_side_only(
    serving: Serving, side: str, replays: int, tmp_path: Path
) -> None:
    gate, model = Gate(side, serving), nn.Linear(4, 1)  # type: ignore[arg-type]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        loss.backward()
        with torch.no_grad():
            model.weight.sub_(model.weight.grad)
        model.zero_grad()
        return loss.detach()

    captured, x = gate.graph(step, held=model), torch.ones(2, 4)
    for _ in range(8):
        captured(x)
    with torch.profiler.profile() as profile, torch.profiler.record_function(CALL):
        for _ in range(3):
            captured(x)
    assert serving.entries == 11
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert read(json.loads((tmp_path / "trace.json").read_text()), gpu=False).replays == replays


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
