"""Compiled programs called from the user's streams and threads, beside pinned copies, with streams of their own.

Runs after the training tests: in torch 2.11, a compilation with dynamic sizes makes AOTAutograd refuse a checkpointed
model later in the process (``Node mm_4 was invalid, but is output``), with Inductor alone, too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import pygraph
from tests.gpu.programs import DEVICE, EVERYTHING, assert_replayed, assert_same, compiled, device_tensor, figures

CALLS = 8
THREADS = 4

pytestmark = pytest.mark.usefixtures("fresh")


def block(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x
    for _ in range(6):
        y = torch.tanh(y @ w) + x
    return y, y.sum(0)


def double(*size: int) -> torch.Tensor:
    """Double precision, so that only what was read too early or written over can differ from eager."""
    return device_tensor(*size, dtype=torch.float64)


def test_calls_on_a_stream_of_the_user() -> None:
    """Each call reads what was just made on its stream, while the default stream is kept busy."""
    call = compiled(block, **EVERYTHING)
    w, side = double(256, 256) / 16, torch.cuda.Stream()
    busy = device_tensor(2048, 2048)
    side.wait_stream(torch.cuda.current_stream())
    for turn in range(CALLS):
        busy = torch.tanh(busy @ busy)
        with torch.cuda.stream(side):
            torch.manual_seed(turn)
            x = double(128, 256)
            actual = call(x, w)
            expected = block(x, w)
        side.synchronize()
        assert_same(actual, expected, call=turn)
    assert_replayed()


@pytest.mark.parametrize("sizes", [1, 3])
def test_threads_with_streams_of_their_own(sizes: int) -> None:
    """One compiled function, captured while other threads call it; with three sizes, several captures are made."""
    call = compiled(block, dynamic=sizes > 1, **EVERYTHING)
    w = double(256, 256) / 16
    call(double(96, 256), w)  # compiled in one thread: what is tested is calling it from several
    torch.cuda.synchronize()

    def work(i: int) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(i)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(5 * CALLS):
                rows = 96 + 32 * (turn % sizes)
                x = torch.randn(rows, 256, device=DEVICE, dtype=torch.float64, generator=generator)
                actual, expected = call(x, w), block(x, w)
                torch.cuda.current_stream().synchronize()
                assert_same(actual, expected, call=f"{turn} of thread {i}")

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    assert_replayed()


def test_a_loader_pins_memory_beside_captures() -> None:
    """The loader's thread pins and frees memory while batches of new lengths are captured."""
    call = compiled(block, dynamic=True, **EVERYTHING)
    w = double(256, 256) / 16
    call(double(40, 256), w)
    batches: Any = [torch.full((64 + 32 * (i // 3), 256), 0.01 * i, dtype=torch.float64) for i in range(48)]
    loader = DataLoader(batches, batch_size=None, num_workers=2, pin_memory=True, prefetch_factor=4)
    for _ in range(2):
        for place, batch in enumerate(loader):
            assert batch.is_pinned()
            x = batch.to(DEVICE, non_blocking=True)
            assert_same(call(x, w), block(x, w), call=place)
        assert place == len(batches) - 1
    assert_replayed()
    captures = sum(r.record.captures for report in pygraph.reports() for r in report.regions if r.record is not None)
    assert captures >= 10, figures()


class Branches(nn.Module):
    """Two branches, one of them on a stream that the model holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.left, self.right = (nn.Linear(256, 256, device=DEVICE, dtype=torch.float64) for _ in range(2))
        self.last = nn.Linear(256, 64, device=DEVICE, dtype=torch.float64)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            left = torch.tanh(self.left(x)) @ self.left.weight
        right = torch.sigmoid(self.right(x)) @ self.right.weight
        main.wait_stream(self.side)
        return self.last(torch.relu(left + right))


def test_streams_inside_of_a_model() -> None:
    """Whatever Dynamo makes of them (graphs that are cut there, as a rule), results are eager's."""
    model = Branches()
    call = compiled(model, **EVERYTHING)
    for turn in range(CALLS):
        torch.manual_seed(turn)
        x = double(128, 256)
        expected = model(x)
        actual = call(x)
        torch.cuda.synchronize()
        assert_same(actual, expected, call=turn)
    assert not [report.error for report in pygraph.reports() if report.error], figures()
