"""Dynamic shapes: one compiled graph for every size, captures up to a limit, memory that stays where it was."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph.runtime.cuda import CudaDriver
from pygraph.runtime.live import held_bytes
from pygraph.runtime.region import RegionRecord
from tests.gpu.programs import EVERYTHING, assert_replayed, assert_same, compiled, device_tensor, figures

SIZES = tuple(range(4, 204, 4))
MB = 1 << 20
WIDTH = 66
"""No size equals the width: Dynamo would take the two for one symbol."""

pytestmark = pytest.mark.usefixtures("fresh")


def doubles(*size: int) -> torch.Tensor:
    """Double precision, in which no order of a sum shows at the tolerance of a comparison."""
    return device_tensor(*size, dtype=torch.float64)


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = F.gelu(F.layer_norm(x, (WIDTH,)) @ w)
    scores = torch.softmax(hidden @ v @ x.t(), -1)
    return x + scores @ x, hidden.sum(0)


def pointwise(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(x * w, -1) + x.sin(), x.relu()


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return doubles(WIDTH, WIDTH) / 8, doubles(WIDTH, WIDTH) / 8


def shuffled(passes: int) -> list[int]:
    """Every size ``passes`` times, in random order."""
    return random.Random(0).sample(SIZES * passes, passes * len(SIZES))


def only_record() -> RegionRecord:
    """The record of the one region of the one graph."""
    records = [region.record for report in pygraph.reports() for region in report.regions if region.record is not None]
    assert len(pygraph.reports()) == 1, figures()
    assert len(records) == 1, figures()
    return records[0]


@dataclass
class Counted:
    """Captures that drivers made meanwhile, and their executables that are still alive."""

    captures: int
    executables: weakref.WeakSet[Any]

    def alive(self) -> int:
        gc.collect()
        return len(self.executables)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts what drivers are asked for. (Patching an instance would leave its bound methods behind in it.)"""
    capture, instantiate = CudaDriver.capture, CudaDriver.instantiate
    found = Counted(0, weakref.WeakSet())

    def capturing(self: CudaDriver, *arguments: Any, **named: Any) -> Any:
        found.captures += 1
        return capture(self, *arguments, **named)

    def instantiating(self: CudaDriver, program: Any) -> Any:
        executable = instantiate(self, program)
        found.executables.add(executable)
        return executable

    monkeypatch.setattr(CudaDriver, "capture", capturing)
    monkeypatch.setattr(CudaDriver, "instantiate", instantiating)
    return found


@pytest.mark.parametrize("marked", [False, True], ids=["dynamic", "mark_dynamic"])
def test_one_graph_serves_every_size(marked: bool, counted: Counted) -> None:
    dynamic = None if marked else True
    ours = compiled(block, dynamic=dynamic, **EVERYTHING)
    theirs = torch.compile(block, dynamic=dynamic)
    w, v = weights()
    for turn, size in enumerate(shuffled(4)):
        torch.manual_seed(turn)
        x = doubles(size, WIDTH)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        assert_same(ours(x, w, v), theirs(x, w, v), call=f"{turn} of size {size}")
    assert_replayed()
    record = only_record()
    assert record.captures == len(SIZES), figures()
    # one call of each size runs uncaptured, and one is captured: by an uncaptured run, or a replay where it is proven
    assert record.proven >= len(SIZES) // 2, figures()
    assert record.uncaptured == 2 * len(SIZES) - record.proven, figures()
    assert record.replays == 2 * len(SIZES) + record.proven, figures()
    assert counted.alive() == len(SIZES)


@pytest.mark.parametrize("sizes", [(64, 128, 192, 320), (128, 64)], ids=str)
def test_another_size_of_the_same_launches_is_captured_once(sizes: tuple[int, ...], counted: Counted) -> None:
    """Of the first size, which takes two captures, the kernel is proven: any other one takes one and no comparison."""
    ours = compiled(pointwise, **EVERYTHING)
    w = doubles(WIDTH)
    made = []
    for size in sizes:
        before = counted.captures
        for _ in range(4):
            x = doubles(size, WIDTH)
            torch._dynamo.mark_dynamic(x, 0)
            assert_same(ours(x, w), pointwise(x, w), call=f"size {size}")
        made.append(counted.captures - before)
    assert_replayed()
    assert made == [2] + [1] * (len(sizes) - 1), f"captures per size: {made}\n{figures()}"
    record = only_record()
    proven = len(sizes) - 1
    assert (record.captures, record.proven, record.replays) == (len(sizes), proven, 2 * len(sizes) + proven), figures()


def test_memory_stays_where_it_was_after_every_size_has_come(counted: Counted) -> None:
    cap, (w, v) = 8, weights()
    first = compiled(block, dynamic=True, **EVERYTHING)
    for _ in range(3):
        first(doubles(max(SIZES), WIDTH), w, v)
    limit = cap * only_record().held_bytes
    pygraph.release()
    call = compiled(block, dynamic=True, memory_limit=limit, **EVERYTHING)
    passes = []
    for _ in range(3):
        for size in shuffled(3):
            call(doubles(size, WIDTH), w, v)
        gc.collect()
        torch.cuda.synchronize()
        passes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    said = f"bytes allocated and reserved after each pass: {passes}\n{figures()}"
    assert 0 < held_bytes(torch.device("cuda", 0)) <= limit, said
    assert 0 < counted.alive() <= 2 * cap, f"{counted.alive()} captures are alive\n{said}"
    for allocated, reserved in passes[1:]:
        assert allocated <= passes[0][0] + MB // 16, said
        assert reserved <= 1.02 * passes[0][1] + 4 * MB, said  # two of the allocator's small segments
