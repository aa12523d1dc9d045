"""Simulations on grids: long chains of pointwise and shifted-difference operators over arrays that are new each step.

Fields are in float32, as such models have them; lengths and times are in grid cells and in cells per wave speed.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]

TIME_STEP, GRAVITY, VISCOSITY, DRAG, WIND = 0.1, 1.0, 0.2, 0.01, 0.002
BAND = 64
"""Grid cells from one maximum of the wind to the next: short enough that the surface never reaches the bottom."""

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = a
    for i in range(6):
        x = torch.sin(x * 0.5 + b) - x.cumsum(0)[:1] * 1e-9 if i == 3 else torch.tanh(x + b * 0.1)
    return x


def pointwise(compile: Compile, device: str, *, count: int) -> Step:
    """Other inputs for each call, as a simulation's time step produces them."""
    torch.manual_seed(0)
    pool = [torch.randn(count, device=device) for _ in range(6)]
    turns = cycle(range(len(pool)))
    run = compile(chain)

    def step() -> Any:
        i = next(turns)
        with torch.no_grad():
            return run(pool[i], pool[i - 1])

    return step


def east(x: torch.Tensor) -> torch.Tensor:
    return torch.roll(x, -1, 1)


def west(x: torch.Tensor) -> torch.Tensor:
    return torch.roll(x, 1, 1)


def north(x: torch.Tensor) -> torch.Tensor:
    return torch.roll(x, -1, 0)


def south(x: torch.Tensor) -> torch.Tensor:
    return torch.roll(x, 1, 0)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The Laplacian."""
    return east(x) + west(x) + north(x) + south(x) - 4 * x


def ocean_step(
    u: torch.Tensor, v: torch.Tensor, h: torch.Tensor, heat: torch.Tensor, coriolis: torch.Tensor, wind: torch.Tensor
) -> State:
    """One time step of the shallow-water equations with a tracer that drives the flow, periodic on all sides.

    ``u`` and ``v`` are velocities on the east and north faces of cells, ``h`` thickness and ``heat`` the tracer at
    their centres (an Arakawa C grid). Potential vorticity is advected as in Sadourny's energy-conserving scheme;
    thickness first, then momentum from the new one (forward-backward), which is stable for gravity waves.
    """
    along, across = 0.5 * (h + east(h)) * u, 0.5 * (h + north(h)) * v
    thick = h - TIME_STEP * (along - west(along) + across - south(across))
    corner = 0.25 * (h + east(h) + north(h) + east(north(h)))
    vorticity = (coriolis + east(v) - v - north(u) + u) / corner
    kinetic = 0.25 * (u * u + west(u * u) + v * v + south(v * v))
    head = GRAVITY * thick * (1 - 0.02 * torch.tanh(heat)) + kinetic
    turn_u = vorticity * 0.5 * (across + east(across))
    turn_v = vorticity * 0.5 * (along + north(along))
    depth_u, depth_v = 0.5 * (h + east(h)), 0.5 * (h + north(h))
    push_u = 0.5 * (turn_u + south(turn_u)) / depth_u - east(head) + head + VISCOSITY * spread(u) + wind
    push_v = -0.5 * (turn_v + west(turn_v)) / depth_v - north(head) + head + VISCOSITY * spread(v)
    speed = torch.sqrt(2 * kinetic + 1e-12)
    new_u = (u + TIME_STEP * push_u) / (1 + TIME_STEP * DRAG * (1 + speed))
    new_v = (v + TIME_STEP * push_v) / (1 + TIME_STEP * DRAG * (1 + speed))
    carried = 0.5 * (new_u * (east(heat) - heat) + west(new_u) * (heat - west(heat)))
    carried = carried + 0.5 * (new_v * (north(heat) - heat) + south(new_v) * (heat - south(heat)))
    warmed = heat + TIME_STEP * (VISCOSITY * spread(heat) - carried + 0.01 * torch.exp(-heat * heat) - 0.005 * heat)
    return new_u, new_v, thick, warmed


def ocean(compile: Compile, device: str, *, rows: int, columns: int) -> Step:
    """The state that a step returns is what the next one starts from."""
    torch.manual_seed(0)
    phase_y, phase_x = (torch.arange(count, device=device) * (2 * math.pi / BAND) for count in (rows, columns))
    coriolis = 0.05 + 0.01 * torch.cos(phase_y)[:, None]
    wind = WIND * torch.sin(phase_y)[:, None] * (1 + 0.5 * torch.cos(phase_x))
    u, v, h, heat = (0.01 * torch.randn(rows, columns, device=device) for _ in range(4))
    state = (u, v, 1 + h, heat)
    run = compile(ocean_step)

    def step() -> Any:
        nonlocal state
        with torch.no_grad():
            state = run(*state, coriolis, wind)
        return state

    return step


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "pointwise-256mb",
        "inference",
        "science",
        "A chain of pointwise operators, with one running sum, over other 256 MB inputs for each call: copies into a "
        "graph's inputs cost as much as the work.",
        partial(pointwise, count=64 * 2**20),
        partial(pointwise, count=2**12),
        tolerance=1e-4,
        why_tolerance="float32 sines and tangents of other libraries, six in a row",
    ),
    Workload(
        "ocean",
        "inference",
        "science",
        "A time step of a shallow-water ocean with a tracer, four fields of 4096 x 4096: long pointwise chains over "
        "large arrays that the last step made.",
        partial(ocean, rows=4096, columns=4096),
        partial(ocean, rows=64, columns=64),
        feeds_back=True,
        tolerance=1e-3,
        why_tolerance="float32 differences of nearly equal numbers, carried from step to step",
    ),
    Workload(
        "stencil-small",
        "inference",
        "science",
        "The same time step on a grid of 128 x 128, where launches cost more than the work.",
        partial(ocean, rows=128, columns=128),
        partial(ocean, rows=64, columns=64),
        calls=200,
        feeds_back=True,
        tolerance=1e-3,
        why_tolerance="float32 differences of nearly equal numbers, carried from step to step",
    ),
)
