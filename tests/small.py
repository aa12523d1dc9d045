"""Small models, compiled as users compile theirs, and what they leave behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pygraph

CALLS = 4
"""Enough calls for a region to run uncaptured, be captured, and be replayed."""


UNFUSED = {"inductor": {"fallback_by_default": True}}
"""Options of programs that call torch's operators one by one: Inductor takes a second for each kernel that it makes."""


class Mlp(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 32), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(32), nn.Linear(32, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Scaled(nn.Module):
    """Reads a scalar on the host in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        scale = hidden.sum().long().item()
        return self.second(hidden) * scale


def compiled(model: Callable[..., Any], backend: str = "pygraph", **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, options=options or None)


def replays() -> int:
    return pygraph.counters().get("replays", 0)


def living_regions() -> list[Any]:
    return [o for o in gc.get_objects() if type(o).__name__ == "Region" and "runtime" in type(o).__module__]
