"""What cannot be captured is refused by a code, whatever the order of things that were recorded before it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.errors import CaptureError
from pygraph.runtime.host import HostDriver
from tests.runtime.regions import compile_regions

Region = Callable[[list[Any]], Any]

LIBC = ctypes.CDLL(None)
absolute = LIBC.labs


def item(args: list[Any]) -> Any:
    return (args[0] * args[0].sum().item(),)


def truth(args: list[Any]) -> Any:
    return (args[0] + 1 if args[0].sum() > 0 else args[0],)


def as_list(args: list[Any]) -> Any:
    return ((args[0] + 1), args[0].tolist()[0])


def as_array(args: list[Any]) -> Any:
    return (torch.as_tensor(args[0].numpy() + 1),)


def equality(args: list[Any]) -> Any:
    return (torch.equal(args[0], args[0] + 1),)


def raw_address(args: list[Any]) -> Any:
    return (args[0].data_ptr(),)


def constant_item(args: list[Any]) -> Any:
    return (args[0] * SCALE.item(),)


def nonzero(args: list[Any]) -> Any:
    return (torch.nonzero(args[0]),)


def masked(args: list[Any]) -> Any:
    return (args[0][args[0] > 0],)


def generator(args: list[Any]) -> Any:
    return (torch.rand(3, generator=torch.Generator()),)


def other_device(args: list[Any]) -> Any:
    return (args[0].to("meta"),)


def resized(args: list[Any]) -> Any:
    return (args[0].resize_(7),)


def reset(args: list[Any]) -> Any:
    args[0].set_(torch.empty(3))
    return (args[0],)


def out_resized(args: list[Any]) -> Any:
    return (torch.add(args[0], 1, out=torch.empty(0)),)


def beyond(args: list[Any]) -> Any:
    return (torch._C._dynamo.guards._reinterpret_tensor(args[0], (9,), (1,), 0) + 1,)


def reinterpreted_beyond(args: list[Any]) -> Any:
    return (reinterpret(args[0], (9,), (1,), 0),)


def unknown_memory(args: list[Any]) -> Any:
    return (args[0] + torch.tensor([1.0, 2.0, 3.0]),)


def foreign_function(args: list[Any]) -> Any:
    return (absolute(-3),)


def conjugate(args: list[Any]) -> Any:
    return (torch.view_as_complex(args[0].expand(2, 3)[:, :2].contiguous()).conj() * 2,)


def sparse(args: list[Any]) -> Any:
    return (args[0].to_sparse(),)


def nested_output(args: list[Any]) -> Any:
    return ([args[0] + 1],)


def not_a_sequence(args: list[Any]) -> Any:
    return args[0] + 1


def pinned(args: list[Any]) -> Any:
    return (empty_pinned((3,), (1,), torch.float32),)


def on_cuda(args: list[Any]) -> Any:
    return (empty_cuda((3,), (1,), torch.float32),)


def collective(args: list[Any]) -> Any:
    return (torch.ops._c10d_functional.all_reduce(args[0], "sum", "0"),)


def pinned_operator(args: list[Any]) -> Any:
    return (torch.empty(3, pin_memory=True),)


def fails(args: list[Any]) -> Any:
    return (args[0] + math.sqrt(-1),)


SCALE = torch.tensor(2.0)
reinterpret = torch._C._dynamo.guards._reinterpret_tensor
empty_pinned = torch._C._dynamo.guards._empty_strided_cpu_pinned
empty_cuda = torch._C._dynamo.guards._empty_strided_cuda

REGIONS: list[tuple[Region, str]] = [
    (item, "host-read"),
    (truth, "host-read"),
    (as_list, "host-read"),
    (as_array, "host-read"),
    (equality, "host-read"),
    (raw_address, "host-read"),
    (constant_item, "host-read"),
    (nonzero, "dynamic-output"),
    (masked, "dynamic-output"),
    (generator, "generator-argument"),
    (other_device, "foreign-device"),
    (resized, "metadata-mutation"),
    (reset, "metadata-mutation"),
    (out_resized, "metadata-mutation"),
    (beyond, "outside-allocation"),
    (reinterpreted_beyond, "outside-allocation"),
    (unknown_memory, "unknown-memory"),
    (foreign_function, "unknown-kernel"),
    (conjugate, "unsupported-tensor"),
    (sparse, "unsupported-tensor"),
    (nested_output, "unsupported-output"),
    (not_a_sequence, "unsupported-output"),
    (pinned, "pinned-memory"),
    (on_cuda, "foreign-device"),
    (collective, "collective"),
    (pinned_operator, "pinned-memory"),
    (fails, "capture-failed"),
]


def reason(driver: HostDriver, region: Any, args: list[Any]) -> str:
    with pytest.raises(CaptureError) as caught:
        driver.capture(region, args)
    return caught.value.reason


@pytest.mark.parametrize(("region", "code"), REGIONS, ids=lambda v: getattr(v, "__name__", v))
def test_regions(driver: HostDriver, region: Region, code: str) -> None:
    assert reason(driver, region, [torch.randn(3)]) == code
    assert torch.equal(torch.zeros(2) + 1, torch.ones(2)), "a mode was left behind"


class Subclass(torch.Tensor):
    pass


def unbacked() -> torch.Tensor:
    tensor = torch.randn(3)
    tensor.untyped_storage().resize_(0)
    return tensor


ARGUMENTS: dict[str, tuple[Any, str]] = {
    "meta": (torch.empty(3, device="meta"), "foreign-device"),
    "sparse": (torch.eye(3).to_sparse(), "unsupported-tensor"),
    "mkldnn": (torch.randn(3, 3).to_mkldnn(), "unsupported-tensor"),
    "quantized": (torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8), "unsupported-tensor"),
    "subclass": (torch.randn(3).as_subclass(Subclass), "unsupported-tensor"),
    "conjugate": (torch.randn(3, dtype=torch.complex64).conj(), "unsupported-tensor"),
    "negative": (torch._neg_view(torch.randn(3)), "unsupported-tensor"),
    "zero": (torch._efficientzerotensor(3), "unsupported-tensor"),
    "unbacked": (unbacked(), "unsupported-tensor"),
    "string": ("x", "unsupported-argument"),
    "list": ([torch.randn(3)], "unsupported-argument"),
    "generator": (torch.Generator(), "unsupported-argument"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(driver: HostDriver, name: str) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        return (1,)

    argument, code = ARGUMENTS[name]
    assert reason(driver, region, [argument]) == code


def test_only_plain_functions(driver: HostDriver) -> None:
    assert reason(driver, torch.relu, [torch.randn(3)]) == "unsupported-region"


def test_not_under_a_mode(driver: HostDriver) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def region(args: list[Any]) -> tuple[Any, ...]:
        return (args[0] + 1,)

    with Watch():
        assert reason(driver, region, [torch.randn(3)]) == "dispatch-mode"
    assert driver.capture(region, [torch.randn(3)]).launches


def test_a_kernel_called_behind_the_back_of_the_recorder_finds_no_memory(driver: HostDriver) -> None:
    compiled = compile_regions(lambda x: torch.sin(x) * 2)
    compiled.call(torch.randn(8))
    (call,) = compiled.regions

    def region(args: list[Any]) -> Any:
        return call.fn(args)

    assert reason(driver, region, call.args) == "host-read"
    assert driver.capture(call.fn, call.args).launches
