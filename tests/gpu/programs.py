"""Helpers of tests of compiled programs: compilation, checks of their reports, comparison of results.

Nothing here asks for a device when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pygraph
from pygraph.backend import pygraph as backend
from pygraph.report.model import RegionReport
from pygraph.report.text import render_text

DEVICE = "cuda"

EVERYTHING = {"passes": "legality,placement,partitioning,indirection"}
"""Capture whatever can be captured, however little a graph would save."""


def device_tensor(*size: int, **kind: Any) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(*size, device=DEVICE, **kind)


def compiled(function: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    """``function`` compiled by PyGraph with ``options``."""
    return torch.compile(function, backend=backend, dynamic=dynamic, options=options or None)


def wrapped_regions() -> list[RegionReport]:
    """The regions of every graph compiled so far that may be captured."""
    return [region for report in pygraph.reports() for region in report.regions if region.wrapped]


def replaying_regions() -> list[RegionReport]:
    """Those that are replayed."""
    return [region for region in wrapped_regions() if region.state == "replay"]


def figures() -> str:
    """The reports of all graphs, for messages."""
    return render_text(pygraph.reports())


def assert_replayed(at_least: int = 1) -> None:
    """Every wrapped region was replayed, no capture was refused, and PyGraph gave nothing up."""
    assert not [report.error for report in pygraph.reports() if report.error], figures()
    assert len(replaying_regions()) == len(wrapped_regions()) >= at_least, figures()


_RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""What ``torch.testing.assert_close`` allows results of a type."""


def assert_same(actual: Any, expected: Any, *, call: object = None, through: torch.dtype | None = None) -> None:
    """Equal but for rounding, on the same devices: two compilations may tune one reduction to other block sizes, and
    fused kernels round less often than eager. Results of another type that came ``through`` a shorter one, as under
    autocast, are rounded as that is. (That a replay has the bits of the uncaptured run is checked by the runtime
    itself, here and in the tests of operators.)"""
    bounds = {} if through is None else {"rtol": _RELATIVE[through], "atol": 1e-5}
    ours, theirs = (torch.utils._pytree.tree_leaves(tree) for tree in (actual, expected))
    assert len(ours) == len(theirs), f"call {call}: {len(ours)} results, not {len(theirs)}"
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, torch.Tensor):
            assert a.device == b.device, f"result {place} of call {call} is on {a.device}, not {b.device}"
            torch.testing.assert_close(
                a,
                b,
                equal_nan=True,
                msg=lambda text, at=place: f"result {at} of call {call}: {text}\n{figures()}",
                **bounds,
            )
        else:
            assert a == b, f"result {place} of call {call}"
