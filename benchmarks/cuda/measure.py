"""Measures one compilation of one workload in a process of its own; ratios between such processes are what counts.

Workloads say what runs; this file how it is timed and what is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pygraph.backend import pygraph

__all__ = ["MODES", "Sample", "Workload", "difference", "measure"]

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
    a side's results are from those of the first side, relative to their largest magnitude.
    """

    name: str
    build: Callable[[Callable[[Any], Any]], Step]
    calls: int = 30
    blocks: int = 9
    tolerance: float = 1e-2


@dataclass
class Sample:
    """What was measured of one side. Times in µs per call: wall (drained at both ends), host (until calls return)."""

    compile_s: float
    result: torch.Tensor
    peak_bytes: int
    reserved_bytes: int
    wall_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians and quartiles of the wall time, median host time, memory, compile time."""
        quartiles = statistics.quantiles(self.wall_us, n=4)
        return {
            "wall_us": round(statistics.median(self.wall_us), 2),
            "wall_quartiles_us": [round(quartiles[0], 2), round(quartiles[2], 2)],
            "host_us": round(statistics.median(self.host_us), 2),
            "compile_s": round(self.compile_s, 2),
            "peak_mb": round(self.peak_bytes / 2**20, 1),
            "reserved_mb": round(self.reserved_bytes / 2**20, 1),
        }


def measure(workload: Workload, mode: str, result: Path) -> dict[str, Any]:
    """Time one mode of ``workload``; what it computes is saved to ``result`` for comparison with other modes."""
    step, sample = _warm(workload, mode)
    torch.save(sample.result.cpu(), result)
    for _ in range(workload.blocks):
        _block(step, workload.calls, sample)
    return sample.summary()


def _warm(workload: Workload, mode: str) -> tuple[Step, Sample]:
    step = workload.build(lambda target: torch.compile(target, **MODES[mode]))
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    for _ in range(6):
        result = step()
    kept = result.detach().float().clone()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step, Sample(compile_s, kept, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())


def difference(reference: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference over the largest magnitude of the reference; infinite where sizes or NaNs differ."""
    if reference.shape != other.shape or not bool(torch.equal(reference.isnan(), other.isnan())):
        return float("inf")
    scale = float(reference.nan_to_num().abs().max()) or 1.0
    return float((reference.nan_to_num() - other.nan_to_num()).abs().max()) / scale


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
