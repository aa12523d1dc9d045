"""Mixtures of experts: transformer blocks whose perceptrons are chosen per token, two of eight.

In float32 throughout: half precision's roundings would send tokens to other experts, past any tolerance.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn

from benchmarks.suite.parts import Block, in_turn, mlp
from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]

CHOSEN = 2
ROUTING = "float32 sums in another order; a token between two experts would differ by far more"


class Router(nn.Module):
    """Takes [tokens, width]; returns the two experts of each token and their weights, [tokens, 2] each."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.scores(x).softmax(-1).topk(CHOSEN, -1)
        return chosen, weights / weights.sum(-1, keepdim=True)


class DenseDispatch(nn.Module):
    """Experts with room for a fixed number of tokens each, filled by products with one-hot tensors, as in GShard.

    Tokens that find no room keep what they had. Every size is known beforehand.
    """

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.router = Router(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, x.shape[-1])
        chosen, weights = self.router(tokens)
        wanted = (chosen[..., None] == torch.arange(self.experts, device=x.device)).view(-1, self.experts)
        place = (wanted.cumsum(0) - 1).masked_fill(~wanted, self.capacity)
        slots = (place[..., None] == torch.arange(self.capacity, device=x.device)).to(x.dtype)
        slots = slots.view(-1, CHOSEN, self.experts, self.capacity)
        inside = torch.einsum("tkec,td->ecd", slots, tokens)
        done = torch.bmm(nn.functional.gelu(torch.bmm(inside, self.up)), self.down)
        return torch.einsum("tkec,tk,ecd->td", slots, weights, done).view(x.shape)


class RoutedDispatch(nn.Module):
    """Each expert looks up its tokens, whose number only the device knows: a host read for each expert."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = Router(width, experts)
        self.experts = nn.ModuleList(mlp((width, 4 * width, width), nn.GELU) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, x.shape[-1])
        chosen, weights = self.router(tokens)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            mixed.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return mixed.view(x.shape)


class Mixture(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, experts: int, capacity: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        for layer in self.layers:
            layer.mlp = RoutedDispatch(width, experts) if not capacity else DenseDispatch(width, experts, capacity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mixture(
    compile: Compile,
    device: str,
    *,
    layers: int,
    width: int,
    heads: int,
    experts: int,
    capacity: int | None,
    batch: int,
    length: int,
) -> Step:
    torch.manual_seed(0)
    model = Mixture(layers, width, heads, experts, capacity).to(device).eval()
    inputs = cycle([torch.randn(batch, length, width, device=device) for _ in range(4)])
    run = compile(model)
    return in_turn(run, inputs)


SIZES: dict[str, Any] = {"layers": 4, "width": 512, "heads": 8, "experts": 8, "batch": 4, "length": 128}
TINY: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "experts": 4, "batch": 2, "length": 8}

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "moe-dense",
        "inference",
        "language",
        "Four blocks with 8 experts of fixed capacity, two per token, dispatched by products with one-hot tensors.",
        partial(mixture, capacity=160, **SIZES),
        partial(mixture, capacity=10, **TINY),
        tolerance=1e-3,
        why_tolerance=ROUTING,
    ),
    Workload(
        "moe-routed",
        "inference",
        "language",
        "Four blocks with 8 experts that look up their tokens, as in transformers: sizes that depend on the data, a "
        "host read per expert. A CUDA Graph has to be cut everywhere.",
        partial(mixture, capacity=None, **SIZES),
        partial(mixture, capacity=None, **TINY),
        tolerance=1e-3,
        why_tolerance=ROUTING,
    ),
)
