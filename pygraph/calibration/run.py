"""A whole calibration: probe, make the model, hold it against what it was not fitted to.

How each part measures is its own business; what is kept of it is ``store``'s.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from pygraph.calibration import validation
from pygraph.calibration.probes import Found, Probe, probes
from pygraph.calibration.records import Calibration, Point
from pygraph.calibration.store import identity_of
from pygraph.calibration.targets import Target
from pygraph.calibration.timing import Effort, sampled
from pygraph.calibration.validation import Workload, workloads
from pygraph.ir import DeviceModel

__all__ = ["calibrate", "model_of", "target_for"]


def calibrate(
    kind: str,
    effort: Effort | None = None,
    step: Callable[[str], None] = lambda _: None,
    chosen: Sequence[Workload] | None = None,
) -> Calibration:
    """Measure the CPU (``cpu``) or the current CUDA device (``cuda``), and validate on ``chosen`` workloads.

    ``step`` is told what is under way. Takes seconds, and nothing else should run meanwhile. Raises CaptureError
    where the device cannot be captured on, ValueError where nothing can be fitted to what was measured.
    """
    begin, effort = time.perf_counter(), effort or Effort()
    step("getting ready")
    with torch.no_grad():
        found, points = _measure(target_for(kind, effort), effort, step, chosen)
    if kind == "cuda":
        torch.cuda.empty_cache()
    seconds = round(time.perf_counter() - begin, 2)
    identity, date = identity_of(kind), datetime.datetime.now().isoformat(timespec="seconds")
    model = model_of(identity.device, date, found)
    return Calibration(identity, date, seconds, model, tuple(found.figures), tuple(found.sweeps), tuple(points(model)))


def _measure(
    target: Target, effort: Effort, step: Callable[[str], None], chosen: Sequence[Workload] | None
) -> tuple[Found, Callable[[DeviceModel], list[Point]]]:
    """What the probes found, and what makes points of a model."""
    with ExitStack() as stack:
        step("preparing calls")
        # The driver captures before torch does: it clears what torch's graphs use.
        held = validation.calls(target, stack)
        ready: list[Probe] = []
        for name, probe in probes(target, effort, stack):
            step(f"preparing {name}")
            ready.append(probe)
        step("preparing operators")
        held = [*validation.operators(target, workloads(target.kind) if chosen is None else chosen), *held]
        samplers = [*(sampler for probe in ready for sampler in probe.samplers), *(check.sampler for check in held)]
        samples = iter(sampled(samplers, effort, step))
    found = Found()
    for probe in ready:
        probe.fit([next(samples) for _ in probe.samplers], found)
    rest = list(samples)
    return found, lambda model: validation.points(held, rest, model)


def target_for(kind: str, effort: Effort) -> Target:
    """The target of a kind of device. Raises CaptureError where there is none."""
    if kind == "cuda":
        from pygraph.calibration.on_cuda import CudaTarget

        return CudaTarget(effort)
    from pygraph.calibration.on_cpu import CpuTarget

    return CpuTarget(effort)


def model_of(device: str, date: str, found: Found) -> DeviceModel:
    """The model that the figures make, named after ``device``; ``date`` is ISO 8601."""
    figures = {figure.field: figure.value for figure in found.figures if figure.field}
    return DeviceModel(name=device, **figures, peaks=tuple(found.peaks), source=f"calibrated {date[:10]}")
