"""Workloads with obstacles to a CUDA Graph: scalars, positions and masks built on the CPU, results that go there.

All of these are common in users' programs, and none is needed by the computation itself.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn

from benchmarks.suite.inference import floating
from benchmarks.suite.parts import Block, TokenModel, in_turn, mlp
from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]

PERIOD = 100
"""Steps after which schedules begin again."""


def momentum_update(
    parameters: list[torch.Tensor], gradients: list[torch.Tensor], buffers: list[torch.Tensor], rate: torch.Tensor
) -> None:
    """SGD with momentum and decay, in place; ``rate`` has no dimension."""
    for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
        buffer.mul_(0.9).add_(gradient)
        parameter.mul_(1 - 0.1 * rate).sub_(rate * buffer)


def update(compile: Compile, device: str, *, layers: int, width: int) -> Step:
    """The learning rate is a CPU tensor, as ``torch.optim`` takes it, and is refilled before each step."""
    torch.manual_seed(0)
    sizes = [(width, width), (width,), (4 * width, width), (width, 4 * width)] * layers
    parameters, gradients = ([torch.randn(size, device=device) for size in sizes] for _ in range(2))
    buffers = [torch.zeros(size, device=device) for size in sizes]
    rate = torch.tensor(0.0)
    rates = cycle([1e-3 * (1 + i / PERIOD) for i in range(PERIOD)])
    run = compile(momentum_update)

    def step() -> list[torch.Tensor]:
        rate.fill_(next(rates))
        with torch.no_grad():
            run(parameters, gradients, buffers, rate)
        return [parameters[0], parameters[-1], buffers[1]]

    return step


class Denoiser(nn.Module):
    """A perceptron that takes the noise level as a number, as samplers of diffusion models pass it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp((width, 4 * width, width), nn.SiLU) for _ in range(layers))

    def forward(self, x: torch.Tensor, level: float) -> torch.Tensor:
        y = x * (1 / math.sqrt(1 + level * level))
        for layer in self.layers:
            y = y + layer(y) * level
        return x - level * y


def float_schedule(compile: Compile, device: str, *, width: int, layers: int, batch: int) -> Step:
    torch.manual_seed(0)
    dtype = floating(device)
    model = Denoiser(width, layers).to(device, dtype).eval()
    x = torch.randn(batch, width, device=device, dtype=dtype)
    levels = cycle([0.05 + 0.9 * i / PERIOD for i in range(PERIOD)])
    run = compile(model)

    def step() -> Any:
        with torch.no_grad():
            return run(x, next(levels))

    return step


class HostMasked(TokenModel):
    """A language model that makes its positions and its causal mask on the CPU in each call."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length).to(tokens.device)
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool)).to(tokens.device)
        x = self.words(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask)
        made: torch.Tensor = self.norm(x)
        return made


def host_mask(
    compile: Compile, device: str, *, words: int, length: int, width: int, heads: int, layers: int, batch: int
) -> Step:
    torch.manual_seed(0)
    model = HostMasked(words, length, width, heads, layers).to(device, floating(device)).eval()
    tokens = torch.randint(0, words, (batch, length), device=device)
    run = compile(model)

    def step() -> Any:
        with torch.no_grad():
            return run(tokens)

    return step


class HostAnswer(nn.Module):
    """A classifier that hands its probabilities over on the CPU."""

    def __init__(self, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.layers(x).mean(1)).float().softmax(-1).cpu()
        return made


def host_answer(compile: Compile, device: str, *, width: int, heads: int, layers: int, batch: int, length: int) -> Step:
    torch.manual_seed(0)
    dtype = floating(device)
    model = HostAnswer(width, heads, layers, 10).to(device, dtype).eval()
    inputs = cycle([torch.randn(batch, length, width, device=device, dtype=dtype) for _ in range(4)])
    run = compile(model)
    return in_turn(run, inputs)


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "cpu-scalar-update",
        "training",
        "optimizers",
        "A hand-written optimizer over 48 tensors, in place, whose learning rate is a 0-dimensional CPU tensor: CUDA "
        "Graph Trees decline it for both.",
        partial(update, layers=12, width=512),
        partial(update, layers=2, width=8),
        tolerance=1e-4,
        why_tolerance="float32, element by element; products and sums may be fused",
    ),
    Workload(
        "float-schedule",
        "inference",
        "diffusion",
        "A denoiser that takes the noise level as a Python float, another one in each step.",
        partial(float_schedule, width=1024, layers=12, batch=16),
        partial(float_schedule, width=16, layers=2, batch=4),
        calls=50,
    ),
    Workload(
        "cpu-mask",
        "inference",
        "language",
        "A language model of 8 layers whose positions and causal mask are built on the CPU and moved in each call.",
        partial(host_mask, words=32000, length=128, width=768, heads=12, layers=8, batch=2),
        partial(host_mask, words=64, length=8, width=32, heads=2, layers=2, batch=2),
    ),
    Workload(
        "cpu-output",
        "inference",
        "vision",
        "An image encoder of 8 layers on patches that returns ten probabilities on the CPU.",
        partial(host_answer, width=384, heads=6, layers=8, batch=1, length=196),
        partial(host_answer, width=32, heads=2, layers=2, batch=2, length=8),
    ),
)
