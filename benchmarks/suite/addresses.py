"""Programs of many tensors, at the same addresses in each call or at new ones: what following addresses costs.

Not models that anybody runs, but the one mechanism by itself: 300 inputs of which each is used by one small kernel.
"""

from __future__ import annotations

import itertools

import torch

from benchmarks.workload import Build, Compile, Step, Workload

__all__ = ["WORKLOADS"]

_WIDTH = 32


def _many(xs: list[torch.Tensor]) -> torch.Tensor:
    """Matrix products and sorts in turn, so that nothing is fused away."""
    total = xs[0]
    for i in range(0, len(xs), 3):
        first, second, third = xs[i : i + 3]
        total = torch.sort(total + first * second - third).values if i % 30 == 0 else total @ first + second
    return total


def _addresses(count: int, sets: int) -> Build:
    def build(compile: Compile, device: str) -> Step:
        step = compile(_many)
        torch.manual_seed(0)
        made = [[torch.randn(_WIDTH, _WIDTH, device=device) * 0.1 for _ in range(count)] for _ in range(sets)]
        turn = itertools.cycle(made)

        def run() -> torch.Tensor:
            with torch.no_grad():
                result: torch.Tensor = step(next(turn))
            return result

        return run

    return build


def _workload(name: str, sets: int, about: str) -> Workload:
    return Workload(
        name=name,
        kind="inference",
        domain="addresses",
        about=about,
        build=_addresses(300, sets),
        tiny=_addresses(12, sets),
        why_tolerance="float32 products in another order",
    )


WORKLOADS: tuple[Workload, ...] = (
    _workload("addresses-stable-300", 1, "300 small tensors that never move: the reference for the next one"),
    _workload("addresses-fresh-300", 2, "300 small tensors of which every one is elsewhere in each call"),
)
