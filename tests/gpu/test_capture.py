"""Captures that fail leave nothing behind; captures that succeed cost no memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.recording import AllocationKind
from pygraph.runtime.contract import Driver
from tests.gpu.replays import assert_replays

Region = Callable[[list[Any]], Sequence[Any]]
kept: list[torch.Tensor] = []


def cuda(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda")


def item(args: list[Any]) -> Any:
    y = args[0] * 2
    return (y * y.sum().item(),)


def nonzero(args: list[Any]) -> Any:
    return (torch.nonzero(args[0] > 0),)


def to_host(args: list[Any]) -> Any:
    return (args[0].cpu(),)


def from_host(args: list[Any]) -> Any:
    return (args[0] + torch.ones(4).cuda(),)


def raises(args: list[Any]) -> Any:
    y = args[0] * 2
    raise ValueError(f"no such thing {tuple(y.shape)}")


def draws_then_raises(args: list[Any]) -> Any:
    torch.rand_like(args[0])
    torch.cuda.current_stream().synchronize()
    return ()


def survives(args: list[Any]) -> Any:
    kept.append(args[0] * 2)
    return (args[0] + 1,)


def unjoined(args: list[Any]) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = args[0] * 2
    return (y,)


def returns_a_string(args: list[Any]) -> Any:
    return (args[0] * 2, "text")


FAILING: dict[str, tuple[Region, str]] = {
    "item": (item, "host-read"),
    "nonzero": (nonzero, "capture-failed"),
    "to_host": (to_host, "host-memory"),
    "from_host": (from_host, "host-memory"),
    "raises": (raises, "capture-failed"),
    "draws_then_raises": (draws_then_raises, "capture-failed"),
    "survives": (survives, "survivor"),
    "unjoined": (unjoined, "capture-failed"),
    "returns_a_string": (returns_a_string, "unsupported-output"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_capture_that_fails_leaves_everything_usable(driver: Driver, name: str) -> None:
    region, reason = FAILING[name]
    x = cuda(4)
    before = torch.cuda.get_rng_state()
    for _ in range(2):
        with pytest.raises(CaptureError) as caught:
            driver.capture(region, [x])
        assert caught.value.reason == reason, str(caught.value)
        kept.clear()
    torch.cuda.synchronize()
    torch.manual_seed(3)
    first = torch.rand(100, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(100, device="cuda"))
    square = x.view(2, 2)
    assert torch.allclose((square @ square).cpu(), square.cpu() @ square.cpu(), atol=1e-2)
    torch.cuda.set_rng_state(before)
    assert_replays(driver, lambda args: (torch.rand_like(args[0]) + args[0] * 2,), [x])


def test_raw_memory_that_an_operator_keeps_refuses_its_capture_and_no_other(driver: Driver) -> None:
    raw: list[int] = []

    def region(args: list[Any]) -> Any:
        raw.append(torch.cuda.caching_allocator_alloc(1 << 10))
        return (args[0] * 2,)

    for _ in range(3):
        with pytest.raises(CaptureError) as caught:
            driver.capture(region, [cuda(4)])
        assert caught.value.reason == "survivor", str(caught.value)
        assert torch.isfinite(cuda(1 << 20).sum())  # ordinary memory, allocated while raw memory of a capture is out
    assert_replays(driver, lambda args: (args[0] * 2,), [cuda(4)])
    for address in raw:
        torch.cuda.caching_allocator_delete(address)
    assert_replays(driver, lambda args: (args[0] * 2,), [cuda(4)])


@pytest.mark.parametrize(
    ("argument", "reason"),
    [(torch.zeros(3), "host-memory"), ("text", "unsupported-argument"), ([1], "unsupported-argument")],
)
def test_arguments_that_cannot_be_stood_in_for(driver: Driver, argument: Any, reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        driver.capture(lambda args: (args[0] * 2,), [cuda(3), argument])
    assert caught.value.reason == reason


def test_a_capture_inside_a_callers_own_capture_is_refused(driver: Driver) -> None:
    x = cuda(4)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(CaptureError) as caught:
            driver.capture(lambda args: (args[0] * 2,), [x])
        x + 1
    assert caught.value.reason == "outer-capture"


def test_while_the_caller_captures_nothing_is_waited_for(driver: Driver) -> None:
    x, graph = cuda(4), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not driver.synchronise(None)
        with driver.scratch_pool([x]) as transient, transient():
            y = x + 1
    graph.replay()
    assert torch.equal(y, x + 1)


def test_a_timer_is_asked_while_another_thread_captures(driver: Driver) -> None:
    """And times the device, whatever the host does meanwhile. Other processes may take half of the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    timer = driver.timer(device)
    assert timer is not None
    torch.cuda._sleep(20_000_000)
    timer.stop()
    early = timer.seconds()
    torch.cuda._sleep(20_000_000)
    x, graph, found = cuda(4), torch.cuda.CUDAGraph(), list[Any]()

    def ask() -> None:
        found.append(timer.seconds())

    torch.cuda.synchronize()
    time.sleep(0.2)
    with torch.cuda.graph(graph):  # no thread may do anything unsafe
        assert driver.timer(device) is None
        thread = Thread(target=ask)
        thread.start()
        thread.join()
        y = x + 1
    graph.replay()
    assert torch.equal(y, x + 1)
    assert early is None
    assert 0.7 < found[0] / (20_000_000 / 1.8e9) < 5


def test_captures_that_are_alive_are_disjoint_and_nothing_is_reused(driver: Driver) -> None:
    def region(args: list[Any]) -> Any:
        y = args[0]
        for _ in range(10):
            y = y * 2
        return (y,)

    recordings = [driver.capture(region, [cuda(1000)]) for _ in range(3)]
    allocations = [a for r in recordings for a in r.allocations if a.kind is not AllocationKind.CONSTANT]
    ranges = sorted((a.address, a.address + a.nbytes) for a in allocations)
    assert all(low[1] <= high[0] for low, high in pairwise(ranges))
    pool = [a for a in recordings[0].allocations if a.kind is AllocationKind.POOL]
    assert [(a.nbytes, a.born) for a in pool] == [(4000, i) for i in range(10)]


def test_captures_cost_no_memory(driver: Driver) -> None:
    def region(args: list[Any]) -> Any:
        y = args[0]
        for _ in range(10):
            y = y.sin() + args[1]
        return (y,)

    args = [cuda(16 << 20), cuda(16 << 20)]
    region(list(args))
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    recordings = [driver.capture(region, args) for _ in range(2)]
    assert torch.cuda.memory_allocated() - allocated < 4096
    assert torch.cuda.memory_reserved() - reserved <= 2 << 20
    assert sum(a.nbytes for a in recordings[0].allocations) > 1 << 30
