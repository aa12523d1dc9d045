"""Measures a device model: first prepares all programs, then takes rounds of samples, and medians over rounds.

A sample is the fastest of a few blocks of calls, since other load only adds time. A round takes a sample of every
program, so that drift of clocks and other load affect all programs equally.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from pygraph.calibration.store import identity_of
from pygraph.errors import CaptureError
from pygraph.ir import DeviceModel

Sampler = Callable[[], float]
"""One measurement, µs per call."""

_ROUNDS, _BLOCKS, _BLOCK_S, _MOST_CALLS = 9, 3, 0.001, 2000
"""Number of rounds, blocks per sample, length of a block in seconds, and maximum number of calls in a block."""
_SLOW_US = 250.0
"""Time of a product, µs, at which matrices stop growing."""
_GRAPH_US, _MOST_COPIES = 1000.0, 128
"""Device time of a graph for timing, µs, and maximum number of its operators: its launch is then a small part."""


def calibrate(kind: str, step: Callable[[str], None] = lambda _: None) -> DeviceModel:
    """Measure the CPU (``cpu``) or the current CUDA device (``cuda``). It takes seconds; nothing else should run.

    ``step`` is called with the current activity. Raises CaptureError if there is no such device, and ValueError if
    times are implausible, as on a busy machine.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise CaptureError("no-device", "there is no CUDA device here")
    step("getting ready")
    with torch.no_grad(), ExitStack() as stack:
        samplers: dict[str, Sampler] = {}
        nbytes = 1 << 26 if kind == "cpu" else min(1 << 28, torch.cuda.mem_get_info()[1] // 64)
        for name, size in (("small kernel", 64), ("large kernel", nbytes)):
            source = torch.ones(size // 4, device=kind)
            samplers[name] = _device(partial(torch.neg, source, out=torch.empty_like(source)), kind)
        flops: dict[str, float] = {}
        before = torch.get_float32_matmul_precision()
        stack.callback(torch.set_float32_matmul_precision, before)
        for name, dtype, precision in _products(kind):
            torch.set_float32_matmul_precision(precision)
            flops[name], samplers[name] = _product(kind, dtype)
        torch.set_float32_matmul_precision(before)
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        for number in range(_ROUNDS):
            step(f"round {number + 1} of {_ROUNDS}")
            for name, sampler in samplers.items():
                samples[name].append(min(sampler() for _ in range(_BLOCKS)))
    if kind == "cuda":
        torch.cuda.empty_cache()
    return _model(kind, samples, flops, nbytes)


def _model(kind: str, samples: dict[str, list[float]], flops: dict[str, float], nbytes: int) -> DeviceModel:
    """The device model, from medians over rounds."""
    us = {name: statistics.median(times) for name, times in samples.items()}
    kernel = us["small kernel"]
    peaks = {name: work / (us[name] - kernel) / 1e3 for name, work in flops.items() if us[name] > kernel}
    traffic_us = us["large kernel"] - kernel
    if traffic_us <= 0.0 or len(peaks) < len(flops):
        raise ValueError("large programs take no longer than small ones")
    return DeviceModel(
        name=identity_of(kind).device,
        bandwidth_gbs=2 * nbytes / traffic_us / 1e3,
        peak_gflops=next(iter(peaks.values())),
        kernel_us=kernel,
        peaks=peaks,
        source=f"calibrated {datetime.date.today().isoformat()}",
    )


# -- memory and arithmetic ---------------------------------------------------------------------------------------------


def _products(kind: str) -> Sequence[tuple[str, torch.dtype, str]]:
    """Matrix products to measure: name of the peak, element type, precision of float32. The first gives peak_gflops."""
    half, full = ("f16", torch.float16, "highest"), ("f32", torch.float32, "highest")
    bf16 = ("bf16", torch.bfloat16, "highest")
    if kind == "cpu":
        return full, bf16, half
    general = [bf16] if torch.cuda.is_bf16_supported(including_emulation=False) else []
    tf32 = [("tf32", torch.float32, "high")] if torch.cuda.get_device_capability() >= (8, 0) else []
    return [*general, half, full, *tf32]


def _product(kind: str, dtype: torch.dtype) -> tuple[float, Sampler]:
    """Operations of a large square product, and a sampler of its time. Elements of the operands differ, since a GPU
    multiplies equal elements about ten percent faster."""
    side = 64
    while True:
        left, right = ((torch.rand(side, side, device=kind) - 0.5).to(dtype) for _ in range(2))
        sampler = _device(partial(torch.mm, left, right, out=torch.empty_like(left)), kind)
        if min(sampler() for _ in range(3)) > _SLOW_US or side >= 8192:
            return 2.0 * side**3, sampler
        side *= 2


# -- clocks ------------------------------------------------------------------------------------------------------------


def _host(call: Callable[[], object]) -> Sampler:
    """A sampler of calls on the CPU."""

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    seconds(1)
    calls = _fill(seconds(1), _MOST_CALLS)
    return lambda: seconds(calls) / calls * 1e6


def _device(operator: Callable[[], object], kind: str) -> Sampler:
    """A sampler of the device time of ``operator``: on CUDA, by events around replays of a graph with many copies."""
    if kind == "cpu":
        return _host(operator)
    for _ in range(2):
        operator()
    copies = max(2, min(_MOST_COPIES, round(_GRAPH_US / max(1.0, _between(operator, 1)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            operator()
    replays = _fill(_between(graph.replay, 1) * 1e-6, 32)

    def sample(holding: Callable[[], object] = operator) -> float:  # noqa: ARG001 - the graph reads its tensors
        return _between(graph.replay, replays) / (copies * replays)

    return sample


def _fill(one: float, most: int) -> int:
    """Number of calls of ``one`` seconds each in a block: at least 1, at most ``most``."""
    return max(1, min(most, round(_BLOCK_S / max(one, 1e-7))))


def _between(work: Callable[[], object], times: int) -> float:
    """Device time of the launches of ``times`` calls of ``work``, µs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
