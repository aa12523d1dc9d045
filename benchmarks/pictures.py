"""Pictures of results: gains over Inductor's modes and memory (matplotlib), and the timeline of a call (SVG)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pygraph.bench.render import LOSS
from pygraph.bench.results import Document
from pygraph.bench.sides import BASELINES, OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PICTURES", "draw", "timeline"]

PICTURES = {"gains": ("Gains over Inductor's modes", "wall_us"), "memory": ("Reserved memory", "reserved_bytes")}
"""Title and drawn ratio, by the last word of the file's name."""
_GAIN, _LOSS = "#0072B2", "#D55E00"
"""Colours of Okabe and Ito, for colour-blind readers."""


def draw(found: Document, folder: Path) -> list[str]:
    """Draw every picture that has data as ``results-KIND.png``; returns their references in Markdown.

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
    """A bar for each program from 1 to its ratio, with the interval of the median; a word if there is no ratio."""
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


_WIDTH, _LEFT = 760, 130
_STYLE = """\
  text { font: 12px sans-serif; fill: #444 }
  .host { fill: #D55E00 } .gpu { fill: #0072B2 } line { stroke: #888 }
  @media (prefers-color-scheme: dark) { text { fill: #ccc } }"""


def timeline(times: Mapping[str, tuple[float, float]], launches: int, title: str) -> str:
    """An SVG of the host and the GPU during one call of each side.

    ``times`` are µs of the host and of the whole call, by side. The last side keeps the GPU busy all the time; the
    others run the same kernels, spread evenly over their time.
    """
    longest = max(wall for _, wall in times.values())
    busy = list(times.values())[-1][1]
    scale = (_WIDTH - _LEFT - 70) / longest
    parts = [f'<text x="8" y="18">{title}: µs of one call, {launches} kernels</text>']
    y = 34
    for side, (host, wall) in times.items():
        parts.append(f'<text x="8" y="{y + 29}">{side}</text>')
        parts.append(f'<text x="88" y="{y + 12}">host</text><text x="88" y="{y + 32}">GPU</text>')
        parts.append(f'<rect class="host" x="{_LEFT}" y="{y}" width="{host * scale:.1f}" height="15"/>')
        if wall > 1.1 * busy:
            step, width = (wall * scale) / launches, max((busy * scale) / launches, 0.5)
            starts = (_LEFT + step * (place + 1) - width for place in range(launches))
            bars = "".join(f"M{start:.1f} {y + 20}h{width:.1f}v15h-{width:.1f}z" for start in starts)
            parts.append(f'<path class="gpu" d="{bars}"/>')
        else:
            parts.append(f'<rect class="gpu" x="{_LEFT}" y="{y + 20}" width="{wall * scale:.1f}" height="15"/>')
        parts.append(f'<text x="{_LEFT + wall * scale + 6:.1f}" y="{y + 32}">{wall:,.0f}</text>')
        y += 54
    size = f'viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{_STYLE}\n</style>\n{body}\n</svg>\n'
