"""Reads of a tensor return the old value where an operator writes the tensor later, however late Inductor computes
them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer

import pygraph
from tests.training.steps import foreach_in_place


@torch.library.custom_op("pygraph_late::add_", mutates_args=("x",))
def add(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


add.register_fake(lambda x, y: None)


def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    torch.ops.pygraph_late.add_(x, y + (doubled * 3).sum())
    return (doubled + 1) * 5


def bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An operator makes the view that is read."""
    doubled = x.view(torch.float16) * 2
    torch.ops.pygraph_late.add_(x, y + doubled.float().mean() * 0)
    return doubled + 1


def branch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A graph inside of an operator writes."""
    doubled = x * 2

    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return y + 1  # by y * 1, torch 2.14 has the result in the memory of y

    return torch.cond((doubled * 3).sum() > -1e9, write, lambda x, y: y * 2, (x, y)) + (doubled + 1) * 5


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("program", [plain, bits, branch])
def test_an_operator_writes_behind_what_was_read_before(program: Callable[..., torch.Tensor]) -> None:
    if program is branch and torch.__version__.startswith("2.11."):
        pytest.skip("torch.cond refuses branches that write")
    with config.patch(fx_graph_cache=False), torch.no_grad():
        ours = torch.compile(program, backend="pygraph")
        for call in range(4):
            given = [torch.arange(8.0) + call, torch.ones(8)]
            expected = [tensor.clone() for tensor in given]
            torch.testing.assert_close(ours(*given), program(*expected))
            torch.testing.assert_close(given, expected)


@pytest.mark.usefixtures("fresh")
def test_metrics_that_are_computed_behind_the_optimizer_have_the_old_weights() -> None:
    def make() -> tuple[nn.ParameterList, Callable[[torch.Tensor], torch.Tensor]]:
        weights = nn.ParameterList([torch.arange(8.0) / 8, torch.ones(8)])
        optimizer = torch.optim.SGD(weights, lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            out = (x * weights[0]).tanh() * weights[1]
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return out.detach().abs().sum() + loss.detach()

        return weights, step

    (ours, step), (theirs, expected) = make(), make()
    step = pygraph.train_step(step, fullgraph=True)
    with foreach_in_place(), config.patch(fx_graph_cache=False):
        for call in range(4):
            x = torch.arange(8.0) - call
            torch.testing.assert_close(step(x), expected(x))
            torch.testing.assert_close(list(ours), list(theirs))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)])
def test_an_update_has_no_kernel_of_its_own_for_a_parameter(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Inductor fuses at most one pointwise buffer, computed before, into a kernel of several tensors."""
    listed: set[str] = set()
    apart: set[str] = set()
    with foreach_in_place(), config.patch(fx_graph_cache=False):
        register = GraphLowering.register_operation_list

        def recorded(self: Any, names: list[str]) -> str:
            operations = [self.name_to_op[name] for name in names]
            listed.update(operation.get_name() for operation in operations)
            read = set[str]().union(*(operation.get_read_names() for operation in operations))
            apart.update(name for name in read - listed if isinstance(self.name_to_buffer.get(name), ComputedBuffer))
            return register(self, names)

        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        update = optimizer(model.parameters())

        @pygraph.train_step(fullgraph=True)
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            return loss.detach()

        with mock.patch.object(GraphLowering, "register_operation_list", recorded):
            for _ in range(3):
                step(torch.ones(4, 8))
    assert listed
    assert not apart


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fallbacks", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_an_operator_outside_of_regions_reads_an_input_before_its_last_write(fallbacks: bool) -> None:
    """Regions put it behind that write, which is all that the program does of its own with two names of one tensor."""

    def program(x: torch.Tensor, y: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        x.add_(y.tanh())
        ranked = torch.sort(same, -1).values
        x.add_((y @ y).relu())
        return ranked

    passes = "legality{forbid=[aten.sort.default]},placement,partitioning"
    options = {"passes": passes, "inductor": {"fallback_by_default": fallbacks}}
    with config.patch(fx_graph_cache=False), torch.no_grad():
        ours = torch.compile(program, backend="pygraph", options=options)
        for _ in range(4):
            x, y = torch.randn(4, 4), torch.randn(4, 4)
            copies = x.clone(), y.clone()
            torch.testing.assert_close(ours(x, y, x.view(4, 4)), program(*copies, copies[0].view(4, 4)))
            torch.testing.assert_close((x, y), copies)
