"""Replays of real Inductor regions against the uncaptured function: outputs, mutations and generator state, by bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pygraph.runtime.host import HostDriver
from pygraph.runtime.recording import OutputKind
from tests.runtime.host.replays import assert_replays, make_executable, replay_and_compare
from tests.runtime.regions import RegionCall, compile_regions

Case = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]


def update_rows(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    cache[index] = rows
    return cache.sum(0)


def accumulate(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    cache.index_put_((index,), rows, accumulate=True)
    return cache * 2


def step_buffer(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(x.sum(0))
    return x - total


def splits(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = (x * 3).chunk(2, dim=1)
    return a, b, x[:, 1:3], x.t(), x


ROWS = torch.tensor([4, 0, 2])

CASES: dict[str, Case] = {
    "pointwise": (lambda x: torch.sin(x) + x * 2, lambda: (torch.randn(33, 7),)),
    "reduction": (lambda x: (x.sum(), x.amax(0), torch.softmax(x, 1)), lambda: (torch.randn(9, 17),)),
    "mm": (lambda x, y: (x @ y).relu(), lambda: (torch.randn(8, 16), torch.randn(16, 4))),
    "addmm": (torch.addmm, lambda: (torch.randn(4), torch.randn(8, 16), torch.randn(16, 4))),
    "bmm": (lambda x, y: torch.bmm(x, y) + 1, lambda: (torch.randn(3, 8, 16), torch.randn(3, 16, 4))),
    "convolution": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(),
        lambda: (torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)),
    ),
    "sort": (lambda x: torch.sort(x * 2, dim=1), lambda: (torch.randn(4, 31),)),
    "topk": (lambda x: torch.topk(x + 1, 3), lambda: (torch.randn(4, 31),)),
    "cumsum": (lambda x: torch.cumsum(x, 1) * 2, lambda: (torch.randn(4, 31),)),
    "embedding": (lambda x, i: F.embedding(i, x).sum(1), lambda: (torch.randn(10, 4), torch.randint(0, 10, (3, 5)))),
    "index_put": (update_rows, lambda: (torch.zeros(6, 4), ROWS.clone(), torch.randn(3, 4))),
    "index_put_accumulate": (accumulate, lambda: (torch.zeros(6, 4), ROWS.clone(), torch.randn(3, 4))),
    "scatter": (lambda x, i, s: x.scatter_add(0, i, s), lambda: (torch.zeros(5), ROWS.clone(), torch.randn(3))),
    "dropout": (lambda x: F.dropout(x, 0.4) @ x.t(), lambda: (torch.randn(8, 8),)),
    "rand": (lambda x: x + torch.rand(8, 8) + torch.randn(8, 8), lambda: (torch.randn(8, 8),)),
    "randperm": (lambda x: x * torch.randperm(8), lambda: (torch.randn(3, 8),)),
    "cat": (lambda x, y: torch.cat([x.relu(), y @ y, y.sin()], 1), lambda: (torch.randn(4, 6), torch.randn(4, 4))),
    "views": (splits, lambda: (torch.randn(4, 6),)),
    "mutated_buffer": (step_buffer, lambda: (torch.randn(5, 3), torch.zeros(3))),
    "attention": (F.scaled_dot_product_attention, lambda: tuple(torch.randn(2, 2, 9, 8) for _ in range(3))),
    "zero_size": (lambda x, y: (x + 1, torch.cat([x, y]), x.sum()), lambda: (torch.randn(0, 4), torch.randn(3, 4))),
    "fft": (lambda x: torch.fft.rfft(x * 2).abs(), lambda: (torch.randn(4, 16),)),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), lambda: (torch.randn(4, 2),)),
    "scalar_tensor": (lambda x, s: x * s, lambda: (torch.randn(4), torch.tensor(3.0))),
    "transposed": (lambda x: x * 2 + x.t(), lambda: (torch.randn(6, 6).t(),)),
    "expanded": (lambda x: x + 1, lambda: (torch.randn(1, 6).expand(4, 6),)),
    "half": (lambda x: (x.float().exp()).to(torch.bfloat16) + x, lambda: (torch.randn(64).to(torch.bfloat16),)),
    "bool": (lambda x: (x > 0, (x > 0).any(), torch.where(x > 0, x, -x)), lambda: (torch.randn(65),)),
    "solve": (lambda a, b: torch.linalg.solve(a, b), lambda: (torch.eye(4) * 2 + 0.1, torch.randn(4, 2))),
    "pool": (lambda x: F.max_pool2d(x, 2, return_indices=True), lambda: (torch.randn(1, 2, 8, 8),)),
    "nan": (lambda x: x / 0 + x.sqrt(), lambda: (torch.tensor([0.0, -1.0, 2.0]),)),
}


def first_region(function: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> RegionCall:
    compiled = compile_regions(function, **options)
    compiled.call(*args)
    assert len(compiled.regions) == 1
    return compiled.regions[0]


@pytest.mark.parametrize("name", CASES)
def test_replay_equals_uncaptured(driver: HostDriver, name: str) -> None:
    function, make = CASES[name]
    recording = assert_replays(driver, first_region(function, make()))
    assert recording.launches or name == "zero_size"


def test_views_and_arguments_come_back_as_such(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        x, n = args
        return x, x[1:], n, None, x * 2, 2.5

    call = RegionCall(region, [torch.randn(4, 3), 7])
    executable, recording = make_executable(driver, call)
    kinds = [output.kind for output in recording.outputs]
    names = ("argument", "view", "object", "object", "fresh", "object")
    assert kinds == [*map(OutputKind, names)]
    x = torch.randn(4, 3)
    outputs = executable.replay([x, 7])
    assert outputs[0] is x
    assert outputs[1].data_ptr() == x[1:].data_ptr()
    assert outputs[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert outputs[2:4] == [7, None]
    assert outputs[5] == 2.5


def test_a_view_follows_the_storage_offset_of_its_argument(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        (x,) = args
        return (x[1:, :2],)

    call = RegionCall(region, [torch.randn(4, 3)])
    executable, _ = make_executable(driver, call)
    base = torch.randn(40)
    x = base[8:20].view(4, 3)
    outputs = executable.replay([x])
    assert outputs[0].storage_offset() == x[1:, :2].storage_offset()
    assert outputs[0].data_ptr() == x[1:, :2].data_ptr()


def test_operators_on_lists_of_tensors(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        sums = torch._foreach_add(args[:2], args[2:])
        torch._foreach_mul_(args[:2], 3)
        rows = torch.ops.aten.split_with_sizes_copy.default(sums[0], [1, 3])
        return (*sums, *rows, torch.cat(args))

    call = RegionCall(region, [torch.randn(4, 3) for _ in range(4)])
    recording = assert_replays(driver, call)
    assert len(recording.launches) == 4


def test_one_object_returned_twice_is_one_object(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        y = args[0] * 2
        return y, y, y.view(-1)

    executable, _ = make_executable(driver, RegionCall(region, [torch.randn(4, 3)]))
    outputs = executable.replay([torch.randn(4, 3)])
    assert outputs[0] is outputs[1]
    assert outputs[2] is not outputs[0]
    assert outputs[2].data_ptr() == outputs[0].data_ptr()


def test_outputs_belong_to_the_caller(driver: HostDriver) -> None:
    function, make = CASES["pointwise"]
    call = first_region(function, make())
    executable, recording = make_executable(driver, call)
    first = replay_and_compare(driver, call, executable, call.args)
    kept = [t.clone() for t in first]
    replay_and_compare(driver, call, executable, call.fresh(seed=9))
    executable.close()
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    sizes = {a.index: a.nbytes for a in recording.allocations if a.kind.value == "pool"}
    for tensor, output in zip(first, recording.outputs, strict=True):
        assert tensor.untyped_storage().nbytes() == sizes[output.index]
        assert tensor.data_ptr() % 64 == 0
        tensor.untyped_storage().resize_(0)


def test_dynamic_sizes_are_part_of_what_was_captured(driver: HostDriver) -> None:
    compiled = compile_regions(lambda x: (x * x.shape[0]).sum(1), dynamic=True)
    compiled.call(torch.randn(6, 4))
    compiled.call(torch.randn(9, 4))
    six, nine = compiled.regions
    executable, _ = make_executable(driver, six)
    replay_and_compare(driver, six, executable, six.args)
    assert executable.replay(nine.fresh()) is None
    other, _ = make_executable(driver, nine)
    replay_and_compare(driver, nine, other, nine.args)


def test_training_regions(driver: HostDriver) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.LayerNorm(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4)
    )
    compiled = compile_regions(model)
    with torch.enable_grad():
        compiled.call(torch.randn(8, 16)).sum().backward()
    assert len(compiled.regions) == 2
    for call in compiled.regions:
        assert_replays(driver, call)


def test_module_constants_are_read_where_they_lie(driver: HostDriver) -> None:
    weights = torch.randn(4, 3)
    call = first_region(lambda x: x @ torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) + weights.shape[0], (weights,))
    assert_replays(driver, call)


def test_constant_tensor_returned(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        return args[0] + TABLE, TABLE

    executable, recording = make_executable(driver, RegionCall(region, [torch.randn(3)]))
    assert recording.outputs[1].kind is OutputKind.OBJECT
    x = torch.randn(3)
    outputs = executable.replay([x])
    assert outputs[1] is TABLE
    assert torch.equal(outputs[0], x + TABLE)
    TABLE.add_(1)
    outputs = executable.replay([x])
    assert torch.equal(outputs[0], x + TABLE)


TABLE = torch.tensor([10.0, 20.0, 30.0])
