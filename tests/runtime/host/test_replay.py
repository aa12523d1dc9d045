"""Replays return views, arguments, constants, and one object twice; they read lists, indices and constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.recording import OutputKind
from pygraph.runtime.host import HostDriver
from tests.runtime.host.replays import assert_replays, make_executable
from tests.runtime.regions import RegionCall, compile_regions


def test_views_and_arguments_come_back_as_such(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        x, n = args
        return x, x[1:], n, None, x * 2, 2.5

    call = RegionCall(region, [torch.randn(4, 3), 7])
    executable, recording = make_executable(driver, call)
    kinds = [output.kind for output in recording.outputs]
    names = ("argument", "view", "object", "object", "fresh", "object")
    assert kinds == [*map(OutputKind, names)]
    x = torch.randn(40)[8:20].view(4, 3)
    outputs = executable.replay([x, 7])
    assert outputs[0] is x
    assert outputs[1].data_ptr() == x[1:].data_ptr()
    assert outputs[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert outputs[2:4] == [7, None]
    assert outputs[5] == 2.5


def test_operators_on_lists_of_tensors(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        sums = torch._foreach_add(args[:2], args[2:])
        torch._foreach_mul_(args[:2], 3)
        rows = torch.ops.aten.split_with_sizes_copy.default(sums[0], [1, 3])
        return (*sums, *rows, torch.cat(args))

    call = RegionCall(region, [torch.randn(4, 3) for _ in range(4)])
    recording = assert_replays(driver, call)
    assert len(recording.launches) == 4


def test_positions_among_indices_decide_no_size(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        x, rows, columns = args
        lists = torch.ops.aten.repeat_interleave.Tensor(columns, output_size=3)
        return x[rows], x[:, columns], x[rows, columns] * 2, x[rows[:1]], lists

    def arguments(*rows: int) -> list[Any]:
        return [torch.randn(4, 3), torch.tensor(rows), torch.tensor([2, 1, 0])]

    executable, _ = make_executable(driver, RegionCall(region, arguments(0, 1, 2)))
    for rows in ((3, 0, 1), (2, 2, 2), (-1, 1, 0)):
        args = arguments(*rows)
        assert all(map(torch.equal, executable.replay(list(args)), region(args)))


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8])
def test_a_mask_among_indices_decides_a_size(driver: HostDriver, mask: torch.dtype) -> None:
    call = RegionCall(lambda args: (args[0][args[1]],), [torch.randn(4), torch.ones(4, dtype=mask)])
    with pytest.raises(CaptureError) as raised:
        make_executable(driver, call)
    assert raised.value.reason == "dynamic-output"


def test_results_lie_as_the_operators_own_kernels_have_them(driver: HostDriver) -> None:
    """Not as their fake kernels say, where an argument is transposed."""

    def region(args: list[Any]) -> tuple[Any, ...]:
        gradient, output = args
        turned = gradient.transpose(1, 2)
        return (
            torch.ops.aten._log_softmax_backward_data(turned, output, 2, torch.float32).view(-1),
            torch.ops.aten.elu_backward(turned, 1.0, 1.0, 1.0, False, output),
            torch.ops.aten.mse_loss_backward(turned, turned, output, 0).view(-1),
        )

    def arguments() -> list[Any]:
        return [torch.randn(2, 5, 4), torch.randn(2, 4, 5).log_softmax(-1)]

    executable, _ = make_executable(driver, RegionCall(region, arguments()))
    for _ in range(3):
        args = arguments()
        expected, found = region(args), executable.replay(list(args))
        assert all(map(torch.equal, found, expected))
        assert [each.stride() for each in found] == [each.stride() for each in expected]


def test_an_operator_that_changes_its_list_is_given_a_new_one_each_time(driver: HostDriver) -> None:
    """This one puts indices in bounds into the list of indices that it is given."""

    def region(args: list[Any]) -> tuple[Any, ...]:
        x, mask, index, values = args
        return (torch.ops.aten._unsafe_masked_index_put_accumulate(x, mask, [index], values),)

    def arguments(*index: int) -> list[Any]:
        return [torch.zeros(4, 2), torch.ones(3, 1, dtype=torch.bool), torch.tensor(index), torch.ones(3, 2)]

    executable, _ = make_executable(driver, RegionCall(region, arguments(0, 1, 2)))
    for index in ((0, 1, 2), (3, 0, 1), (2, 2, 2)):
        (found,) = executable.replay(arguments(*index))
        assert torch.equal(found, region(arguments(*index))[0])


def test_one_object_returned_twice_is_one_object(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        y = args[0] * 2
        return y, y, y.view(-1)

    executable, _ = make_executable(driver, RegionCall(region, [torch.randn(4, 3)]))
    outputs = executable.replay([torch.randn(4, 3)])
    assert outputs[0] is outputs[1]
    assert outputs[2] is not outputs[0]
    assert outputs[2].data_ptr() == outputs[0].data_ptr()


def test_module_constants_are_read_where_they_lie(driver: HostDriver) -> None:
    compiled = compile_regions(lambda x: x @ torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    compiled.call(torch.randn(4, 3))
    assert_replays(driver, compiled.regions[0])


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
