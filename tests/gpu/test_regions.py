"""The life of regions on CUDA: captured and compared, replayed from several threads and streams, freed."""

from __future__ import annotations

from typing import Any

import torch

from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda import build as cuda_build
from pygraph.runtime.host import build as host_build
from pygraph.runtime.region import Region

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


def test_the_native_halves_of_both_drivers_live_in_one_process() -> None:
    host, device = host_build.load(), cuda_build.load()
    assert host.OutputKind is not device.OutputKind
    assert {kind.name for kind in host.OutputKind.__members__.values()} == set(device.OutputKind.__members__)
