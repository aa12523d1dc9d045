"""Measures one compilation of one workload in a process of its own; ratios between such processes are what counts.

Workloads say what runs; this file how it is timed and what is kept. Which processes run when is in ``processes``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pygraph.backend import pygraph

__all__ = ["MODES", "Sample", "Workload", "measure", "precompile", "region_rows"]

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "pygraph": {"backend": pygraph},
}
"""How each side is compiled: keyword arguments of torch.compile."""

WARM_CALLS = 7
"""Calls before anything is timed: the first compiles, and each side has made its captures by the fourth."""

WARM_SECONDS = 0.3
"""Calls go on for this long before the first block, so that the clocks of the GPU are up."""

Step = Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """``build(compile)`` makes a step: what is timed, with everything but ``compile`` equal on all sides.

    ``calls`` is the length of a block, ``blocks`` how many blocks each side gets. ``tolerance`` bounds how far
    a side's results are from those of the first side, relative to their largest magnitude. ``modes`` are the sides.
    With ``own``, that function makes the whole row of a side instead, and there is nothing to compare. ``imports`` are
    modules that ``build`` will need: they are loaded before the process is told to go.
    """

    name: str
    build: Callable[[Callable[[Any], Any]], Step] | None = None
    calls: int = 30
    blocks: int = 9
    tolerance: float = 1e-2
    modes: tuple[str, ...] = tuple(MODES)
    own: Callable[[], dict[str, Any]] | None = None
    imports: tuple[str, ...] = ()


@dataclass
class Sample:
    """What was measured of one side. Times in µs per call: wall (drained at both ends), host (until calls return).

    ``device_bytes`` is what the process took from the device, private pools and loaded code included, beyond the
    context it started with.
    """

    result: torch.Tensor
    peak_bytes: int
    reserved_bytes: int
    device_bytes: int
    wall_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians and quartiles of the wall time, median host time, memory."""
        quartiles = statistics.quantiles(self.wall_us, n=4)
        return {
            "wall_us": round(statistics.median(self.wall_us), 2),
            "wall_quartiles_us": [round(quartiles[0], 2), round(quartiles[2], 2)],
            "host_us": round(statistics.median(self.host_us), 2),
            "peak_mb": round(self.peak_bytes / 2**20, 1),
            "reserved_mb": round(self.reserved_bytes / 2**20, 1),
            "device_mb": round(self.device_bytes / 2**20, 1),
        }


def precompile(workload: Workload, mode: str) -> dict[str, Any]:
    """Compile one side, so that its caches are filled. ``compile_s``: until the first call is done, in s."""
    start = time.perf_counter()
    if workload.own is not None:
        workload.own()
        return {"compile_s": round(time.perf_counter() - start, 2)}
    step = _step(workload, mode)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    step()
    torch.cuda.synchronize()
    return {"compile_s": round(compile_s, 2)}


def measure(workload: Workload, mode: str, result: Path) -> dict[str, Any]:
    """Time one mode of ``workload``; what it computes is saved to ``result`` for comparison with other modes."""
    if workload.own is not None:
        return workload.own()
    torch.cuda.init()
    free_at_first, _ = torch.cuda.mem_get_info()
    step = _step(workload, mode)
    sample = _warm(step, free_at_first)
    torch.save(sample.result.cpu(), result)
    for _ in range(workload.blocks):
        _block(step, workload.calls, sample)
    return {**sample.summary(), "calls": workload.calls, "blocks": workload.blocks, "regions": region_rows()}


def region_rows() -> list[dict[str, Any]]:
    """State and counts of each region of this process; empty unless PyGraph compiled here."""
    import pygraph as package

    return [
        {
            "graph": report.name,
            "region": region.index,
            "state": region.state,
            "why": region.why,
            "replays": region.record.replays if region.record is not None else 0,
            "uncaptured": region.record.uncaptured if region.record is not None else 0,
        }
        for report in package.reports()
        for region in report.regions
    ]


def _step(workload: Workload, mode: str) -> Step:
    """What is timed. Results are dropped before the next call on every side, so that nothing lives over calls.

    ``reduce-overhead`` wants to be told where a step begins; that costs well below 1 µs, and is part of the mode.
    """
    if workload.build is None:
        raise ValueError(f"{workload.name} has no steps")
    made = workload.build(lambda target: torch.compile(target, **MODES[mode]))
    if mode != "reduce-overhead":
        return made
    begin = torch.compiler.cudagraph_mark_step_begin

    def step() -> Any:
        begin()
        return made()

    return step


def _warm(step: Step, free_at_first: int) -> Sample:
    for _ in range(WARM_CALLS - 1):
        step()
    kept = step().detach().float().clone()
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        step()
        torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()  # what compiling and capturing left behind is nobody's
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    taken = free_at_first - torch.cuda.mem_get_info()[0]
    return Sample(kept, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), taken)


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
