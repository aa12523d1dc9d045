"""Names in compiled programs: a pass that splits at modules, and one that rewrites operators; training; caches.

What names there are is tested where graphs are lifted (``tests/frontend/test_location.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import pygraph
from pygraph.ir import REGION, Graph, Region, Stage, parse_graph
from pygraph.passes import Pass, PassContext, PassResult
from pygraph.report.facts import to_json
from tests.small import UNFUSED
from tests.test_caches import keeping, restored  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("fresh")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x)) * self.gain


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return x


@dataclass(frozen=True)
class Turn(Pass):
    """Give each product its operands the other way round."""

    name: ClassVar[str] = "turn"
    requires: ClassVar[Stage] = Stage.LIFTED

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        products = [node for node in graph.nodes if node.op == "aten.mul.Tensor"]
        for node in products:
            graph.set_args(node, reversed(node.args))
        return PassResult(bool(products))


@dataclass(frozen=True)
class SplitLayers(Pass):
    """Begin another region at every fourth of ``layers``."""

    name: ClassVar[str] = "split-layers"
    requires: ClassVar[Stage] = Stage.PARTITIONED
    ensures: ClassVar[Stage] = Stage.PARTITIONED

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        part, last = 0, -1
        graph.regions.clear()
        for node in graph.nodes:
            layer = re.search(r"\blayers\.(\d+)", node.module)
            part = int(layer[1]) // 4 if layer else part
            if part != last:
                graph.regions[len(graph.regions)] = Region()
            node.meta.set(REGION, len(graph.regions) - 1)
            last = part
        return PassResult(len(graph.regions) > 1)


SPLITTING = [Turn(), "legality,placement,partitioning", SplitLayers(), "indirection,selection"]


def graphs(function: Callable[..., Any], x: torch.Tensor, **options: Any) -> list[Graph]:
    """The graphs of ``function`` compiled, each as its text says, once results and gradients are eager's."""
    compiled = torch.compile(function, backend="pygraph", options={**UNFUSED, **options})
    for _ in range(3):
        found = []
        for run in (compiled, function):
            result = run(x)
            gradients = torch.autograd.grad(result.sum(), x) if x.requires_grad else ()
            found.append((result.detach(), *gradients))
        torch.testing.assert_close(*found)
    texts = [graph["pgir"] for graph in to_json(pygraph.reports())["graphs"]]
    assert [str(parse_graph(text)) for text in texts] == texts
    return [parse_graph(text) for text in texts]


def layers_of_regions(graph: Graph) -> list[list[str]]:
    """The layers in each region, in order."""
    found: list[list[str]] = [[] for _ in graph.regions]
    for node in graph.nodes:
        layer = ".".join(node.module.split(".")[:2])
        if layer and layer not in found[node.meta.get(REGION) or 0]:
            found[node.meta.get(REGION) or 0].append(layer)
    return found


def test_a_stack_is_split_at_every_fourth_layer_forwards_and_backwards() -> None:
    layers = [f"layers.{i}" for i in range(8)]
    forward, backward = graphs(Stack(8), torch.randn(3, 4, requires_grad=True), passes=SPLITTING)
    assert layers_of_regions(forward) == [layers[:4], layers[4:]]
    assert layers_of_regions(backward) == [layers[:3:-1], layers[3::-1]]
    names = {f"{layer}.{name}" for layer in layers for name in ("up.weight", "up.bias", "gain")}
    assert {value.name for value in forward.inputs} == names | {"x"}
    placeholders = {value.name: value.placeholder for value in (*forward.inputs, *backward.inputs)}
    assert all(re.fullmatch(r"primals_\d+", placeholders[name]) for name in names)
    for value in backward.inputs:
        if value.role == "parameter":
            assert value.placeholder == forward.value(value.name).placeholder
    for report in pygraph.reports():
        assert report.error is None
        assert any(note.endswith("operators were rewritten by passes") for note in report.notes)
        assert [(region.planned, region.state) for region in report.regions] == [((0,), "replay"), ((1,), "replay")]


def test_a_whole_training_step_names_parameters_and_optimizer_state() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @pygraph.train_step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(2):  # the state is made by the first
        step(torch.ones(3, 4))
    graph = pygraph.reports()[-1].graph
    assert graph is not None
    states = {f"optimizer.states.0.{i}.momentum_buffer" for i in range(2)}
    assert {value.name for value in graph.inputs} == {"0.weight", "0.bias", "x", "optimizer.rates.0", *states}


class Product(nn.Module):
    """Of what was passed and a parameter, whose name no line of the code tells."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.held = name
        self.register_parameter(name, nn.Parameter(torch.ones(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ getattr(self, self.held))


@pytest.mark.usefixtures("keeping")
def test_a_program_is_restored_with_its_names_and_never_with_those_of_another() -> None:
    def shown() -> str:
        (report,) = json.loads(json.dumps(to_json(pygraph.reports())))["graphs"]
        return str(report["pgir"])

    x = torch.ones(8, 8)
    assert restored(Product("w_1"), x) == (False, False)
    kept = shown()
    assert "%w_1 : " in kept
    assert restored(Product("w_1"), x)[0]
    assert shown() == kept
    assert not restored(Product("w-1"), x)[0], "Dynamo calls both the same"
    assert shown() == kept.replace("%w_1", '%"w-1"')
    assert not restored(Product("w_1"), x, frames=True)[0]
    assert "frames = [" in shown()
