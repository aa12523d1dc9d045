"""A CUDA device as a target: operators of torch, captured by PyGraph's driver for host time, by torch for device time.

The clock of the device is a pair of events around replays of a graph that holds an operator many times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph.calibration.targets import Program
from pygraph.calibration.timing import Effort, Sampler, calls_in, seconds_of
from pygraph.runtime.cuda import CudaDriver

__all__ = ["CudaTarget"]

_ELEMENTS = 256
_QUEUE = 512
"""Launches in a row that a queue holds without making the host wait."""
_GRAPH_US, _MOST_COPIES = 1000.0, 128
"""Device time that a graph for timing holds, or that many operators: its launch is then no large part."""
_WARM_SECONDS = 0.3


class CudaTarget:
    """``Target`` for the current CUDA device. Raises CaptureError without one, or without ``cuda.bindings``."""

    kind = "cuda"

    def __init__(self, effort: Effort) -> None:
        self.driver = CudaDriver()
        self._effort = effort
        self.memory = torch.cuda.mem_get_info()[0] // 4
        _warm()

    def matrices(self) -> Sequence[tuple[str, torch.dtype, str]]:
        """``tf32`` is float32 where the user lets its precision go."""
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        general = [("bf16", torch.bfloat16, "highest")] if bf16 else []
        half, full = ("f16", torch.float16, "highest"), ("f32", torch.float32, "highest")
        tf32 = [("tf32", torch.float32, "high")] if torch.cuda.get_device_capability() >= (8, 0) else []
        return [*general, half, full, *tf32]

    def chain(self, launches: int) -> Program:
        """One argument; results are allocated as they are made."""

        def region(args: list[Any]) -> tuple[Any, ...]:
            (value,) = args
            args.clear()
            for _ in range(launches):
                value = torch.neg(value)
            return (value,)

        return Program(region, _tensors(1), _tensors(1), launches)

    def wide(self, launches: int) -> Program:
        """One argument for each launch; the last result is kept."""

        def region(args: list[Any]) -> tuple[Any, ...]:
            values = list(args)
            args.clear()
            for value in values:
                last = torch.neg(value)
            return (last,)

        return Program(region, _tensors(launches), _tensors(launches), launches)

    def host(self, call: Callable[[], Any], launches: int) -> Sampler:
        """Time until calls return, so few in a row that the queue never makes them wait."""
        call()
        torch.cuda.synchronize()
        one = seconds_of(call, 1)
        calls = calls_in(self._effort.block_s, one, max(1, _QUEUE // max(1, launches)))

        def sample() -> float:
            torch.cuda.synchronize()
            return seconds_of(call, calls) / calls * 1e6

        return sample

    def device(self, operator: Callable[[], Any]) -> Sampler:
        """Time between two events, per operator."""
        one = _event_us(operator)
        copies = max(2, min(_MOST_COPIES, round(_GRAPH_US / one)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(copies):
                operator()
        graph.replay()
        replays = calls_in(self._effort.block_s, copies * one * 1e-6, 32)

        def sample(holding: Callable[[], Any] = operator) -> float:  # noqa: ARG001 - the graph reads its tensors
            return _between(graph.replay, replays) / (copies * replays)

        return sample


def _tensors(count: int) -> list[torch.Tensor]:
    return [torch.ones(_ELEMENTS, device="cuda") for _ in range(count)]


def _warm() -> None:
    """Have the device clock up, and load what products and pointwise kernels need."""
    matrix = torch.ones(2048, 2048, device="cuda", dtype=torch.float16)
    end = time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < end:
        for _ in range(10):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()


def _event_us(operator: Callable[[], Any]) -> float:
    """Roughly the time of ``operator`` called by itself, once it has been called before."""
    for _ in range(2):
        operator()
    return max(1.0, _between(operator))


def _between(work: Callable[[], Any], times: int = 1) -> float:
    """Device time of what ``times`` calls of ``work`` launch, µs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
