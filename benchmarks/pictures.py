"""Pictures of a document of results (matplotlib): gains over Inductor's modes, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pygraph.bench.render import LOSS
from pygraph.bench.results import Document
from pygraph.bench.sides import BASELINES, OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PICTURES", "draw"]

PICTURES = {"gains": ("Gains over Inductor's modes", "wall_us"), "memory": ("Reserved memory", "reserved_bytes")}
"""Title, and the ratio that is drawn, by the word that ends the file's name."""
_GAIN, _LOSS = "#0072B2", "#D55E00"
"""Colours of Okabe and Ito, for readers who see few."""


def draw(found: Document, folder: Path) -> list[str]:
    """Draw every picture that there is something for as ``results-KIND.png``; returns their references in Markdown.

    Raises ImportError without matplotlib, and OSError.
    """
    from matplotlib.figure import Figure

    rows, machine, shown = found["workloads"], found["machine"], []
    where = f"{machine.get('gpu') or 'CPU'}, torch {machine['torch']}, {machine['date']}"
    sides = [side for side in reversed(BASELINES) if any(side in row["sides"] for row in rows.values())]
    for kind, (title, key) in PICTURES.items():
        if not any(key in row["ratios"].get(side, {}) for row in rows.values() for side in sides):
            continue
        figure = Figure(figsize=(4.0 + 4.0 * len(sides), 1.5 + 0.27 * max(len(rows), 3)), layout="constrained")
        figure.suptitle(f"{title} – {where}")
        axes = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
        for axis, side in zip(axes, sides, strict=True):
            _panel(axis, rows, side, key)
            axis.set_title(f"{key.partition('_')[0]}: {side} / PyGraph", fontsize=9)
        axes[0].set_yticks(range(len(rows)), list(rows), fontsize=7)
        axes[0].set_ylim(len(rows) - 0.4, -0.6)
        figure.savefig(folder / f"results-{kind}.png", dpi=150)
        shown.append(f"![{title}](results-{kind}.png)")
    return shown


def _panel(axis: Axes, rows: Document, side: str, key: str) -> None:
    """A bar for each program from 1 to its ratio, with the interval of the median; a word where there is none."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_xscale("log", base=2)
    seen = [0.8, 1.5]
    for place, row in enumerate(rows.values()):
        found = row["ratios"].get(side, {}).get(key)
        if found is None:
            status = [row["sides"].get(name, {}).get("status", "not measured") for name in (side, OURS)]
            axis.text(1.02, place, "wrong results" if "wrong" in status else status[0], va="center", fontsize=7)
            continue
        ratio, interval = (found["ratio"], found["interval"] or []) if isinstance(found, dict) else (found, [])
        axis.barh(place, ratio - 1.0, left=1.0, height=0.7, color=_LOSS if ratio < LOSS else _GAIN)
        axis.plot(interval, [place] * len(interval), color="black", linewidth=1)
        edge = (max(ratio, 1.0, *interval), place)
        axis.annotate(f"{ratio:.2f}", edge, (3, 0), textcoords="offset points", va="center", fontsize=7)
        seen.append(ratio)
    axis.set_xlim(min(seen) / 1.1, max(seen) * 1.35)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.axvline(1.0, color="black", linewidth=1)
    axis.grid(axis="x", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=7)
