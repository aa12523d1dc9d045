"""Results as pictures, with matplotlib: gains over the baselines, memory, and what each mechanism is worth.

Colours are those of Okabe and Ito, which readers who see few colours can tell apart. What is drawn comes from
``facts``; a ratio that is not there is not drawn, and the reason stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraph.bench.facts import LOSS, geometric, wall_ratio
from pygraph.bench.sides import BASELINES, OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "kinds"]

_GAIN, _LOSS, _THIRD = "#0072B2", "#D55E00", "#E69F00"
_COLOURS = {"reduce-overhead": _THIRD, OURS: _GAIN}
_ROW = 0.27
"""Inches that a workload takes."""

Row = Mapping[str, Any]


def kinds(document: Row) -> dict[str, str]:
    """The pictures that there is something to draw for: the word that ends the file's name, and a title."""
    rows = document["workloads"].values()
    found = {}
    if any(wall_ratio(row, side) is not None for row in rows for side in BASELINES):
        found["gains"] = "Gains over Inductor's modes"
    if any(_reserved(row, BASELINES[0]) for row in rows):
        found["memory"] = "Reserved memory"
    if any(wall_ratio(row, side) is not None for row in rows for side in document["ablations"]):
        found["ablations"] = "What each mechanism is worth"
    return found


def draw(document: Row, base: Path) -> list[Path]:
    """Draw every picture there is something for, beside ``base``: ``results.png`` gives ``results-gains.png``, ….

    Returns the files. Raises ImportError without matplotlib, and OSError.
    """
    drawn = []
    for kind, title in kinds(document).items():
        figure = _FIGURES[kind](document)
        figure.suptitle(f"{title} – {_where(document)}", fontsize=11)
        path = base.with_name(f"{base.stem}-{kind}.png")
        figure.savefig(path, dpi=150)
        drawn.append(path)
    return drawn


def _where(document: Row) -> str:
    machine = document["machine"]
    small = ", small workloads" if document["settings"]["tiny"] else ""
    return f"{machine.get('gpu') or 'CPU'}, torch {machine['torch']}, {machine['date']}{small}"


def _figure(rows: int, columns: int = 1, width: float = 9.0) -> tuple[Figure, list[Axes]]:
    """A figure without a window, tall enough for ``rows`` lines of text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 1.5 + _ROW * max(rows, 3)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    return figure, list(axes)


# -- gains over the baselines ------------------------------------------------------------------------------------------


def _gains(document: Row) -> Figure:
    rows = document["workloads"]
    sides = [side for side in reversed(BASELINES) if any(side in row["sides"] for row in rows.values())]
    figure, axes = _figure(len(rows), len(sides), width=4.0 + 4.0 * len(sides))
    for axis, side in zip(axes, sides, strict=True):
        _bars(axis, rows, side)
        mean, count = geometric(document, side)
        told = "" if mean is None else f"\ngeometric mean {mean:.2f} of {count}"
        axis.set_title(f"time of {side} / time of PyGraph{told}", fontsize=9)
        axis.set_xlabel("orange: PyGraph takes over 2 % longer", fontsize=8)
    _names(axes[0], list(rows))
    return figure


def _bars(axis: Axes, rows: Mapping[str, Row], side: str) -> None:
    """A bar for each workload from 1 to its ratio, with the interval of the median."""
    axis.set_xscale("log", base=2)
    _ratio_axis(axis, [ratio for row in rows.values() if (ratio := wall_ratio(row, side)) is not None])
    for place, row in enumerate(rows.values()):
        ratio = wall_ratio(row, side)
        if ratio is None:
            why = "wrong results" if _wrong(row, side) else row["sides"].get(side, {}).get("status", "not measured")
            axis.text(1.02, place, why, va="center", fontsize=7, color=_LOSS if why == "wrong results" else "black")
            continue
        colour = _LOSS if ratio < LOSS else _GAIN
        axis.barh(place, ratio - 1.0, left=1.0, height=0.7, color=colour)
        interval = row["ratios"][side]["wall_us"]["interval"]
        if interval:
            axis.plot(interval, [place, place], color="black", linewidth=1)
        edge = max(ratio, interval[1] if interval else ratio, 1.0)
        axis.annotate(f"{ratio:.2f}", (edge, place), (3, 0), textcoords="offset points", va="center", fontsize=7)


def _wrong(row: Row, side: str) -> bool:
    return "wrong" in (row["sides"].get(name, {}).get("status") for name in (side, OURS))


def _ratio_axis(axis: Axes, ratios: Sequence[float]) -> None:
    """A logarithmic axis that holds the ratios and 1, which is marked, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    low, high = min([*ratios, 0.8]), max([*ratios, 1.5])
    axis.set_xlim(low / 1.1, high * 1.35)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.axvline(1.0, color="black", linewidth=1)
    axis.grid(axis="x", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=7)


def _names(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names) - 0.4, -0.6)


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(document: Row) -> Figure:
    """Bars from 1 to what a side reserves over what Inductor's default does, which stands beside the name."""
    first = BASELINES[0]
    rows = {name: row for name, row in document["workloads"].items() if _reserved(row, first)}
    sides = [side for side in (*BASELINES[1:], OURS) if any(_reserved(row, side) for row in rows.values())]
    figure, (axis,) = _figure(round(1.4 * len(rows)))
    axis.set_xscale("log", base=2)
    over = {side: [_reserved(row, side) / _reserved(row, first) for row in rows.values()] for side in sides}
    _ratio_axis(axis, [ratio for found in over.values() for ratio in found if ratio])
    height = 0.8 / max(len(sides), 1)
    for number, side in enumerate(sides):
        places = [place + (number - (len(sides) - 1) / 2) * height for place in range(len(rows))]
        widths = [ratio - 1.0 if ratio else 0.0 for ratio in over[side]]
        axis.barh(places, widths, left=1.0, height=height, color=_COLOURS[side], label=side)
    axis.set_xlabel(f"memory that torch reserves once warm, over that of {first} (MB beside the name)", fontsize=8)
    axis.legend(fontsize=8, loc="best")
    _names(axis, [f"{name}  {_reserved(row, first) / 2**20:,.0f}" for name, row in rows.items()])
    return figure


def _reserved(row: Row, side: str) -> float:
    """Bytes, 0 where they are not known."""
    return float(row["sides"].get(side, {}).get("reserved_bytes") or 0.0)


# -- ablations ---------------------------------------------------------------------------------------------------------


def _ablations(document: Row) -> Figure:
    """A line of dots for each mechanism, one dot per workload, and a bar at their geometric mean."""
    rows = document["workloads"].values()
    off: Mapping[str, str] = document["ablations"]
    present = [side for side in off if any(wall_ratio(row, side) is not None for row in rows)]
    figure, (axis,) = _figure(3 * len(present))
    axis.set_xscale("log", base=2)
    ratios = {side: [ratio for row in rows if (ratio := wall_ratio(row, side)) is not None] for side in present}
    _ratio_axis(axis, [ratio for found in ratios.values() for ratio in found])
    for place, side in enumerate(present):
        colours = [_LOSS if ratio < LOSS else _GAIN for ratio in ratios[side]]
        axis.scatter(ratios[side], [place] * len(colours), s=18, c=colours, alpha=0.7)
        mean, count = geometric(document, side)
        if mean is not None:
            axis.plot([mean, mean], [place - 0.3, place + 0.3], color="black", linewidth=2)
            axis.annotate(f"{mean:.2f} ({count})", (mean, place - 0.34), ha="center", fontsize=7)
    axis.set_xlabel("time without it / time with it, a dot per workload; the bar is the geometric mean", fontsize=8)
    _names(axis, [f"without {off[side]}" for side in present])
    return figure


_FIGURES: dict[str, Callable[[Row], Figure]] = {"gains": _gains, "memory": _memory, "ablations": _ablations}
