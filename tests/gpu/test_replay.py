"""The contract of an executable on CUDA: what it accepts, what it returns, whose memory everything is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.program.recording import AllocationKind, OutputKind
from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda import build as cuda_build
from pygraph.runtime.host import build as host_build
from pygraph.runtime.region import Region
from tests.gpu.replays import captured, replay_and_compare


def cuda(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda")


def test_outputs_belong_to_the_caller(driver: Driver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        return args[0].sin(), (args[0] @ args[0].t()).relu()

    made = captured(driver, region, [cuda(64, 32)])
    first = replay_and_compare(driver, region, made, [cuda(64, 32)])
    kept = [t.clone() for t in first]
    for _ in range(5):
        replay_and_compare(driver, region, made, [cuda(64, 32)])
    made.executable.close()
    torch.cuda.empty_cache()
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    for tensor in first:
        tensor.untyped_storage().resize_(0)
    assert made.executable.replay([cuda(64, 32)]) is None


def test_arguments_that_are_only_read_may_lie_anywhere_on_the_device(driver: Driver) -> None:
    made = captured(driver, lambda args: (args[0] * 2,), [cuda(1024)])
    base = cuda(1030)
    assert made.executable.replay([base[:1024].cpu()]) is None
    for offset in range(5):
        x = base[offset : offset + 1024]
        outputs = made.executable.replay([x])
        assert outputs is not None
        assert torch.equal(outputs[0], x * 2)


def test_a_written_argument_has_to_be_aligned(driver: Driver) -> None:
    made = captured(driver, lambda args: (args[0].mul_(2), args[1] + 1), [cuda(1024), cuda(8)])
    base = cuda(1030)
    before = base.clone()
    assert made.executable.replay([base[1:1025], cuda(8)]) is None
    assert torch.equal(base, before)
    assert made.executable.replay([base[4:1028], cuda(8)]) is not None
    before[4:1028] *= 2
    assert torch.equal(base, before)


def test_overlapping_arguments_behave_as_uncaptured(driver: Driver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        args[0].add_(1)
        return (args[1] * 2,)

    made = captured(driver, region, [cuda(64), cuda(64)])
    ours, theirs = torch.arange(128.0, device="cuda"), torch.arange(128.0, device="cuda")
    outputs = made.executable.replay([ours[:64], ours[32:96]])
    expected = region([theirs[:64], theirs[32:96]])
    assert outputs is not None
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(ours, theirs)


def test_written_arguments_are_told_from_read_ones(driver: Driver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        cache, x, weight = args
        cache[0].copy_(x @ weight)
        return (cache.sum(),)

    made = captured(driver, region, [cuda(4, 8), cuda(8, 8)[0], cuda(8, 8)])
    assert made.program.written == {0}


def test_module_constants_are_read_where_they_lie(driver: Driver) -> None:
    table = torch.arange(3.0, device="cuda")
    module: dict[str, Any] = {"table": table}
    exec("def region(args):\n    return args[0] + table, table\n", module)
    made = captured(driver, module["region"], [cuda(3)])
    recording = made.program.recording
    assert recording.outputs[1].kind is OutputKind.OBJECT
    assert any(a.kind is AllocationKind.CONSTANT and a.address == table.data_ptr() for a in recording.allocations)
    for _ in range(2):
        x = cuda(3)
        outputs = made.executable.replay([x])
        assert outputs is not None
        assert outputs[1] is table
        assert torch.equal(outputs[0], x + table)
        table.add_(1)


@pytest.mark.parametrize("streams", [1, 2])
def test_replays_run_on_the_current_stream(driver: Driver, streams: int) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        y = args[0]
        for _ in range(20):
            y = torch.rand_like(y) * 0 + y @ y * 0.01
        return (y,)

    x = cuda(512, 512)
    made = captured(driver, region, [x])
    expected = region([x])[0]
    side = [torch.cuda.Stream() for _ in range(streams)]
    results: list[torch.Tensor] = []
    for turn in range(8):
        stream = side[turn % streams]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = made.executable.replay([x])
            assert outputs is not None
            results.append(outputs[0])
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_a_replay_inside_a_callers_own_capture_is_declined(driver: Driver) -> None:
    made = captured(driver, lambda args: (args[0] * 2,), [cuda(16)])
    x = cuda(16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert made.executable.replay([x]) is None
        y = x * 3
    graph.replay()
    assert torch.equal(y, x * 3)
    assert made.executable.replay([x]) is not None


def mlp(args: list[Any]) -> Any:
    x, w, v = args
    args.clear()
    return ((x @ w).relu() @ v, x.sum(0))


def test_closing_gives_everything_back(driver: Driver) -> None:
    torch.cuda.synchronize()
    args = [cuda(64, 64) for _ in range(3)]
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
    assert host.OperatorCall is not device.OperatorCall
    for native in (host, device):
        call = native.OperatorCall("aten::sin", "", (torch.ones(3),), {})
        assert isinstance(call, native.OperatorCall)
        assert [tensor.tolist() for tensor in call.tensors()] == [[1.0] * 3]
