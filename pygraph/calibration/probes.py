"""The probes: each says what is to be timed for one aspect of a target, and fits the figures that stand for it.

A figure is fitted to the medians over all rounds; its spread is that of fits to each round by itself.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from pygraph.calibration.fitting import Memory, fit_line, fit_memory, fit_peak, quartiles
from pygraph.calibration.launching import moved, replayed, uncaptured
from pygraph.calibration.records import Figure, Sweep
from pygraph.calibration.targets import CHAINS, WIDES, Target
from pygraph.calibration.timing import Effort, Sampler, Samples
from pygraph.ir import Peak
from pygraph.passes.analysis import VECTOR

__all__ = ["Found", "Probe", "probes"]

_SIZES = tuple(1 << power for power in (8, 10, 12, 14, 16, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28))
"""Bytes of one operand of a pointwise kernel."""
_SIDES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_COPIES = 8
_SMALL_COPY = 4096
_VECTOR_SIZES = (1 << 14, 1 << 22)
_VECTOR_OPERATORS: tuple[tuple[Callable[[torch.Tensor], Any], float], ...] = (
    (torch.sigmoid, 3.0),
    (torch.nn.functional.gelu, 8.0),
)
"""What the rate of other arithmetic is fitted to, and operations for each element, as the IR's costs count them."""

_Fit = TypeVar("_Fit")


@dataclass
class Found:
    """What probes have found so far: figures in order, what they were fitted to, and peaks of arithmetic."""

    figures: list[Figure] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)

    def value(self, field_name: str) -> float:
        """The figure that is a field of the model. Raises KeyError where it was not measured."""
        found = {figure.field: figure.value for figure in self.figures}
        return found[field_name]

    def memory(self) -> Memory:
        """What was fitted to pointwise kernels."""
        found = {figure.field: figure.value for figure in self.figures}
        rates = (found.get("cache_bytes", 0.0), found.get("cache_gbs", 0.0), found["bandwidth_gbs"])
        return Memory(found["kernel_us"], *rates)

    def add(self, name: str, unit: str, field_name: str, value: float, each: Sequence[float]) -> None:
        """Add a figure with what each round by itself says it is."""
        low, _, high = quartiles(each)
        self.figures.append(Figure(name, unit, value, min(low, value), max(high, value), field_name))

    def sweep(self, name: str, unit: str, amounts: Sequence[float], samples: Samples) -> None:
        """Add the medians that figures are fitted to."""
        times = tuple(statistics.median(each) for each in samples)
        self.sweeps.append(Sweep(name, unit, tuple(amounts), times))


@dataclass(frozen=True)
class Probe:
    """What is timed, and what makes figures of the samples. Later probes may use what earlier ones found."""

    samplers: Sequence[Sampler]
    fit: Callable[[Samples, Found], None]


def probes(target: Target, effort: Effort, stack: ExitStack) -> Iterator[tuple[str, Probe]]:
    """All probes, in order, with what they look into. ``stack`` closes what they hold."""
    yield "launches", _launches(target)
    yield "replays", _replays(target, stack)
    yield "patches", _patches(target, stack)
    yield "small copies", _small_copies(target)
    yield "memory", _memory(target, effort)
    yield "copies", _copies(target, effort)
    for name, dtype, precision in target.matrices():
        yield f"matrix products, {name}", _products(target, effort, name, dtype, precision)
    yield "other arithmetic", _vector(target, effort)


def _fits(samples: Samples, fit: Callable[[Sequence[float]], _Fit]) -> tuple[_Fit, list[_Fit]]:
    """``fit`` of the medians, and of each round; rounds that cannot be fitted are left out."""
    each: list[_Fit] = []
    for times in zip(*samples, strict=True):
        with contextlib.suppress(ValueError):
            each.append(fit(times))
    whole = fit([statistics.median(times) for times in samples])
    return whole, each or [whole]


# -- host --------------------------------------------------------------------------------------------------------------


def _launches(target: Target) -> Probe:
    """Host time of one more uncaptured launch, its result allocated as in a compiled program."""

    def fit(samples: Samples, found: Found) -> None:
        line, lines = _fits(samples, lambda times: fit_line(CHAINS, times))
        found.add("uncaptured launch", "µs", "launch_us", line.slope, [one.slope for one in lines])

    return Probe(uncaptured(target, [target.chain(count) for count in CHAINS]), fit)


def _replays(target: Target, stack: ExitStack) -> Probe:
    """Host time of a replay, and of one more launch in it."""

    def fit(samples: Samples, found: Found) -> None:
        line, lines = _fits(samples, lambda times: fit_line(CHAINS, times))
        found.add("replay", "µs", "replay_us", line.base, [one.base for one in lines])
        found.add("captured launch", "µs", "node_us", line.slope, [one.slope for one in lines])

    return Probe(replayed(target, [target.chain(count) for count in CHAINS], stack), fit)


def _patches(target: Target, stack: ExitStack) -> Probe:
    """Host time of one more launch with an argument that moved, beyond that of the launch itself."""

    def fit(samples: Samples, found: Found) -> None:
        line, lines = _fits(samples, lambda times: fit_line(WIDES, times))
        stays = found.value("node_us")
        each = [max(0.0, one.slope - stays) for one in lines]
        found.add("patched launch", "µs", "patch_us", max(0.0, line.slope - stays), each)

    return Probe(moved(target, [target.wide(count) for count in WIDES], stack), fit)


def _small_copies(target: Target) -> Probe:
    """Host time of a small copy; larger ones cost what their traffic does."""
    pairs = [(_bytes(target, _SMALL_COPY), _bytes(target, _SMALL_COPY)) for _ in range(_COPIES)]

    def call() -> None:
        for source, copy in pairs:
            copy.copy_(source)

    def fit(samples: Samples, found: Found) -> None:
        each = [time / _COPIES for time in samples[0]]
        found.add("small copy", "µs", "copy_us", statistics.median(each), each)

    return Probe([target.host(call, _COPIES)], fit)


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(target: Target, effort: Effort) -> Probe:
    """The floor of a kernel, and the rates of memory."""
    sizes = _sizes(target, effort)
    amounts = [2.0 * size for size in sizes]

    def fit(samples: Samples, found: Found) -> None:
        found.sweep("pointwise", "bytes", amounts, samples)
        memory, each = _fits(samples, lambda times: fit_memory(amounts, times))
        found.add("smallest kernel", "µs", "kernel_us", memory.kernel_us, [one.kernel_us for one in each])
        found.add("memory", "GB/s", "bandwidth_gbs", memory.bandwidth_gbs, [one.bandwidth_gbs for one in each])
        if memory.cache_gbs:
            _add_cache(found, memory, [one for one in each if one.cache_gbs])

    return Probe([target.device(_pointwise(target, size)) for size in sizes], fit)


def _add_cache(found: Found, memory: Memory, each: Sequence[Memory]) -> None:
    known = each or [memory]
    found.add("cache", "GB/s", "cache_gbs", memory.cache_gbs, [one.cache_gbs for one in known])
    found.add("traffic that it holds", "bytes", "cache_bytes", memory.cache_bytes, [one.cache_bytes for one in known])


def _copies(target: Target, effort: Effort) -> Probe:
    """Copies by size, kept beside the pointwise kernels; no figure is fitted to them."""
    sizes = _sizes(target, effort)[::3]

    def fit(samples: Samples, found: Found) -> None:
        found.sweep("copy", "bytes", [2.0 * size for size in sizes], samples)

    return Probe([target.device(_copy(target, size)) for size in sizes], fit)


def _sizes(target: Target, effort: Effort) -> list[int]:
    return [size for size in _SIZES if size <= min(effort.largest, target.memory // 4)]


def _pointwise(target: Target, size: int) -> Callable[[], Any]:
    source = torch.ones(size // 4, device=target.kind)
    result = torch.ones_like(source)
    return lambda: torch.neg(source, out=result)


def _copy(target: Target, size: int) -> Callable[[], Any]:
    source, result = _bytes(target, size), _bytes(target, size)
    return lambda: result.copy_(source)


def _bytes(target: Target, size: int) -> torch.Tensor:
    return torch.ones(size, device=target.kind, dtype=torch.uint8)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _products(target: Target, effort: Effort, name: str, dtype: torch.dtype, precision: str) -> Probe:
    """The rate of matrix products of one element type: square ones of rising size, up to the first that takes long."""
    flops: list[float] = []
    samplers: list[Sampler] = []
    with _precision(precision):
        for side in _SIDES:
            if 3 * side * side * dtype.itemsize > target.memory // 4:
                break
            flops.append(2.0 * side**3)
            samplers.append(target.device(_product(target, side, dtype)))
            if samplers[-1]() > effort.slowest_us:
                break
    return Probe(samplers, lambda samples, found: _fit_peak(name, flops, samples, found))


def _fit_peak(name: str, flops: Sequence[float], samples: Samples, found: Found) -> None:
    floor = found.value("kernel_us")
    title = "other arithmetic" if name == VECTOR else f"matrix products, {name}"
    found.sweep(title, "flops", flops, samples)
    peak, peaks = _fits(samples, lambda times: fit_peak(name, flops, times, floor))
    field_name = "" if found.peaks else "peak_gflops"
    found.add(title, "GFLOP/s", field_name, peak.gflops, [one.gflops for one in peaks])
    found.peaks.append(peak)


def _product(target: Target, side: int, dtype: torch.dtype) -> Callable[[], Any]:
    """Of operands that differ from element to element: a GPU multiplies equal ones some ten percent faster."""
    left, right = ((torch.rand(side, side, device=target.kind) - 0.5).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)


def _vector(target: Target, effort: Effort) -> Probe:
    """The rate of arithmetic that is no matrix product, where it is the limit: on a GPU, memory mostly is."""
    sizes = [size for size in _sizes(target, effort) if _VECTOR_SIZES[0] <= size <= _VECTOR_SIZES[1]]
    work = [(size, flops, operator) for operator, flops in _VECTOR_OPERATORS for size in sizes]
    calls = [target.device(_functional(target, size, operator)) for size, _, operator in work]

    def fit(samples: Samples, found: Found) -> None:
        floor, model = found.value("kernel_us"), found.memory()
        medians = [statistics.median(times) for times in samples]
        bound = [i for i, time in enumerate(medians) if time > 1.5 * model.time_us(2.0 * work[i][0]) > floor]
        if 2 * len(bound) > len(work):
            flops = [work[i][1] * work[i][0] / 4 for i in bound]
            _fit_peak(VECTOR, flops, [samples[i] for i in bound], found)

    return Probe(calls, fit)


def _functional(target: Target, size: int, operator: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    source = torch.ones(size // 4, device=target.kind)
    return lambda: operator(source)


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
