"""Captures take no more of a device than is counted, and all that is counted stays below the limit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pygraph
from pygraph.runtime.contract import Driver, Executable
from pygraph.runtime.cuda import bindings
from pygraph.runtime.cuda.capture import payload_of
from pygraph.runtime.cuda.executable import device_bytes
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.live import held_bytes
from pygraph.runtime.proof import Proof
from tests.gpu.programs import (
    DEVICE,
    EVERYTHING,
    assert_replayed,
    assert_same,
    compiled,
    device_tensor,
    figures,
    wrapped_regions,
)
from tests.gpu.replays import captured
from tests.runtime.regions import same_bits

MB = 1 << 20
PIECE = 64 * MB
"""The driver takes memory for graphs in pieces."""

WARM, MANY = 20, 200
SIZES = range(2, 202)

Function = Callable[[list[Any]], Sequence[Any]]


def outside() -> int:
    """Bytes of the device that are in use besides torch's allocator."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def launching(kind: str, launches: int) -> Function:
    """So many launches: ``sums``, each of the one before; every fourth one a product; or sums ``beside`` each other."""

    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        results = [x]
        for number in range(launches):
            before = x if kind == "beside" and number % 16 else results[-1]
            product = kind == "products" and number % 4 == 0
            results.append(torch.mm(before, y) if product else torch.add(before, y, alpha=number))
        return results[-16:] if kind == "beside" else results[-1:]

    return fn


def executables(
    driver: Driver, fn: Function, args: Sequence[Any], count: int, first: Captured, order: str
) -> list[Executable]:
    """So many of them, each replayed once. ``first``, which is right, proves their kernels."""
    found, proof = [], Proof()
    proof.add(first.program)
    for _ in range(count):
        made = capture(fn, driver, list(args), proof, order=order)
        assert isinstance(made, Captured), made
        assert made.executable.replay(list(args)) is not None
        found.append(made.executable)
    return found


class Instances:
    """So many instances of one captured graph, uploaded. ``lanes``: its nodes wait for those so many before them."""

    def __init__(self, driver: Driver, fn: Function, args: Sequence[Any], lanes: int) -> None:
        self.api = bindings.load()
        self.recording = driver.capture(fn, args)
        capture = payload_of(self.recording)
        assert capture.graph is not None
        self.graph = capture.graph.raw_cuda_graph()
        handles = [node.handle for node in capture.nodes if node is not None]
        if lanes > 1:
            bindings.replace_edges(self.graph, list(zip(handles, handles[lanes:], strict=False)))
        self.nbytes = device_bytes(capture.nodes, 1)
        self.alive: list[Any] = []

    def make(self, count: int) -> None:
        stream = self.api.CUstream(torch.cuda.current_stream().cuda_stream)
        for _ in range(count):
            self.alive.append(bindings.call(self.api.cuGraphInstantiate, self.api.CUgraph(self.graph), 0))
            bindings.call(self.api.cuGraphUpload, self.alive[-1], stream)

    def free(self, down_to: int) -> None:
        while len(self.alive) > down_to:
            bindings.call(self.api.cuGraphExecDestroy, self.alive.pop())


@pytest.mark.parametrize("kind", ["sums", "products", "beside"])
@pytest.mark.parametrize("launches", [1, 16, 128, 512])
def test_an_instance_takes_no_more_than_is_counted(
    driver: Driver, launches: int, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """And what is freed is there for the next ones."""
    args = [device_tensor(64, 64) / 64, device_tensor(64, 64) / 64]
    instances = Instances(driver, launching(kind, launches), args, lanes=8 if kind == "beside" else 1)
    try:
        instances.make(WARM)
        before = outside()
        instances.make(MANY)
        grown = outside() - before
        each = f"{grown / MANY / 1024:.0f} KiB an instance, counted {instances.nbytes / 1024:.0f} KiB"
        said = f"{launches} launches, {kind}: {each}"
        print(said)
        record_property("bytes", (launches, grown // MANY, instances.nbytes))
        assert grown <= MANY * instances.nbytes, said
        for _ in range(2):
            instances.free(WARM)
            instances.make(MANY)
        assert outside() - before <= max(grown, 0) + PIECE, f"{said}; again {(outside() - before) // MB} MB"
    finally:
        instances.free(0)


@pytest.mark.parametrize("kind", ["sums", "products", "beside"])
def test_an_executable_takes_no_more_than_is_counted(driver: Driver, kind: str) -> None:
    fn, args = launching(kind, 8), [device_tensor(64, 64) / 64, device_tensor(64, 64) / 64]
    order = "dependences" if kind == "beside" else "program"
    first = captured(driver, fn, args, order)
    kept = executables(driver, fn, args, WARM, first, order)
    before = outside()
    many = executables(driver, fn, args, MANY, first, order)
    grown = outside() - before
    counted = sum(executable.nbytes for executable in many)
    said = f"{kind}: {grown / MANY / 1024:.0f} KiB an executable, counted {counted / MANY / 1024:.0f} KiB"
    print(said)
    assert grown <= counted, said
    while many:
        many.pop().close()
    again = executables(driver, fn, args, MANY, first, order)
    assert outside() - before <= max(grown, 0) + PIECE, f"{said}; again {(outside() - before) // MB} MB"
    outputs = again[-1].replay(list(args))
    assert outputs is not None
    assert same_bits(outputs, list(fn(list(args))))
    del kept


def pointwise(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(x * w, -1) + x.sin(), x.relu()


@pytest.mark.usefixtures("fresh")
def test_two_hundred_sizes_that_return_in_turn_are_all_replayed() -> None:
    ours, w = compiled(pointwise, dynamic=True, **EVERYTHING), device_tensor(66)
    for _ in range(2):
        for size in SIZES[:WARM]:
            ours(device_tensor(size, 66), w)
    before, counted = outside(), held_bytes(w.device)
    for turn in range(4):
        replays = pygraph.counters().get("replays", 0)
        for size in SIZES:
            x = device_tensor(size, 66)
            assert_same(ours(x, w), pointwise(x, w), call=f"turn {turn}, size {size}")
    assert_replayed()
    assert pygraph.counters()["replays"] - replays == len(SIZES), figures()
    assert "evicted" not in pygraph.counters()
    grown = outside() - before  # none, where the driver has kept room of graphs that are gone
    assert grown <= held_bytes(w.device) - counted, figures()
    pygraph.release()
    assert held_bytes(w.device) == 0


@pytest.mark.usefixtures("fresh")
def test_a_program_without_tensors_counts_where_it_is_captured() -> None:
    call = compiled(lambda n: torch.arange(n, device=DEVICE).float().cos(), dynamic=True, **EVERYTHING)
    for size in (5, 6, 7):
        for _ in range(3):
            assert_same(call(size), torch.arange(size, device=DEVICE).float().cos(), call=size)
    assert_replayed()
    assert held_bytes(torch.device(DEVICE, 0)) == sum(
        region.record.held_bytes for region in wrapped_regions() if region.record is not None
    )
    assert held_bytes(torch.device(DEVICE, 0)) > 0


@pytest.mark.usefixtures("fresh")
def test_captures_of_another_program_make_room_and_results_are_right() -> None:
    one, w = compiled(pointwise, dynamic=True, **EVERYTHING), device_tensor(66)
    for _ in range(3):
        one(device_tensor(7, 66), w)
    limit = 4 * held_bytes(w.device)
    assert limit
    pygraph.release()
    options = {"memory_limit": limit, **EVERYTHING}
    first = compiled(lambda x, w: pointwise(x, w)[0] + 1, dynamic=True, **options)
    second = compiled(lambda x, w: (x @ w[:, None]).tanh(), dynamic=True, **options)
    for turn in range(40):
        x = device_tensor(3 + turn // 3 % 6, 66)
        assert_same(second(x, w), (x @ w[:, None]).tanh(), call=turn)
        if turn % 10 == 9:
            assert_same(first(x, w), pointwise(x, w)[0] + 1, call=f"of the first, after {turn}")
        assert held_bytes(w.device) <= limit
    assert held_bytes(w.device) > 0
    assert pygraph.counters()["evicted.memory-limit"] > 0
