"""The life of regions on CUDA: captured and compared, replayed from several threads and streams, freed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from pygraph.runtime.cuda import build as cuda_build
from pygraph.runtime.driver import Driver
from pygraph.runtime.host import build as host_build
from pygraph.runtime.region import Region, RegionOptions

WARM = 2


def cuda(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda")


def mlp(args: list[Any]) -> Any:
    x, w, v = args
    args.clear()
    return ((x @ w).relu() @ v, x.sum(0))


def decode(args: list[Any]) -> Any:
    cache, position, row = args
    args.clear()
    cache.index_copy_(0, position, row)
    return (torch.softmax(cache @ row.t(), 0),)


def test_a_region_is_captured_once_and_then_replayed(driver: Driver) -> None:
    region = Region(mlp, driver, name="mlp")
    for _ in range(6):
        args = [cuda(16, 32), cuda(32, 64), cuda(64, 8)]
        expected = mlp(list(args))
        outputs = region(list(args))
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert region.record.state == "replay", region.record
    assert (region.record.captures, region.record.replays) == (1, 6 - WARM)


def test_a_cache_is_written_in_place_once_per_call(driver: Driver) -> None:
    region = Region(decode, driver, name="decode")
    ours, theirs = torch.zeros(32, 16, device="cuda"), torch.zeros(32, 16, device="cuda")
    for step in range(8):
        row, position = cuda(1, 16), torch.tensor([step], device="cuda")
        expected = decode([theirs, position, row])
        outputs = region([ours, position.clone(), row.clone()])
        assert torch.equal(outputs[0], expected[0])
        assert torch.equal(ours, theirs)
        if step == 5:
            ours = ours.clone()
    assert region.record.state == "replay", region.record


def test_sizes_have_captures_of_their_own_up_to_the_cap(driver: Driver) -> None:
    region = Region(mlp, driver, name="mlp", options=RegionOptions(max_captures=3))
    for turn in range(3):
        for n in (4, 8, 16, 32, 64):
            args = [cuda(n, 32), cuda(32, 64), cuda(64, 8)]
            for _ in range(2 + turn):
                expected = mlp(list(args))
                outputs = region(list(args))
                assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert region.record.replays > 0
    region.close()


def test_nothing_grows_over_many_calls(driver: Driver) -> None:
    region = Region(mlp, driver, name="mlp")
    args = [cuda(256, 512), cuda(512, 512), cuda(512, 128)]
    for _ in range(4):
        region(list(args))
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for _ in range(1000):
        region(list(args))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved


def test_closing_gives_everything_back(driver: Driver) -> None:
    torch.cuda.synchronize()
    args = [cuda(64, 64), cuda(64, 64), cuda(64, 64)]
    mlp(list(args))
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    region = Region(mlp, driver, name="mlp")
    for _ in range(4):
        region(list(args))
    assert region.record.replays
    region.close()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before
    expected = mlp(list(args))
    assert all(torch.equal(a, b) for a, b in zip(region(list(args)), expected, strict=True))


def test_threads_share_a_region(driver: Driver) -> None:
    region = Region(mlp, driver, name="mlp")
    weights = [cuda(32, 64), cuda(64, 8)]
    region([cuda(16, 32), *weights])
    torch.cuda.synchronize()
    errors: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(40):
                x = torch.randn(16, 32, device="cuda", generator=generator)
                expected = mlp([x, *weights])
                outputs = region([x, *weights])
                if not all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)):
                    errors.append(f"thread {seed} got another result")
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert region.record.state == "replay", region.record


def test_pinned_memory_is_copied_beside_a_capture(driver: Driver) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def pin() -> None:
        try:
            stream = torch.cuda.Stream()
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    torch.randn(1 << 16).pin_memory().to("cuda", non_blocking=True)
                stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for _ in range(5):
            region = Region(mlp, driver, name="mlp")
            args = [cuda(16, 32), cuda(32, 64), cuda(64, 8)]
            for _ in range(4):
                region(list(args))
            assert region.record.state == "replay", region.record
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_verifying_every_call(driver: Driver) -> None:
    region = Region(mlp, driver, name="mlp", options=RegionOptions(verify_always=True))
    for _ in range(5):
        args = [cuda(16, 32), cuda(32, 64), cuda(64, 8)]
        expected = mlp(list(args))
        assert all(torch.equal(a, b) for a, b in zip(region(list(args)), expected, strict=True))
    assert region.record.replays == 3


@pytest.mark.parametrize("bad", ["item", "raises"])
def test_a_region_that_cannot_be_captured_is_answered(driver: Driver, bad: str) -> None:
    def fn(args: list[Any]) -> Any:
        (x,) = args
        if bad == "item":
            return (x * x.sum().item(),)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("only while capturing")
        return (x * 2,)

    region = Region(fn, driver, name="bad")
    for _ in range(5):
        x = cuda(8)
        assert torch.equal(region([x.clone()])[0], fn([x])[0])
    assert region.record.state == "uncaptured"
    assert region.record.reason


def test_the_native_halves_of_both_drivers_live_in_one_process() -> None:
    host, device = host_build.load(), cuda_build.load()
    assert host.OutputKind is not device.OutputKind
    assert {kind.name for kind in host.OutputKind.__members__.values()} == set(device.OutputKind.__members__)
