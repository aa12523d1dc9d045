"""Measures several compilations of one workload in one process, in interleaved blocks; ratios are what counts.

Workloads say what runs; this file how it is timed and what is kept.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraph.backend import pygraph

__all__ = ["MODES", "Sample", "Workload", "measure"]

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "pygraph": {"backend": pygraph},
}
"""How each side is compiled: keyword arguments of torch.compile."""

Step = Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """``build(compile)`` makes a step: what is timed, with everything but ``compile`` equal on all sides.

    ``calls`` is the length of a block, ``blocks`` how many blocks each side gets. ``tolerance`` bounds how far
    a side's first results are from those of the first side, relative to their magnitude. ``alone`` measures each
    side in a process of its own, for memory: pools of other sides would count otherwise.
    """

    name: str
    build: Callable[[Callable[[Any], Any]], Step]
    calls: int = 30
    blocks: int = 9
    tolerance: float = 1e-2
    alone: bool = False


@dataclass
class Sample:
    """What was measured of one side. Times in µs per call: wall (drained at both ends), host (until calls return)."""

    wall_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    result: torch.Tensor | None = None
    difference: float = 0.0
    error: str | None = None

    def summary(self) -> dict[str, Any]:
        """Medians and quartiles of the wall time, median host time, memory, compile time."""
        if self.error is not None:
            return {"error": self.error}
        quartiles = statistics.quantiles(self.wall_us, n=4) if len(self.wall_us) > 1 else self.wall_us * 3
        return {
            "wall_us": round(statistics.median(self.wall_us), 2),
            "wall_quartiles_us": [round(quartiles[0], 2), round(quartiles[2], 2)],
            "host_us": round(statistics.median(self.host_us), 2),
            "compile_s": round(self.compile_s, 2),
            "peak_mb": round(self.peak_bytes / 2**20, 1),
            "reserved_mb": round(self.reserved_bytes / 2**20, 1),
            "difference": self.difference,
        }


def measure(workload: Workload, modes: Sequence[str] = tuple(MODES)) -> dict[str, dict[str, Any]]:
    """Time the ``modes`` of ``workload`` in interleaved blocks, once their results agree with the first one's."""
    samples = {mode: Sample() for mode in modes}
    steps = {mode: step for mode in modes if (step := _prepare(workload, mode, samples[mode])) is not None}
    _compare(workload, [sample for sample in samples.values() if sample.error is None])
    for block in range(workload.blocks):
        order = list(steps)
        shift = block % max(len(order), 1)
        for mode in order[shift:] + order[:shift]:
            _block(steps[mode], workload.calls, samples[mode])
    return {mode: sample.summary() for mode, sample in samples.items()}


def _prepare(workload: Workload, mode: str, sample: Sample) -> Step | None:
    """Compile one side and warm it up; a side that fails is reported as failed."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        return _warm(workload, mode, sample)
    except Exception as error:  # noqa: BLE001 - one side's failure is a result of the benchmark
        sample.error = f"{type(error).__name__}: {str(error)[:300]}"
        return None


def _warm(workload: Workload, mode: str, sample: Sample) -> Step:
    step = workload.build(lambda target: torch.compile(target, **MODES[mode]))
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    sample.compile_s = time.perf_counter() - start
    for _ in range(6):
        result = step()
    sample.result = result.detach().float().clone()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    sample.peak_bytes = torch.cuda.max_memory_allocated()
    sample.reserved_bytes = torch.cuda.memory_reserved()
    return step


def _compare(workload: Workload, samples: Sequence[Sample]) -> None:
    if not samples or samples[0].result is None:
        return
    reference = samples[0].result
    scale = float(reference.abs().max()) or 1.0
    for sample in samples:
        assert sample.result is not None
        sample.difference = float((sample.result - reference).abs().max()) / scale
        if not sample.difference <= workload.tolerance:
            sample.error = f"its results differ by {sample.difference} of the largest magnitude"
        sample.result = None


def _block(step: Step, calls: int, sample: Sample) -> None:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    sample.host_us.append((issued - start) / calls * 1e6)
    sample.wall_us.append((done - start) / calls * 1e6)
