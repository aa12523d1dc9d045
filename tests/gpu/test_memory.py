"""Peak memory of replays, against that of the same program uncaptured."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from benchmarks.suite.parts import Perceptron
from pygraph.compat import clear_cublas_workspaces
from pygraph.runtime.contract import Driver
from tests.gpu.programs import assert_replayed, compiled
from tests.gpu.replays import captured
from tests.runtime.regions import copy_arguments, same_bits

MB = 1 << 20


def backward_like(args: list[Any]) -> tuple[Any, ...]:
    """Reads saved activations last to first, lets go of each, and returns something of the same size for each."""
    saved = list(args)
    args.clear()
    gradient = torch.ones_like(saved[-1])
    outputs = []
    while saved:
        activation = saved.pop()
        gradient = gradient * activation
        outputs.append(gradient.cos() + activation)
        del activation
    return tuple(outputs)


def peak(run: Callable[[], Any]) -> tuple[Any, int]:
    """The result of ``run``, and the most bytes that were allocated meanwhile."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated()


def test_a_large_region_is_launched_in_segments(driver: Driver) -> None:
    args = [torch.randn(8 * MB, device="cuda") for _ in range(24)]
    made = captured(driver, backward_like, args)
    again = copy_arguments(args)
    expected, uncaptured = peak(lambda: backward_like(again))
    reference = [t.cpu() for t in expected]
    del expected, again
    again = copy_arguments(args)
    outputs, replayed = peak(lambda: made.executable.replay(again))
    assert outputs is not None
    assert again == []
    assert same_bits([t.cpu() for t in outputs], reference)
    assert replayed <= 1.05 * uncaptured, (replayed / MB, uncaptured / MB)
    del outputs
    for _ in range(2):
        again = copy_arguments(args)
        kept = made.executable.replay(list(again))  # the caller keeps its arguments
        assert kept is not None
        assert same_bits([t.cpu() for t in kept], reference)


def steps(compile_: Callable[[nn.Module], Callable[..., Any]], *, train: bool) -> tuple[list[float], int, int]:
    """Results, peak of allocated bytes over warm calls, and bytes reserved at the end."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = nn.Sequential(*(Perceptron(1024) for _ in range(12))).cuda().bfloat16()
    call = compile_(model)
    values: list[float] = []

    def step() -> None:
        x = torch.ones(8192, 1024, device="cuda", dtype=torch.bfloat16)
        result = call(x).float().square().mean()
        if train:
            result.backward()
            model.zero_grad(set_to_none=True)
        values.append(float(result.detach()))

    for _ in range(5):
        step()
    gc.collect()
    torch.cuda.synchronize()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    _, most = peak(lambda: [step() for _ in range(3)])
    return values, most, torch.cuda.memory_reserved()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("train", "excess"), [(False, 1.03), (True, 1.05)])
def test_a_program_needs_no_more_than_with_inductor_alone(train: bool, excess: float) -> None:
    with torch.set_grad_enabled(train):
        expected, plain, plain_reserved = steps(torch.compile, train=train)
        pygraph.reset()
        actual, ours, reserved = steps(compiled, train=train)
    assert_replayed()
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)
    assert ours <= excess * plain, f"{ours / MB:.0f} MB instead of {plain / MB:.0f}"
    assert reserved <= excess * plain_reserved, f"reserved {reserved / MB:.0f} MB, not {plain_reserved / MB:.0f}"


def stepped(call: Callable[..., Any], calls: int) -> int:
    """The most bytes that are allocated in a call, after ``calls`` of them."""
    x = torch.ones(512, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(calls):
        call(x)
    return peak(lambda: call(x))[1]


def doubled(args: list[Any]) -> tuple[Any, ...]:
    return (args[0] * 2 + 1, args[0].sin().flip(0))


def between(args: list[Any]) -> tuple[Any, ...]:
    """Holds several intermediates of the size of its argument at once, and returns a number."""
    (x,) = args
    args.clear()
    waves = [x.sin(), x.cos(), x.tanh(), x.exp()]
    return (torch.stack([(wave * (i + 1)).sum() for i, wave in enumerate(waves)]),)


def test_a_workspace_takes_the_room_that_tensors_left(driver: Driver) -> None:
    """In pieces it fits where the intermediates of the uncaptured function did."""
    args = [torch.randn(6 * MB, device="cuda")]  # 24 MB
    made = captured(driver, between, args)
    assert made.program.layout.nbytes >= 4 * 24 * MB
    expected = between(list(args))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = [torch.empty(24 * MB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    room.clear()
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        outputs = made.executable.replay(list(args))
        assert outputs is not None, "the replay turned its arguments away"
        assert same_bits(outputs, expected)
    torch.cuda.synchronize()
    more = torch.cuda.memory_reserved() - reserved
    assert more <= 2 * MB, f"{more >> 20} MB more beside {6 * 24} MB of room, for {made.program.layout.nbytes >> 20} MB"


def test_without_memory_a_replay_raises_and_the_next_one_is_right(driver: Driver) -> None:
    """The allocator's error reaches the caller as it is, and nothing of the call is left behind."""
    made = captured(driver, doubled, [torch.randn(16 * MB, device="cuda")])
    args = [torch.randn(16 * MB, device="cuda")]
    expected = doubled(list(args))
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * MB) / total)
    held: list[torch.Tensor] = []  # blocks that earlier tests left behind with the allocator
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(16 * MB, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            made.executable.replay(list(args))
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    for _ in range(2):
        outputs = made.executable.replay(list(args))
        assert outputs is not None, "the replay turned its arguments away"
        assert same_bits(outputs, expected)


OUTSIDE = """
import torch

def outside():
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) >> 20

def pointwise(x, y):
    return x.sin() * y + 1

call = torch.compile(pointwise, backend="pygraph")
with torch.no_grad():
    x, y = torch.randn(2, 64, device="cuda")
    torch.testing.assert_close(call(x, y), x.sin() * y + 1)
    before = outside()
    for _ in range(4):
        call(x, y)
    torch.cuda.synchronize()
import pygraph
print([region.state for report in pygraph.reports() for region in report.regions], outside() - before)
"""
"""What a process holds of the device besides torch's allocator, before a first capture and after it."""


def test_a_program_without_products_holds_no_library() -> None:
    """A handle of cuBLAS takes 66 MB. The driver takes memory for graphs in pieces of 32 MB. Other processes may take
    memory of the device meanwhile: hence several attempts."""
    grown: list[int] = []
    while len(grown) < 5 and not (grown and 0 <= grown[-1] <= 48):
        ran = subprocess.run([sys.executable, "-c", OUTSIDE], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        state, _, more = ran.stdout.strip().rpartition(" ")
        assert state == "['replay']"
        grown.append(int(more))
    assert 0 <= grown[-1] <= 48, f"{grown} MB"
