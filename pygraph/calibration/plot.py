"""Predictions against measurements as a picture: a panel for device time, one for host time. Needs matplotlib.

What is drawn is a ``Calibration``; nothing here measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pygraph.calibration.records import PANELS, Calibration, Point, error_of
from pygraph.errors import PygraphError

__all__ = ["PlotError", "draw", "figure_of"]

_MARKERS = "os^Dv<>Ph*"
_BAND = 2.0
_SIZE = (11.0, 5.6)
_DOTS = 150


class PlotError(PygraphError):
    """There is nothing to draw with."""


def draw(calibration: Calibration, path: Path) -> None:
    """Write the picture, a PNG, to ``path``. Raises PlotError without matplotlib, OSError if it cannot be written."""
    figure_of(calibration).savefig(path, format="png", dpi=_DOTS)


def figure_of(calibration: Calibration) -> Any:
    """The picture as a matplotlib Figure, which no window shows. Raises PlotError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(
            "plots need matplotlib: install pygraph[plot], or write --json here and draw with --from elsewhere"
        ) from error
    figure = Figure(figsize=_SIZE, layout="constrained")
    figure.suptitle(f"Predicted and measured time: {calibration.model.label}")
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        _panel(axes, title, calibration.panel(name))
    identity = calibration.identity
    figure.supxlabel(f"torch {identity.torch}, driver {identity.driver}, PyGraph {identity.pygraph}", fontsize="small")
    return figure


def _panel(axes: Any, title: str, points: Sequence[Point]) -> None:
    axes.set_title(title)
    error = error_of(points)
    if error is None:
        axes.set_axis_off()
        return
    axes.set_xscale("log")
    axes.set_yscale("log")
    times = [time for point in points for time in (point.predicted_us, point.measured_us)]
    ends = [min(times) / _BAND, max(times) * _BAND]
    axes.plot(ends, ends, color="0.4", linewidth=1, label="equal")
    low, high = ([end / _BAND for end in ends], [end * _BAND for end in ends])
    axes.fill_between(ends, low, high, color="0.9", label=f"within a factor of {_BAND:g}")
    kinds = list(dict.fromkeys(point.kind for point in points))
    for number, kind in enumerate(kinds):
        _kind(axes, kind, number, [point for point in points if point.kind == kind])
    axes.set(xlim=ends, ylim=ends, ylabel="predicted, µs")
    axes.set_xlabel(f"measured, µs\n{error.text}", fontsize="small")
    axes.legend(fontsize="small", loc="upper left")


def _kind(axes: Any, kind: str, number: int, points: Sequence[Point]) -> None:
    measured = [point.measured_us for point in points]
    predicted = [point.predicted_us for point in points]
    spread = [
        [max(0.0, point.measured_us - point.low_us) for point in points],
        [max(0.0, point.high_us - point.measured_us) for point in points],
    ]
    color, marker = f"C{number % 10}", _MARKERS[number % len(_MARKERS)]
    axes.errorbar(measured, predicted, xerr=spread, fmt="none", ecolor=color, alpha=0.4)
    axes.scatter(measured, predicted, color=color, marker=marker, label=kind, gid=kind, zorder=3)
