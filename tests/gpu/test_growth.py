"""Nothing grows over a thousand calls, on the device and in the process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.programs import DEVICE, EVERYTHING, assert_replayed, compiled, device_tensor, figures

MB = 1 << 20
FEW, MANY = 100, 1000
SEGMENT = 2 * MB
"""The allocator's smallest segment: what a program of few MB reserves differs by whole ones of them."""

HOST_GROWTH = 4 * MB
"""What the process may grow by in 900 calls: 4.6 KB per call. Heaps are not of one size from one moment to the next."""

Step = Callable[[], Any]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

pytestmark = pytest.mark.usefixtures("fresh")


def held() -> tuple[int, int, int]:
    """Bytes allocated and reserved on the device, and resident in the process."""
    gc.collect()
    torch.cuda.synchronize()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident


def fresh_addresses(compile: Compile) -> Step:
    """Each argument of each call is a new tensor, and what earlier calls took and gave lives on for three calls."""
    call = compile(lambda x, y, w: ((x * y).sin() @ w, x + y.relu(), y.sum(0)))
    kept: list[Any] = []
    turn = 0

    def step() -> Any:
        nonlocal turn
        turn += 1
        args = [device_tensor(256, 1024), device_tensor(256, 1024), device_tensor(1024, 1024)]
        odd = torch.empty(1024 * (1 + turn % 9) + 512, device=DEVICE)
        with torch.no_grad():
            kept.append((args, odd, call(*args)))
        del kept[:-3]

    return step


def training(compile: Compile) -> Step:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    call = compile(model)

    def step() -> Any:
        with torch.enable_grad():
            call(device_tensor(1024, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def times(step: Step, count: int) -> None:
    for _ in range(count):
        step()


@pytest.mark.parametrize("program", [fresh_addresses, training])
def test_nothing_grows_over_a_thousand_calls(program: Callable[[Compile], Step]) -> None:
    step = program(lambda function: compiled(function, **EVERYTHING))
    times(step, FEW)
    before = held()
    times(step, MANY - FEW)
    after = held()
    assert_replayed()
    allocated, reserved, resident = (now - then for now, then in zip(after, before, strict=True))
    said = f"after {FEW} calls {before}, after {MANY} calls {after}\n{figures()}"
    assert allocated <= 4096, said
    assert reserved <= SEGMENT, said
    assert resident <= HOST_GROWTH, said
