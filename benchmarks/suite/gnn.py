"""Graph networks in plain torch: messages gathered along edges and added up at their targets.

Sums by scatter have no fixed order on a GPU, so that not even two runs of one side are equal bit by bit.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn

from benchmarks.suite.parts import in_turn
from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]

SUMS = "float32 sums by scatter, in no fixed order"


class Convolution(nn.Module):
    """A graph convolution: neighbours weighted by the degrees at both ends of an edge (Kipf and Welling)."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * weights[:, None])


class Gcn(nn.Module):
    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution(width, width) for _ in range(layers - 1))
        self.last = Convolution(width, classes)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x, edges, weights))
        made: torch.Tensor = self.last(x, edges, weights)
        return made


class Sage(nn.Module):
    """GraphSAGE: each node's own features and the mean of its neighbours', which the edges of this call say."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.others = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        ones = torch.ones(target.shape, device=x.device)
        degrees = torch.zeros(x.shape[0], device=x.device).scatter_add(0, target, ones).clamp(min=1)
        for own, others in zip(self.own, self.others, strict=True):
            places = target[:, None].expand(-1, x.shape[1])
            sums = torch.zeros_like(x).scatter_add(0, places, x[source])
            x = torch.relu(own(x) + others(sums / degrees[:, None]))
        made: torch.Tensor = self.head(x)
        return made


def gcn(compile: Compile, device: str, *, nodes: int, edges: int, width: int, layers: int) -> Step:
    torch.manual_seed(0)
    model = Gcn(width, layers, 16).to(device).eval()
    both = torch.randint(0, nodes, (2, edges), device=device)
    degrees = torch.bincount(both[1], minlength=nodes) + torch.bincount(both[0], minlength=nodes)
    weights = (degrees[both[0]] * degrees[both[1]]).rsqrt()
    x = torch.randn(nodes, width, device=device)
    run = compile(model)

    def step() -> Any:
        with torch.no_grad():
            return run(x, both, weights)

    return step


def sage(compile: Compile, device: str, *, nodes: int, edges: int, width: int, layers: int) -> Step:
    torch.manual_seed(0)
    model = Sage(width, layers, 16).to(device).eval()
    samples = [
        (torch.randn(nodes, width, device=device), torch.randint(0, nodes, (2, edges), device=device)) for _ in range(8)
    ]
    run, turns = compile(model), cycle(samples)

    return in_turn(run, turns)


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "gcn-fixed",
        "inference",
        "graphs",
        "A graph convolutional network of 3 layers on one graph of 20,000 nodes and 160,000 edges, summed by "
        "index_add.",
        partial(gcn, nodes=20_000, edges=160_000, width=128, layers=3),
        partial(gcn, nodes=40, edges=120, width=16, layers=2),
        tolerance=1e-3,
        why_tolerance=SUMS,
        whole_step=True,
    ),
    Workload(
        "graphsage-fresh",
        "inference",
        "graphs",
        "GraphSAGE on a neighbourhood sampled anew for each call: 2,048 nodes, 16,384 edges, summed by scatter_add.",
        partial(sage, nodes=2048, edges=16_384, width=128, layers=2),
        partial(sage, nodes=40, edges=120, width=16, layers=2),
        calls=50,
        tolerance=1e-3,
        why_tolerance=SUMS,
    ),
)
