"""A suite for tests: programs so small that compiling them takes a second, one of them wrong when it is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS", "uncompiled"]


def wrong(compile: Compile, device: str) -> Step:
    """Off by a half on every side that compiles."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if torch.compiler.is_compiling() else x * 2

    step, x = compile(double), torch.ones(4, device=device)
    return lambda: step(x)


def training(compile: Compile, device: str) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8, device=device)
    step = compile(model)

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = step(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return run


def uncompiled(target: Any) -> Any:
    """Another backend, which compiles nothing."""
    return target


WORKLOADS = (
    Workload("wrong", "inference", "tests", "another function once compiled", wrong, wrong),
    Workload("dropout", "training", "tests", "draws random numbers", training, training, random=True),
    Workload("absent", "training", "tests", "", training, training, packages=("no_such_package",)),
)
