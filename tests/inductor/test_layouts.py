"""Convolutions of a training step: one layout, forward and backward, and what stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import pygraph
from pygraph.inductor.rewrites import align_convolutions
from tests.training.steps import drawn, setup

WEIGHT = (96, 80, 3, 3)


def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A convolution, its gradients, and what was made of them."""
    made = torch.ops.aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    gradients = torch.ops.aten.convolution_backward(
        made.sin(), x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return made.sum(), made.cos(), gradients[1], x


def traced(function: Callable[..., Any], *weight: int) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    torch.manual_seed(0)
    given = [torch.randn(2, weight[1], 8, 8).double(), torch.randn(*weight).double()]
    return make_fx(function, tracing_mode="fake")(*given), given


def test_operands_are_moved_and_results_stay_as_they_were() -> None:
    gm, given = traced(step, *WEIGHT)
    before = gm(*given)
    assert align_convolutions(gm) is True
    for node in gm.graph.nodes:
        places = {torch.ops.aten.convolution.default: 2, torch.ops.aten.convolution_backward.default: 3}
        for operand in node.args[: places.get(node.target, 0)]:
            assert (operand.target, operand.kwargs) == (
                torch.ops.aten.clone.default,
                {"memory_format": torch.channels_last},
            )
    after = gm(*given)
    for a, b in zip(after, before, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    assert after[3] is given[0]


def strided(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return step(torch.as_strided(x.clone(), x.shape, x.stride()), w)


def turned(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss, made, *rest = step(x, w)
    return loss, made.transpose(1, 3), *rest


def shared(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss, made, *rest = step(x, w)
    return loss, made, made.view(-1), *rest


@torch.library.custom_op("layouts::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@copied.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def custom(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return step(copied(x), w)


def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.ops.aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),)


@pytest.mark.parametrize(
    "function", [strided, turned, shared, custom, forward], ids=lambda function: str(function.__name__)
)
def test_what_depends_on_strides_is_left(function: Callable[..., Any]) -> None:
    gm, _ = traced(function, *WEIGHT)
    before = gm.code
    assert align_convolutions(gm) is None
    assert gm.code == before


def test_where_inductor_keeps_the_layout_in_training_nothing_moves() -> None:
    gm, _ = traced(step, *WEIGHT)
    before = gm.code
    with torch._inductor.config.patch(layout_optimization=False):
        assert align_convolutions(gm) is False
    assert gm.code == before


def network() -> nn.Module:
    sizes = ((3, 72), (72, 72), (72, 80))
    return nn.Sequential(*(nn.Conv2d(*size, 3, bias=False) for size in sizes), nn.Flatten(2))


def trained(wrap: Callable[[Any], Any]) -> tuple[list[torch.Tensor], list[tuple[int, ...]], int]:
    """Losses, parameters and one gradient after some steps; strides; replays."""
    ours = setup(lambda parameters: torch.optim.SGD(parameters, 0.01), network)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = ours.model(x)
        loss = made.square().mean()
        loss.backward()
        gradient = ours.model[0].weight.grad
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        return loss.detach(), made.detach(), gradient

    wrapped, generator = wrap(step), torch.Generator().manual_seed(1)
    results: list[torch.Tensor] = []
    for _ in range(8):
        results += [result.clone() for result in wrapped(drawn(generator, 4, 3, 10, 10))]
    results += [parameter.detach() for parameter in ours.model.parameters()]
    return results, [result.stride() for result in results], ours.replays


@pytest.mark.usefixtures("fresh")
def test_forward_and_backward_convolutions_of_a_step_share_their_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    expected, strides, _ = trained(lambda step: step)
    found, ours, replays = trained(pygraph.train_step)
    assert replays >= 4
    assert ours == strides
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    source = pygraph.reports()[-1].source
    assert source is not None
    forward = re.findall(r"extern_kernels\.convolution\((\w+), (\w+),", source)
    backward = re.findall(r"convolution_backward\.default\(\w+, (\w+), (\w+),", source)
    assert len(forward) == 3
    assert set(forward) == set(backward)
