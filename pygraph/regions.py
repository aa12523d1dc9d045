"""Joins a compiled program's regions with the decision on them and with the runtime that replays them.

What a region does once it is called is ``pygraph.runtime``'s; what is decided about it the passes'.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraph.dump import dump_launches, graph_dir
from pygraph.errors import CaptureError
from pygraph.inductor.wrap import Boxed, RegionFunction, bind, wrap_regions
from pygraph.report.model import GraphReport
from pygraph.runtime.driver import Driver
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.region import Region, RegionOptions
from pygraph.settings import Settings
from pygraph.warm import Facts, RegionFacts

__all__ = ["Wrapped", "attach", "driver_for", "prepare"]

_log = logging.getLogger("pygraph")


Wrapped = Sequence[tuple[Region, RegionFunction] | None]
"""The regions of a program, each with the function that it took the place of; None where that stayed."""


@dataclass(frozen=True)
class _Wrapping:
    """What the regions of one program share. ``heard`` is told of captures that fail for operators of the graph;
    ``made`` collects the regions, with the functions that they took the place of, by index."""

    report: GraphReport
    settings: Settings
    heard: Callable[[Refusal], None] | None
    made: dict[int, tuple[Region, RegionFunction]] = field(default_factory=dict)


def attach(
    program: Any, facts: Facts, report: GraphReport, settings: Settings, heard: Callable[[Refusal], None]
) -> tuple[Boxed, Wrapped]:
    """Put regions in the place of the functions of Inductor's ``program``. Returns what a call enters by, and them.

    A program that has but one region and does nothing else is entered by that region's replay.
    """
    wrapping = _Wrapping(report, settings, None if settings.strict else heard)
    wrap_regions(program, [_wrapper(region, wrapping) for region in facts.regions])
    regions = tuple(wrapping.made.get(region.report.index) for region in facts.regions)
    return _entry(program, facts.shortcut, regions), regions


def _entry(program: Any, shortcut: str | None, regions: Wrapped) -> Boxed:
    only = regions[0] if len(regions) == 1 else None
    if only is None or shortcut is None:
        return program  # type: ignore[no-any-return]
    region, function = only
    names = getattr(function, "__globals__", {})
    return bind(shortcut, names, region.expects_replay, region.try_replay, program)


def _wrapper(facts: RegionFacts, wrapping: _Wrapping) -> Callable[[RegionFunction], RegionFunction] | None:
    """What makes a replayable region of a partition function, or None when it is to stay as it is."""
    region = facts.report
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
    return functools.partial(_wrap, facts=facts, wrapping=wrapping, driver=driver)


def _wrap(function: RegionFunction, *, facts: RegionFacts, wrapping: _Wrapping, driver: Driver) -> RegionFunction:
    report, settings, region = wrapping.report, wrapping.settings, facts.report
    folder = graph_dir(settings.dump_dir, report)
    observer = None if folder is None else functools.partial(dump_launches, folder, region.index)
    name = f"{report.name}.region{region.index}"
    first = getattr(getattr(function, "__code__", None), "co_firstlineno", 0)
    made = Region(
        function,
        driver,
        name=name,
        label=f"{name} {region.module}".rstrip(),
        options=_options(settings),
        held=facts.held,
        lent=facts.lent,
        on_capture=observer,
        origins={first + line: origin for line, origin in facts.origins.items()},
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
        from pygraph.runtime.cuda import build as cuda

        cuda.load.start(settings.cache_dir)
    elif "cpu" in device_types:
        from pygraph.runtime.host import build as host

        host.load.start(settings.cache_dir)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("pygraph: %s", text)


@functools.cache
def driver_for(device: str) -> Driver | None:
    """The driver that captures on a kind of device, or None when there is none. Raises CaptureError when it cannot."""
    if device.partition(":")[0] == "cuda" and torch.cuda.is_available():
        from pygraph.runtime.cuda import CudaDriver

        return CudaDriver()
    if device != "cpu":
        return None
    from pygraph.runtime.host import HostDriver

    return HostDriver()
