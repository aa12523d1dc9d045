"""torchtitan's wrapper, around graphs of a whole step as its graph trainer traces them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed._functional_collectives import all_reduce
from torch.fx.experimental.proxy_tensor import make_fx

import pygraph
from pygraph.integrations.torchtitan import CUDAGraphWrapper

pytestmark = pytest.mark.usefixtures("fresh")


def step(first: torch.Tensor, second: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The loss, and gradients of both weights."""
    with torch.enable_grad():
        weights = [first.detach().requires_grad_(), second.detach().requires_grad_()]
        loss = torch.nn.functional.mse_loss((x @ weights[0]).relu() @ weights[1], y)
        return (loss.detach(), *torch.autograd.grad(loss, weights))


def inputs(batch: int = 4) -> tuple[torch.Tensor, ...]:
    return torch.randn(8, 16), torch.randn(16, 2), torch.randn(batch, 8), torch.randn(batch, 2)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_a_traced_step_is_replayed_with_todays_tensors() -> None:
    module = make_fx(step)(*inputs())
    wrapper = CUDAGraphWrapper(module.forward, inputs(), (0, 1), should_check_address=True, tensor_input_indices=[2, 3])
    results = []
    for _ in range(6):
        args = inputs()
        results.append((wrapper(*args), step(*args)))
    for found, expected in results:  # a later replay overwrites no result
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 3
    assert pygraph.counters() == {"captures": 1, "replays": 4, "uncaptured": 2}
    assert "mm" in wrapper.print_readable(print_output=False)


def test_arguments_that_are_written_are_written() -> None:
    def count(total: torch.Tensor, x: torch.Tensor, factor: int) -> torch.Tensor:
        total.add_(x.sum() * factor)
        return total * 2

    wrapper, total = CUDAGraphWrapper(count, []), torch.zeros(1)
    for number in range(1, 6):
        assert wrapper(total, torch.ones(2), 3).item() == 12 * number
        assert total.item() == 6 * number
    assert pygraph.counters()["replays"] == 3


class Mesh:
    """As a DeviceMesh: nothing that a graph takes."""

    def __init__(self, size: int) -> None:
        self.size = size


def test_opaque_arguments_are_those_of_the_first_call() -> None:
    wrapper, mesh = CUDAGraphWrapper(lambda mesh, x: x * getattr(mesh, "size", mesh), []), Mesh(2)
    for _ in range(4):
        assert torch.equal(wrapper(mesh, torch.ones(2)), torch.full((2,), 2.0))
    assert pygraph.counters()["replays"] == 2
    for _ in range(3):
        assert torch.equal(wrapper(Mesh(3), torch.ones(2)), torch.full((2,), 3.0))
        assert torch.equal(wrapper(5.0, torch.ones(2)), torch.full((2,), 5.0))
        assert torch.equal(wrapper(mesh, torch.ones(2)), torch.full((2,), 2.0))
    assert pygraph.counters()["replays"] == 5


def test_a_generator_leaves_calls_uncaptured() -> None:
    wrapper = CUDAGraphWrapper(lambda generator, x: x + torch.rand(2, generator=generator), [])
    generator, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    for _ in range(4):
        assert torch.equal(wrapper(generator, torch.ones(2)), 1 + torch.rand(2, generator=other))
    assert "captures" not in pygraph.counters()


def test_teardown_frees_captures() -> None:
    wrapper = CUDAGraphWrapper(lambda x: x * 2, [])
    for _ in range(3):
        wrapper(torch.ones(2))
    replays = pygraph.counters()["replays"]
    wrapper.teardown()
    for _ in range(4):
        assert torch.equal(wrapper(torch.ones(2)), torch.full((2,), 2.0))
    assert pygraph.counters()["replays"] == replays
    assert pygraph.counters()["captures"] == 1


def test_collectives_are_called_by_each_replay() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        group: Any = distributed.group.WORLD

        def averaged(x: torch.Tensor) -> torch.Tensor:
            return all_reduce(x * 2, "sum", group) + 1

        wrapper = CUDAGraphWrapper(make_fx(averaged)(torch.ones(4)).forward, [])
        for _ in range(5):
            x = torch.randn(4)
            assert torch.equal(wrapper(x), x * 2 + 1)
        assert pygraph.counters()["replays"] == 3
    finally:
        distributed.destroy_process_group()
