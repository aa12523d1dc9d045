"""accelerate's settings, in a stand-in for what ``Accelerator.prepare`` does with them, and in accelerate."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

import pygraph

pytestmark = pytest.mark.usefixtures("fresh")

NAME = "pygraph.integrations.accelerate"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@dataclass
class TorchDynamoPlugin:
    """``accelerate.utils.TorchDynamoPlugin`` of accelerate 1.15: ``to_kwargs`` leaves out what is as by default."""

    backend: Any = None
    mode: Any = None
    fullgraph: Any = None
    dynamic: Any = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: Any = None

    def __post_init__(self) -> None:
        assert self.backend in (None, "inductor")
        self.mode = self.mode or "default"

    def to_kwargs(self) -> dict[str, Any]:
        given = {name: value for name, value in vars(self).items() if value != vars(type(self)())[name]}
        given.pop("use_regional_compilation", None)
        return given


@pytest.fixture(params=["standin", pytest.param("accelerate", marks=pytest.mark.clients)])
def prepare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, Any], Any]]:
    """``prepare`` of an accelerator with a plugin."""
    if request.param == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        yield lambda plugin, model: accelerate.Accelerator(cpu=True, dynamo_plugin=plugin).prepare(model)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return
    for name in ("accelerate", "accelerate.utils"):
        module = ModuleType(name)
        module.TorchDynamoPlugin = TorchDynamoPlugin  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    yield lambda plugin, model: torch.compile(model, **plugin.to_kwargs())


@pytest.fixture
def adapter(prepare: Any) -> Iterator[Any]:
    sys.modules.pop(NAME, None)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("settings", [{}, {"dynamic": True}, {"options": {"capture_after": 3}}], ids=repr)
def test_a_model_is_compiled_with_the_settings(prepare: Any, adapter: Any, settings: Any) -> None:
    model = prepare(adapter.DynamoPlugin(**settings), Model())
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, 8))
    captured = 3 if "options" in settings else 2
    assert pygraph.counters()["captures"] == 1
    assert pygraph.counters()["uncaptured"] == captured
    assert len(pygraph.reports()) == 1


def test_repeated_blocks_are_compiled_once(prepare: Any, adapter: Any) -> None:
    plugin = adapter.DynamoPlugin(use_regional_compilation=True)
    assert plugin.use_regional_compilation
    assert plugin.to_kwargs() == {"backend": "pygraph"}


def test_it_can_be_switched_off(prepare: Any, adapter: Any) -> None:
    prepare(adapter.DynamoPlugin(disable=True), Model())(torch.randn(4, 8))
    assert not pygraph.reports()
