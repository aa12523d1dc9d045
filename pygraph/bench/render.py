"""A document of results as a page of Markdown and as pictures (matplotlib), and where they are written."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pygraph.bench.process import gist
from pygraph.bench.results import LEVEL, Document, write
from pygraph.bench.sides import BASELINES, OURS
from pygraph.cache import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LOSS", "draw", "line", "page", "with_head", "write_all"]

LOSS = 1 / 1.02
"""A ratio below this is a loss: PyGraph takes over 2 % longer."""
_NONE = "–"
_PICTURES = {"gains": ("Gains over Inductor's modes", "wall_us"), "memory": ("Reserved memory", "reserved_bytes")}
"""Title, and the ratio that is drawn, by the word that ends the file's name."""


def write_all(folder: Path, found: Document, more: Mapping[str, Iterable[str]] | None = None) -> None:
    """Write ``results.json``, ``results.md`` and, where matplotlib is installed, pictures. Raises OSError."""
    write(folder / "results.json", found)
    plots = importlib.util.find_spec("matplotlib") is not None
    if plots:
        draw(found, folder / "results.png")
    write_atomically(folder / "results.md", page(found, "results" if plots else None, more))


# -- the page ----------------------------------------------------------------------------------------------------------


def page(found: Document, pictures: str | None = None, more: Mapping[str, Iterable[str]] | None = None) -> str:
    """The page. ``pictures`` is the base name of pictures that lie beside it, ``more`` are lines of further sections
    by title."""
    rows = found["workloads"]
    shown = [f"![{_PICTURES[kind][0]}]({pictures}-{kind}.png)" for kind in _kinds(found)] if pictures else []
    sections: dict[str, Iterable[str]] = {"WRONG RESULTS": _wrong(found), **(more or {})}
    for domain in dict.fromkeys(row["domain"] for row in rows.values()):
        sections[domain.capitalize()] = _table({n: row for n, row in rows.items() if row["domain"] == domain})
    sections["Left out, failed, and to be noted"] = _rest(found)
    texts = [f"## {title}\n\n{text}" for title, lines in sections.items() if (text := "\n".join(lines))]
    return "\n\n".join([_head(found), *shown, *texts]) + "\n"


def _head(found: Document) -> str:
    machine, settings = found["machine"], found["settings"]
    where = machine.get("gpu") or f"{machine['cores']} CPU cores"
    versions = [f"{name} {machine[name.lower()]}" for name in ("torch", "CUDA", "driver") if machine.get(name.lower())]
    small = " Workloads are small, as for tests: the figures say nothing of real ones." if settings["tiny"] else ""
    return (
        f"# {where}, {machine['date']}\n\n"
        f"PyGraph {found['pygraph']}, {', '.join(versions)}. Every side in a process of its own, all alive at the "
        f"same time, {settings['blocks']} rounds of blocks in random order. Ratios are taken within rounds: above 1, "
        f"PyGraph takes less. ± is half of the 95 % interval of the median, or of one as sure as stands beside it "
        f"where rounds are too few.{small}"
    )


def _wrong(found: Document) -> list[str]:
    return [
        f"- **{name}, {side}**: {each['error']}. No speed-up is given."
        for name, row in found["workloads"].items()
        for side, each in row["sides"].items()
        if each["status"] == "wrong"
    ]


def _table(rows: Document) -> list[str]:
    others = list(dict.fromkeys(side for row in rows.values() for side in row["sides"] if side != OURS))
    head = ["workload", *(f"over {side}" for side in others), "host time over", "wall, host µs"]
    lines = []
    for name, row in rows.items():
        ours, ratios = row["sides"].get(OURS, {}), row["ratios"]
        hosts = [(side, ratios[side]["host_us"]["ratio"]) for side in BASELINES if "host_us" in ratios.get(side, {})]
        times = [f"{ours[key]['median']:.1f}" if key in ours else _NONE for key in ("wall_us", "host_us")]
        memory = [(side, row["sides"].get(side, {}).get("reserved_bytes")) for side in (*BASELINES, OURS)]
        share = (ours.get("coverage") or {}).get("share")
        cells = [f"{name} ({row['kind']})", *(_ratio_cell(row, side) for side in others)]
        cells += [", ".join(f"{side} {ratio:.2f}" for side, ratio in hosts) or _NONE, ", ".join(times)]
        cells += [", ".join(f"{side} {nbytes / 2**20:.0f}" for side, nbytes in memory if nbytes is not None) or _NONE]
        lines.append(line(*cells, _NONE if share is None else f"{share:.0%}"))
    return with_head([*head, "memory, MB", "captured"], lines)


def _ratio_cell(row: Document, side: str) -> str:
    found = row["ratios"].get(side, {}).get("wall_us")
    if found is None:
        status = [row["sides"].get(name, {}).get("status", "") for name in (side, OURS)]
        return "**WRONG RESULTS**" if "wrong" in status else _NONE if status[0] in ("ok", "") else status[0]
    text = f"{found['ratio']:.2f}"
    if found["interval"] and found["confidence"]:
        text += f" ± {(found['interval'][1] - found['interval'][0]) / 2:.2f}"
        text += "" if found["confidence"] >= LEVEL else f" ({found['confidence']:.0%})"
    elif found["interval"]:
        text += " (1 round)"
    return f"**{text}**" if found["ratio"] < LOSS and side in BASELINES else text


def _rest(found: Document) -> list[str]:
    lines = [f"- {name}: {why}" for name, why in {**found["skipped"], **found["left_out"]}.items()]
    alike: dict[str, list[str]] = {}
    for name, row in found["workloads"].items():
        for side, each in row["sides"].items():
            if each["status"] not in ("ok", "wrong"):
                alike.setdefault(f"{side} {each['status']} ({gist(each['error'])[:300]})", []).append(name)
    lines += [f"- {why}: {', '.join(names)}" for why, names in alike.items()]
    return lines + [f"- {name}: {note}" for name, row in found["workloads"].items() for note in row["notes"]]


def with_head(head: Sequence[str], lines: Sequence[str]) -> list[str]:
    return [line(*head), line(*["---"] * len(head)), *lines] if lines else []


def line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# -- pictures ----------------------------------------------------------------------------------------------------------

_GAIN, _LOSS = "#0072B2", "#D55E00"
"""Colours of Okabe and Ito, for readers who see few."""


def _kinds(found: Document) -> list[str]:
    """The pictures that there is something to draw for."""
    ratios = [row["ratios"].get(side, {}) for row in found["workloads"].values() for side in BASELINES]
    return [kind for kind, (_, key) in _PICTURES.items() if any(key in each for each in ratios)]


def draw(found: Document, base: Path) -> None:
    """Draw every picture there is something for, beside ``base``: ``results.png`` gives ``results-gains.png``, ….

    Raises ImportError without matplotlib, and OSError.
    """
    from matplotlib.figure import Figure

    rows, machine = found["workloads"], found["machine"]
    where = f"{machine.get('gpu') or 'CPU'}, torch {machine['torch']}, {machine['date']}"
    for kind in _kinds(found):
        title, key = _PICTURES[kind]
        sides = [side for side in reversed(BASELINES) if any(side in row["sides"] for row in rows.values())]
        figure = Figure(figsize=(4.0 + 4.0 * len(sides), 1.5 + 0.27 * max(len(rows), 3)), layout="constrained")
        figure.suptitle(f"{title} – {where}")
        axes = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
        for axis, side in zip(axes, sides, strict=True):
            _panel(axis, rows, side, key)
            axis.set_title(f"{key.partition('_')[0]}: {side} / PyGraph", fontsize=9)
        axes[0].set_yticks(range(len(rows)), list(rows), fontsize=7)
        axes[0].set_ylim(len(rows) - 0.4, -0.6)
        figure.savefig(base.with_name(f"{base.stem}-{kind}.png"), dpi=150)


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
