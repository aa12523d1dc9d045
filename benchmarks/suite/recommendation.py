"""A recommendation model of the DLRM kind: embedding bags of categories, two perceptrons, products between all pairs.

Indices are other tensors in each call, as requests bring them.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle

import torch
from torch import nn

from benchmarks.suite.inference import floating
from benchmarks.suite.parts import in_turn, mlp
from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]

DENSE = 13
"""Numerical features, as in the Criteo data."""


class Dlrm(nn.Module):
    """``dense`` is [batch, 13], each of ``bags`` the indices [batch, in a bag] into a table; returns [batch, 1]."""

    pairs: torch.Tensor

    def __init__(self, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)]
        for bag in bags:
            nn.init.normal_(bag.weight, std=0.1)
        self.tables = nn.ModuleList(bags)
        self.bottom = mlp((DENSE, hidden, hidden // 2, width))
        self.top = mlp((width + tables * (tables + 1) // 2, hidden, hidden // 2, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, offset=-1))

    def forward(self, dense: torch.Tensor, *bags: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(bag) for table, bag in zip(self.tables, bags, strict=True))], 1)
        products = vectors @ vectors.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat((x, crossed), 1)))


def dlrm(
    compile: Compile, device: str, *, batch: int, tables: int, rows: int, width: int, hidden: int, bag: int
) -> Step:
    torch.manual_seed(0)
    dtype = floating(device)
    with torch.device(device):
        model = Dlrm(tables, rows, width, hidden).to(dtype).eval()
        requests = [
            [torch.randn(batch, DENSE, dtype=dtype), *(torch.randint(0, rows, (batch, bag)) for _ in range(tables))]
            for _ in range(8)
        ]
    score, turns = compile(model), cycle(requests)

    return in_turn(score, turns)


def workload(batch: int, calls: int, why: str) -> Workload:
    return Workload(
        f"dlrm-{batch}",
        "inference",
        "recommendation",
        f"A DLRM with 26 embedding bags of 100,000 rows, batch {batch}, other indices in each call: {why}.",
        partial(dlrm, batch=batch, tables=26, rows=100_000, width=64, hidden=512, bag=4),
        partial(dlrm, batch=min(batch, 8), tables=4, rows=50, width=8, hidden=16, bag=3),
        calls=calls,
    )


WORKLOADS: tuple[Workload, ...] = (
    workload(1, 100, "many small kernels, 27 inputs that move"),
    workload(2048, 50, "a throughput service's size"),
)
