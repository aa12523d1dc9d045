"""Arguments that a replay accepts, arguments that it turns away before anything is written, and errors in replays."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from pygraph.errors import CaptureError
from pygraph.runtime.contract import Executable
from pygraph.runtime.host import HostDriver
from tests.runtime.host.replays import make_executable, make_program, replay_and_compare
from tests.runtime.regions import RegionCall, compile_regions, copy_arguments, same_bits


def scaled(args: list[Any]) -> tuple[Any, ...]:
    """Writes its first argument, reads the second."""
    x, y, factor = args
    x.add_(y)
    return (torch.mul(x, factor),)


def scaled_call(factor: Any = 2.5) -> RegionCall:
    return RegionCall(scaled, [torch.randn(4, 3), torch.randn(4, 3), factor])


@pytest.fixture
def executable(driver: HostDriver) -> Executable:
    return make_executable(driver, scaled_call())[0]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose address is 4 bytes past a multiple of 16."""
    storage = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    first = next(i for i in range(8) if (storage.data_ptr() + i * 4) % 16 == 4)
    return torch.as_strided(storage, tensor.size(), tensor.stride(), first).copy_(tensor)


class Subclass(torch.Tensor):
    pass


def other_arguments() -> Iterator[list[Any]]:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    yield [x, y]
    yield [x, y, 2.5, None]
    yield [x, y, 2]
    yield [x, y, True]
    yield [x, y, None]
    yield [x, y, 2.5000000000000004]
    yield [x, None, 2.5]
    yield [x, 2.5, 2.5]
    yield [x, torch.randn(4, 4), 2.5]
    yield [x, torch.randn(3, 4).t(), 2.5]
    yield [x, torch.randn(12), 2.5]
    yield [x, y.double(), 2.5]
    yield [x, y.as_subclass(Subclass), 2.5]
    yield [x, torch.empty(4, 3, device="meta"), 2.5]
    yield [x, torch.randn(4, 3).to_sparse(), 2.5]
    yield [x, torch._neg_view(y), 2.5]
    yield [x, torch._efficientzerotensor((4, 3)), 2.5]
    for nbytes in (0, 44):
        short = torch.randn(4, 3)
        short.untyped_storage().resize_(nbytes)
        yield [x, short, 2.5]


def test_other_arguments_are_turned_away_untouched(executable: Executable) -> None:
    for position, args in enumerate(other_arguments()):
        before = args[0].clone()
        assert executable.replay(list(args)) is None, position
        assert torch.equal(args[0], before)


def test_values_are_compared_exactly(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        return (args[0] + 1, *args[1:])

    def replays(captured: Any, given: Any) -> bool:
        executable, _ = make_executable(driver, RegionCall(region, [torch.ones(2), captured]))
        return executable.replay([torch.ones(2), given]) is not None

    nan = float("nan")
    big = 10**30
    equal = [(7, int("7")), (big, int(str(big))), (nan, float("nan")), (True, True), (None, None), (-0.0, -0.0)]
    assert all(replays(a, b) for a, b in equal)
    different = [(7, 8), (1, True), (True, 1), (0, False), (1, 1.0), (0.0, -0.0), (nan, 1.0), (None, 0), (big, 1)]
    assert not any(replays(a, b) for a, b in different)


def test_parameters_and_tensors_that_require_gradients(driver: HostDriver, executable: Executable) -> None:
    call = scaled_call()
    args = [torch.nn.Parameter(call.args[0].clone()), call.args[1].clone().requires_grad_(), 2.5]
    outputs = executable.replay(list(args))
    assert not outputs[0].requires_grad
    assert torch.equal(outputs[0], (call.args[0] + call.args[1]) * 2.5)


def test_a_misaligned_argument_is_copied_if_it_is_only_read(driver: HostDriver, executable: Executable) -> None:
    x, y, factor = scaled_call().args
    expected = (x + y) * factor
    assert executable.replay([misaligned(x), y, factor]) is None
    outputs = executable.replay([x, misaligned(y), factor])
    assert torch.equal(outputs[0], expected)
    anywhere, _ = make_executable(driver, scaled_call(), alignment=1)
    outputs = anywhere.replay([misaligned(x), misaligned(y), factor])
    assert torch.equal(outputs[0], (x + y) * factor)


def test_a_misaligned_argument_that_overlaps_a_written_one_is_turned_away(executable: Executable) -> None:
    storage = torch.zeros(40)
    first = next(i for i in range(8) if (storage.data_ptr() + i * 4) % 16 == 0)
    x = storage[first : first + 12].view(4, 3)
    y = storage[first + 13 : first + 25].view(4, 3)
    assert y.data_ptr() % 16 == 4
    assert executable.replay([x, y, 2.5]) is None


def overlapping() -> list[Any]:
    storage = torch.arange(24.0)
    first = next(i for i in range(8) if (storage.data_ptr() + i * 4) % 16 == 0)
    return [storage[first : first + 12].view(4, 3), storage[first + 4 : first + 16].view(4, 3)]


def increase(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 2


def test_kernels_run_on_overlapping_arguments_as_they_do_uncaptured(driver: HostDriver) -> None:
    compiled = compile_regions(increase)
    compiled.call(torch.randn(4, 3), torch.randn(4, 3))
    (call,) = compiled.regions
    executable, _ = make_executable(driver, call)
    theirs, ours = overlapping(), overlapping()
    expected = call.run(theirs)
    outputs = executable.replay(list(ours))
    assert same_bits(outputs, expected)
    assert same_bits(ours, theirs)


def test_operators_that_would_see_an_overlap_are_not_replayed(executable: Executable) -> None:
    theirs, ours = overlapping(), overlapping()
    with pytest.raises(RuntimeError, match="single memory location"):
        scaled([*theirs, 2.5])
    assert executable.replay([*ours, 2.5]) is None
    assert executable.replay([ours[0], ours[0], 2.5]) is None
    halves = torch.randn(64)
    assert executable.replay([halves[:12].view(4, 3), halves[16:28].view(4, 3), 2.5]) is not None


def test_nothing_is_replayed_under_a_mode(executable: Executable) -> None:
    args = scaled_call().args
    with BaseTorchDispatchMode():
        assert executable.replay(list(args)) is None
    assert executable.replay(list(args)) is not None


def test_a_replay_empties_the_list_of_arguments_and_no_other_call_does(executable: Executable) -> None:
    args = scaled_call().args
    wrong = [*args, 1]
    assert executable.replay(wrong) is None
    assert len(wrong) == len(args) + 1
    assert executable.replay(tuple(args)) is None  # type: ignore[arg-type]
    assert executable.replay(args) is not None
    assert args == []


def divided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x // y) + 1


def test_a_kernel_that_throws_raises_and_leaves_the_executable_usable(driver: HostDriver) -> None:
    compiled = compile_regions(divided)
    x, y = torch.randint(1, 9, (64,)), torch.randint(1, 9, (64,))
    compiled.call(x, y)
    (call,) = compiled.regions
    if "integer_div_error" not in compiled.sources[0]:
        pytest.skip("kernels of this Inductor do not check their divisors")
    executable, _ = make_executable(driver, call)
    zeros = [torch.zeros_like(a) for a in call.args]
    with pytest.raises(RuntimeError) as theirs:
        call.run(zeros)
    with pytest.raises(RuntimeError) as ours:
        executable.replay(list(zeros))
    assert str(ours.value) == str(theirs.value)
    replay_and_compare(driver, call, executable, call.args)


def test_an_operator_that_throws_raises_as_it_does_uncaptured(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        return (torch.index_select(args[0], 0, args[1]),)

    call = RegionCall(region, [torch.randn(4, 3), torch.tensor([0, 3])])
    executable, _ = make_executable(driver, call)
    wrong = [torch.randn(4, 3), torch.tensor([0, 9])]
    with pytest.raises(IndexError):
        region(list(wrong))
    with pytest.raises(IndexError):
        executable.replay(list(wrong))
    replay_and_compare(driver, call, executable, call.args)


def test_threads_share_an_executable(driver: HostDriver) -> None:
    call = RegionCall(scaled, [torch.randn(300, 300), torch.randn(300, 300), 2.5])
    executable, _ = make_executable(driver, call)

    def replayed(seed: int) -> bool:
        with torch.no_grad():
            args = call.fresh(seed)
            theirs = copy_arguments(args)
            outputs = executable.replay(list(args))
            assert outputs is None or same_bits(outputs, call.run(theirs))
            return outputs is not None

    with ThreadPoolExecutor(4) as threads:
        assert any(threads.map(replayed, range(200)))


def test_programs_that_leave_an_address_behind_are_refused(driver: HostDriver) -> None:
    call = scaled_call()
    program = make_program(driver, call.fn, call.args)
    for broken in (
        replace(program, slots=program.slots[1:]),
        replace(program, layout=replace(program.layout, fresh=())),
    ):
        with pytest.raises(CaptureError) as caught:
            driver.instantiate(broken)
        assert caught.value.reason == "invalid-program"


def test_packed_weights_are_constants_of_the_module(driver: HostDriver) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN is not part of this build")

    def region(args: list[Any]) -> tuple[Any, ...]:
        return (torch.ops.mkldnn._linear_pointwise(args[0], PACKED, None, "relu", [], ""),)

    call = RegionCall(region, [torch.randn(8, 16)])
    executable, recording = make_executable(driver, call)
    assert recording.launches[0].words[1] == 0
    replay_and_compare(driver, call, executable, call.args)
    replay_and_compare(driver, call, executable, call.fresh(seed=5))


PACKED = torch.randn(4, 16).to_mkldnn() if torch.backends.mkldnn.is_available() else None
