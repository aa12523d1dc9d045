"""Memory of a comparison is given back: reserved and peak memory are afterwards those of uncaptured calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pygraph.compat import clear_cublas_workspaces
from pygraph.runtime.contract import Driver
from pygraph.runtime.region import Region
from tests.gpu.test_memory import MB, peak

Function = Callable[[list[Any]], Sequence[Any]]


@pytest.fixture(autouse=True)
def _transient_memory(driver: Driver) -> None:
    """Earlier tests leave nothing that would be counted here."""
    settle()
    torch.cuda.empty_cache()


def settle() -> None:
    """Nothing is under way, nothing waits to be collected, and torch holds no workspaces."""
    gc.collect()
    torch.cuda.synchronize()
    clear_cublas_workspaces()


def only_read(args: list[Any]) -> Sequence[Any]:
    """Reads 256 MiB."""
    x, *weights = args
    args.clear()
    return [x * weight.sum() for weight in weights]


def written(args: list[Any]) -> Sequence[Any]:
    """Writes one row of each of two caches of 64 MiB, and reads them."""
    keys, values, position, row = args
    args.clear()
    keys.index_copy_(0, position, row)
    values.index_copy_(0, position, row * 2)
    return [keys.sum(0) * row, values.sum(0) * row]


def mlp(args: list[Any]) -> Sequence[Any]:
    """Four layers."""
    x, *weights = args
    args.clear()
    for weight in weights:
        x = (x @ weight).relu()
    return [x]


def weights_to_read() -> list[Any]:
    return [torch.ones(1024, device="cuda"), *(torch.randn(16 * MB, device="cuda") for _ in range(4))]


def caches_to_write() -> list[Any]:
    caches = [torch.randn(16 * 1024, 1024, device="cuda") for _ in range(2)]
    return [*caches, torch.tensor([5], device="cuda"), torch.randn(1, 1024, device="cuda")]


def calls(run: Function, args: Sequence[Any], times: int) -> None:
    for _ in range(times):
        run(list(args))


@pytest.mark.parametrize(("fn", "make"), [(only_read, weights_to_read), (written, caches_to_write)])
def test_copies_are_given_back(driver: Driver, fn: Function, make: Callable[[], list[Any]]) -> None:
    """A comparison copies 256 MB of either region: of written arguments there are two copies."""
    args = make()
    _, plain = peak(lambda: calls(fn, args, 3))
    settle()
    reserved = torch.cuda.memory_reserved()
    most = 1.03 * reserved + 2 * MB

    region = Region(fn, driver, name="region")
    _, compared = peak(lambda: calls(region, args, 2))
    assert region.record.captures == 1, region.record
    assert compared >= plain + 255 * MB, f"{compared / MB:.1f} MB at most, of {plain / MB:.1f} MB uncaptured"
    settle()
    after = torch.cuda.memory_reserved()
    assert after <= most, f"{after / MB:.1f} MB are reserved, {reserved / MB:.1f} MB before the region was captured"

    _, replayed = peak(lambda: calls(region, args, 4))
    assert region.record.replays == 4, region.record
    assert replayed <= 1.03 * plain + 2 * MB, f"replays peak at {replayed / MB:.1f} MB, not {plain / MB:.1f}"
    after = torch.cuda.max_memory_reserved()
    assert after <= most, f"replays reserve {after / MB:.1f} MB, uncaptured calls {reserved / MB:.1f} MB"


def test_library_workspaces_are_not_held_twice(driver: Driver) -> None:
    args = [torch.randn(8, 256, device="cuda"), *(torch.randn(256, 256, device="cuda") for _ in range(4))]
    held = torch.cuda.memory_allocated()
    _, plain = peak(lambda: calls(mlp, args, 3))
    region = Region(mlp, driver, name="mlp")
    calls(region, args, 2)
    assert region.record.captures == 1, region.record
    now = torch.cuda.memory_allocated()
    assert now <= held + 2 * MB, f"{(now - held) / MB:.1f} MB are held after the comparison"
    _, replayed = peak(lambda: calls(region, args, 4))
    assert region.record.replays == 4, region.record
    assert replayed <= plain + 2 * MB, f"replays peak at {replayed / MB:.1f} MB, not {plain / MB:.1f}"


def test_a_tensor_that_outlives_it_stays_valid(driver: Driver) -> None:
    before = torch.cuda.memory_reserved()
    with driver.scratch_pool([]) as transient, transient():
        kept = torch.full((4 * MB,), 7, dtype=torch.int32, device="cuda")
    others = [torch.zeros(4 * MB, dtype=torch.int32, device="cuda") for _ in range(8)]
    assert bool((kept == 7).all())
    del kept, others
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_it_is_one_threads_memory(driver: Driver) -> None:
    def pool_of(tensor: torch.Tensor) -> tuple[int, int]:
        address = tensor.data_ptr()
        owners = (s for s in torch.cuda.memory_snapshot() if s["address"] <= address < s["address"] + s["total_size"])
        return tuple(next(owners)["segment_pool_id"])

    def allocated() -> torch.Tensor:
        return torch.ones(32 * MB, dtype=torch.uint8, device="cuda")

    with driver.scratch_pool([]) as transient:
        with transient(), ThreadPoolExecutor(1) as other:
            mine, others = allocated(), other.submit(allocated).result()
        assert pool_of(mine) != (0, 0)
        assert pool_of(others) == pool_of(allocated()) == (0, 0)
        del mine


def test_within_the_callers_own_pool_it_is_given_back_later(driver: Driver) -> None:
    before = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool), driver.scratch_pool([]) as transient, transient():
        torch.ones(64 * MB, dtype=torch.uint8, device="cuda")
    with driver.scratch_pool([]):
        pass
    assert torch.cuda.memory_reserved() == before


def test_a_region_is_captured_within_the_callers_own_pool(driver: Driver) -> None:
    args = [torch.randn(8, 256, device="cuda"), torch.randn(256, 256, device="cuda")]
    region = Region(mlp, driver, name="mlp")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        for _ in range(4):
            assert torch.equal(region(list(args))[0], mlp(list(args))[0])
    assert region.record.replays == 2, region.record
    clear_cublas_workspaces()


def test_a_comparison_beside_captures_of_other_threads(driver: Driver) -> None:
    weights = [torch.randn(256, 256, device="cuda") for _ in range(4)]
    inputs = [[torch.randn(8 + turn, 256, device="cuda") for turn in range(6)] for _ in weights]
    torch.cuda.synchronize()
    errors: list[str] = []

    def life(seed: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for x in inputs[seed]:
                region = Region(mlp, driver, name=f"mlp {seed}")
                for _ in range(4):
                    if not torch.equal(region([x, weights[seed]])[0], mlp([x, weights[seed]])[0]):
                        errors.append(f"thread {seed}, {len(x)} rows: another result")
                region.close()

    with ThreadPoolExecutor(len(weights)) as threads:
        list(threads.map(life, range(len(weights))))
    assert not errors
    settle()
    with driver.scratch_pool([]):
        pass
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    assert pools <= {(0, 0)}, "a comparison's memory was not given back"
