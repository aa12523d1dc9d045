"""Loops on the device against loops in Python: an integrator, a diffusion sampler, and the rollout of a policy.

python examples/loops.py
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn

import pygraph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network(inputs: int, outputs: int) -> nn.Module:
    made = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, outputs))
    return made.to(DEVICE).requires_grad_(False)


def integrator() -> tuple[Callable[[Any], Any], Any, int, Any]:
    """rk4 with 200 steps of a field that a network gives."""
    field, h = network(8, 8), 0.01

    def step(x: torch.Tensor) -> torch.Tensor:
        first = field(x)
        second = field(x + h / 2 * first)
        third = field(x + h / 2 * second)
        return x + h / 6 * (first + 2 * second + 2 * third + field(x + h * third))

    return step, torch.randn(32, 8, device=DEVICE), 200, field


def sampler() -> tuple[Callable[[Any], Any], Any, int, Any]:
    """20 ancestral steps of a diffusion model, with the schedule in a tensor that the iteration's number indexes."""
    denoiser = network(9, 8)
    betas = torch.linspace(1e-3, 0.1, 20, device=DEVICE)
    kept = torch.cumprod(1 - betas, 0)

    def step(state: Any) -> Any:
        x, left = state
        beta, all_kept = betas[left], kept[left]
        noise = denoiser(torch.cat([x, left.expand(x.shape[0], 1) / 20], -1))
        mean = (x - beta / (1 - all_kept).sqrt() * noise) / (1 - beta).sqrt()
        return mean + torch.where(left > 0, beta.sqrt(), 0.0) * torch.randn_like(x), left - 1

    return step, (torch.randn(16, 8, device=DEVICE), torch.tensor([19], device=DEVICE)), 20, [denoiser, betas, kept]


def rollout() -> tuple[Callable[[Any], Any], Any, int, Any]:
    """256 steps of a policy that draws actions, in a batch of pendulums on the device."""
    policy = network(2, 1)

    def step(state: Any) -> Any:
        angle, speed, total = state
        action = policy(torch.stack([angle, speed], -1))[:, 0] + 0.1 * torch.randn_like(angle)
        speed = (speed + 0.05 * (9.8 * torch.sin(angle) + action)).clamp(-8, 8)
        angle = angle + 0.05 * speed
        return angle, speed, total - angle**2 - 0.1 * speed**2

    start = [torch.rand(128, device=DEVICE), torch.zeros(128, device=DEVICE), torch.zeros(128, device=DEVICE)]
    return step, tuple(start), 256, policy


def main() -> None:
    torch.manual_seed(0)
    for make in (integrator, sampler, rollout):
        step, start, steps, held = make()
        for seed in range(4):
            torch.manual_seed(seed)
            began, state = perf_counter(), start
            for _ in range(steps):
                state = step(state)
            expected = torch.cat([each.double().flatten() for each in (state if isinstance(state, tuple) else [state])])
            total = expected.sum().item()
            between = perf_counter()
            torch.manual_seed(seed)
            found = pygraph.loop(step, start, steps=steps, held=held)
            parts = found.state if isinstance(found.state, tuple) else [found.state]
            same = torch.cat([each.double().flatten() for each in parts]).sum().item() == total
            ended = perf_counter()
        times = f"Python {1e3 * (between - began):.1f} ms, one launch {1e3 * (ended - between):.1f} ms"
        print(f"{make.__name__}: {times}, equal: {same}, {found.record}")


if __name__ == "__main__":
    main()
