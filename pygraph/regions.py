"""Joins a compiled program's regions with the decision on them and with the runtime that replays them.

What a region does once it is called is ``pygraph.runtime``'s; what is decided about it the passes'.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraph.dump import dump_launches, graph_dir
from pygraph.errors import CaptureError
from pygraph.lowering.decision import Decision
from pygraph.lowering.program import EmittedProgram
from pygraph.lowering.record import ProgramRecord
from pygraph.lowering.wrap import RegionFunction
from pygraph.report.model import GraphReport, RegionReport
from pygraph.runtime import cuda, host
from pygraph.runtime.cuda import CudaDriver
from pygraph.runtime.driver import Driver
from pygraph.runtime.host import HostDriver
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.provenance import Origin
from pygraph.runtime.refusal import Refusal
from pygraph.runtime.region import Region
from pygraph.settings import Settings

__all__ = ["Wrapping", "driver_for", "prepare", "region_reports", "region_wrapper"]

_log = logging.getLogger("pygraph")


def region_reports(
    decision: Decision,
    record: ProgramRecord,
    emitted: EmittedProgram,
    forbidden: set[int],
    modules: Mapping[str, str],
) -> list[RegionReport]:
    """What is known of each emitted region before it ever runs, and whether it may be captured. ``modules`` has the
    user's module of each node."""
    found = []
    for region, steps in zip(emitted.regions, record.regions, strict=True):
        nodes = tuple(dict.fromkeys(name for step in steps for name in step.origins))
        regions = (decision.nodes[name].region for name in nodes if name in decision.nodes)
        planned = tuple(sorted({index for index in regions if index is not None}))
        reason = _unwrapped_reason(decision, planned, region.index in forbidden, bool(region.kernels))
        paths = [modules[name].replace(".", os.sep) for name in nodes if modules.get(name)]
        module = os.path.commonpath(paths).replace(os.sep, ".") if paths else ""
        found.append(RegionReport(region.index, planned, nodes, region.kernels, not reason, reason, module=module))
    return found


def _unwrapped_reason(decision: Decision, planned: tuple[int, ...], forbidden: bool, launches: bool) -> str:
    if forbidden:
        return "holds an operator judged not capturable"
    if not launches:
        return "launches nothing"
    if planned and not any(index in decision.selected for index in planned):
        return "not selected by the model"
    return ""


@dataclass(frozen=True)
class Wrapping:
    """What the regions of one program share. ``held`` names its inputs that outlive the call in any case, ``lent``
    those that may; ``heard`` is told of captures that fail for operators of the graph; ``made`` collects the regions,
    with the functions that they took the place of, by index."""

    report: GraphReport
    settings: Settings
    held: frozenset[str] = frozenset()
    lent: frozenset[str] = frozenset()
    heard: Callable[[Refusal], None] | None = None
    made: dict[int, tuple[Region, RegionFunction]] = field(default_factory=dict)


def region_wrapper(
    region: RegionReport, wrapping: Wrapping, origins: Mapping[int, Origin]
) -> Callable[[RegionFunction], RegionFunction] | None:
    """What makes a replayable region of a partition function, or None when it is to stay as it is.

    ``origins`` says what the function's lines run; they count from its first one, which is 0.
    """
    if not region.wrapped:
        return None
    device = wrapping.report.device
    prepare((torch.device(device).type,), wrapping.settings)
    try:
        driver = driver_for(device)
    except CaptureError as error:
        if wrapping.settings.strict:
            raise
        _warn_once(f"nothing is captured on {device}: {error}")
        region.wrapped, region.reason = False, str(error)
        return None
    if driver is None:
        region.wrapped, region.reason = False, f"no driver captures on {device}"
        return None
    return functools.partial(_wrap, region=region, wrapping=wrapping, origins=origins, driver=driver)


def _wrap(
    function: RegionFunction,
    *,
    region: RegionReport,
    wrapping: Wrapping,
    origins: Mapping[int, Origin],
    driver: Driver,
) -> RegionFunction:
    report, settings = wrapping.report, wrapping.settings
    folder = graph_dir(settings.dump_dir, report)
    observer = None if folder is None else functools.partial(dump_launches, folder, region.index, report.device)
    name = f"{report.name}.region{region.index}"
    first = getattr(getattr(function, "__code__", None), "co_firstlineno", 0)
    made = Region(
        function,
        driver,
        name=name,
        label=f"{name} {region.module}".rstrip(),
        options=_options(settings),
        held=_positions(report.emitted, region.index, wrapping.held),
        lent=_positions(report.emitted, region.index, wrapping.lent),
        on_capture=observer,
        origins={first + line: origin for line, origin in origins.items()},
        on_refusal=wrapping.heard,
    )
    region.record = made.record
    wrapping.made[region.index] = (made, function)
    return _Strict(made) if settings.strict else made


def _options(settings: Settings) -> RegionOptions:
    return RegionOptions(
        capture_after=settings.capture_after,
        max_captures=settings.max_captures,
        verify_always=settings.verify == "always",
        measure=settings.measure,
        cache_dir=settings.cache_dir,
    )


def _positions(emitted: EmittedProgram | None, index: int, names: frozenset[str]) -> list[int]:
    """Where ``names`` are among the arguments of a region."""
    regions = () if emitted is None else emitted.regions
    arguments = next((region.arguments for region in regions if region.index == index), ())
    return [position for position, name in enumerate(arguments) if name in names]


class _Strict:
    """A region that raises once it turns out that it cannot be captured: not where it merely is faster uncaptured."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        outputs = self._region(args)
        record = self._region.record
        if record.state == "uncaptured" and record.reason:
            raise CaptureError("strict", f"{record.name} cannot be captured: {record.reason}")
        return outputs


def prepare(device_types: Collection[str], settings: Settings) -> None:
    """Begin to build the native half of the driver that a graph on these devices needs, in the background."""
    if "cuda" in device_types:
        cuda.build.load.start(settings.cache_dir)
    elif "cpu" in device_types:
        host.build.load.start(settings.cache_dir)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("pygraph: %s", text)


@functools.cache
def driver_for(device: str) -> Driver | None:
    """The driver that captures on a kind of device, or None when there is none. Raises CaptureError when it cannot."""
    if device.partition(":")[0] == "cuda" and torch.cuda.is_available():
        return CudaDriver()
    return HostDriver() if device == "cpu" else None
