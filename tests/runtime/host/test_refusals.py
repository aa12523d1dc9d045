"""Regions and arguments that cannot be captured are refused with a code, whatever was recorded before."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from pygraph.errors import CaptureError
from pygraph.runtime.host import HostDriver
from tests.runtime.regions import compile_regions

guards = torch._C._dynamo.guards
reinterpret = guards._reinterpret_tensor
empty_pinned = guards._empty_strided_cpu_pinned
empty_cuda = guards._empty_strided_cuda
absolute = ctypes.CDLL(None).labs
SCALE = torch.tensor(2.0)


def reset(args: list[Any]) -> Any:
    args[0].set_(torch.empty(3))
    return (args[0],)


REGIONS: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "item": (lambda args: (args[0] * args[0].sum().item(),), "host-read"),
    "truth": (lambda args: (args[0] + 1 if args[0].sum() > 0 else args[0],), "host-read"),
    "list": (lambda args: (args[0] + 1, args[0].tolist()[0]), "host-read"),
    "array": (lambda args: (torch.as_tensor(args[0].numpy() + 1),), "host-read"),
    "equality": (lambda args: (torch.equal(args[0], args[0] + 1),), "host-read"),
    "raw address": (lambda args: (args[0].data_ptr(),), "host-read"),
    "item of a constant": (lambda args: (args[0] * SCALE.item(),), "host-read"),
    "nonzero": (lambda args: (torch.nonzero(args[0]),), "dynamic-output"),
    "mask": (lambda args: (args[0][args[0] > 0],), "dynamic-output"),
    "generator": (lambda args: (torch.rand(3, generator=torch.Generator()),), "generator-argument"),
    "other device": (lambda args: (args[0].to("meta"),), "foreign-device"),
    "resized": (lambda args: (args[0].resize_(7),), "metadata-mutation"),
    "reset": (reset, "metadata-mutation"),
    "out resized": (lambda args: (torch.add(args[0], 1, out=torch.empty(0)),), "metadata-mutation"),
    "beyond": (lambda args: (guards._reinterpret_tensor(args[0], (9,), (1,), 0) + 1,), "outside-allocation"),
    "reinterpreted beyond": (lambda args: (reinterpret(args[0], (9,), (1,), 0),), "outside-allocation"),
    "unknown memory": (lambda args: (args[0] + torch.tensor([1.0, 2.0, 3.0]),), "unknown-memory"),
    "foreign function": (lambda args: (absolute(-3),), "unknown-kernel"),
    "conjugate": (lambda args: (torch.view_as_complex(args[0][:2]).conj() * 2,), "unsupported-tensor"),
    "sparse": (lambda args: (args[0].to_sparse(),), "unsupported-tensor"),
    "nested": (lambda args: ([args[0] + 1],), "unsupported-output"),
    "no sequence": (lambda args: args[0] + 1, "unsupported-output"),
    "pinned": (lambda args: (empty_pinned((3,), (1,), torch.float32),), "pinned-memory"),
    "CUDA": (lambda args: (empty_cuda((3,), (1,), torch.float32),), "foreign-device"),
    "collective": (lambda args: (torch.ops.symm_mem.two_shot_all_reduce_(args[0], "sum", "0"),), "collective"),
    "pinned operator": (lambda args: (torch.empty(3, pin_memory=True),), "pinned-memory"),
    "error": (lambda args: (args[0] + math.sqrt(-1),), "capture-failed"),
}


def reason(driver: HostDriver, region: Any, args: list[Any]) -> str:
    with pytest.raises(CaptureError) as caught:
        driver.capture(region, args)
    return caught.value.reason


@pytest.mark.parametrize("name", REGIONS)
def test_regions(driver: HostDriver, name: str) -> None:
    region, code = REGIONS[name]
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
    def region(args: list[Any]) -> tuple[Any, ...]:
        return (args[0] + 1,)

    with BaseTorchDispatchMode():
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
