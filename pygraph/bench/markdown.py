"""Results as a page of Markdown: ratios by domain, losses, what was wrong, and what was left out.

Reads the document of ``results`` and decides nothing: a ratio that is not there is not shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pygraph.bench.facts import (
    LOSS,
    best_ratio,
    by_domain,
    geometric,
    left_out_of_means,
    losses,
    sides_in,
    troubles,
    wall_ratio,
)
from pygraph.bench.protocol import gist
from pygraph.bench.sides import BASELINES, OURS
from pygraph.bench.statistics import LEVEL

__all__ = ["render_markdown"]

_NONE = "–"


def render_markdown(document: Mapping[str, Any], pictures: str | None = None) -> str:
    """The page. ``pictures`` is the base name of pictures that lie beside it."""
    parts = [
        _head(document),
        _wrong(document),
        _summary(document),
        _pictures(document, pictures),
        *(_domain(domain, rows) for domain, rows in by_domain(document).items()),
        _losses(document),
        _ablations(document),
        _measured(document),
        _rest(document),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Mapping[str, Any]) -> str:
    machine, settings = document["machine"], document["settings"]
    where = machine.get("gpu") or f"{machine['cores']} CPU cores"
    versions = [f"torch {machine['torch']}"]
    versions += [f"{name} {machine[key]}" for name, key in (("CUDA", "cuda"), ("driver", "driver")) if machine.get(key)]
    small = " Workloads are small, as for tests: the figures say nothing of real ones." if settings["tiny"] else ""
    return (
        f"# {where}, {machine['date']}\n\n"
        f"PyGraph {document['pygraph']}, {', '.join(versions)}. Every side in a process of its own, all alive at the "
        f"same time, {settings['blocks']} rounds of blocks in random order. Ratios are taken within rounds: above 1, "
        f"PyGraph takes less. ± is half of the 95 % interval of the median, or of one as sure as stands beside it "
        f"where rounds are too few.{small}"
    )


def _wrong(document: Mapping[str, Any]) -> str:
    rows = [row for row in troubles(document) if row.status == "wrong"]
    if not rows:
        return ""
    lines = [f"- **{row.workload}, {row.side}**: {row.error}. No speed-up is given." for row in rows]
    return "\n".join(["## WRONG RESULTS", "", *lines])


def _summary(document: Mapping[str, Any]) -> str:
    lines = ["## Overall", "", "| over | geometric mean, wall time | workloads | not in it |", "|---|---|---|---|"]
    for side in BASELINES:
        mean, count = geometric(document, side)
        if count:
            without = ", ".join(left_out_of_means(document, side)) or "none"
            lines.append(f"| {side} | **{mean:.3f}** | {count} | {without} |")
    return "\n".join(lines) if len(lines) > 4 else ""


def _pictures(document: Mapping[str, Any], base: str | None) -> str:
    if base is None:
        return ""
    from pygraph.bench.plots import kinds

    return "\n\n".join(f"![{title}]({base}-{kind}.png)" for kind, title in kinds(document).items())


def _domain(domain: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    others = [side for side in sides_in(rows) if side not in (OURS,)]
    head = [
        "workload",
        *(f"over {side}" for side in others),
        "host time over",
        "wall, host µs",
        "memory, MB",
        "captured",
    ]
    lines = [f"## {domain.capitalize()}", "", _line(head), _line(["---"] * len(head))]
    lines += [_line(_cells(name, row, others)) for name, row in rows.items()]
    return "\n".join(lines)


def _cells(name: str, row: Mapping[str, Any], others: Sequence[str]) -> Iterator[str]:
    yield f"{name} ({row['kind']})"
    for side in others:
        yield _ratio_cell(row, side)
    hosts = [(side, row["ratios"].get(side, {}).get("host_us")) for side in BASELINES]
    yield ", ".join(f"{side} {ratio['ratio']:.2f}" for side, ratio in hosts if ratio) or _NONE
    ours = row["sides"].get(OURS, {})
    yield f"{_median(ours, 'wall_us')}, {_median(ours, 'host_us')}"
    yield _memory(row)
    share = (ours.get("coverage") or {}).get("share")
    yield _NONE if share is None else f"{share:.0%}"


def _ratio_cell(row: Mapping[str, Any], side: str) -> str:
    ratio = row["ratios"].get(side, {}).get("wall_us")
    if ratio is None:
        status = row["sides"].get(side, {}).get("status", "")
        ours = row["sides"].get(OURS, {}).get("status", "")
        if "wrong" in (status, ours):
            return "**WRONG RESULTS**"
        return _NONE if status in ("ok", "") else str(status)
    text = f"{ratio['ratio']:.2f}"
    text += _interval(ratio)
    return text if ratio["ratio"] >= LOSS or side not in BASELINES else f"**{text}**"


def _interval(ratio: Mapping[str, Any]) -> str:
    """Half the interval, and how sure it is where that is less than it is meant to be; one round has none."""
    if not ratio["interval"] or not ratio["confidence"]:
        return " (1 round)" if ratio["interval"] else ""
    text = f" ± {(ratio['interval'][1] - ratio['interval'][0]) / 2:.2f}"
    return text if ratio["confidence"] >= LEVEL else f"{text} ({ratio['confidence']:.0%})"


def _memory(row: Mapping[str, Any]) -> str:
    """Reserved memory of each baseline and PyGraph."""
    found = [(side, row["sides"].get(side, {}).get("reserved_bytes")) for side in (*BASELINES, OURS)]
    shown = [f"{side} {nbytes / 2**20:.0f}" for side, nbytes in found if nbytes is not None]
    return ", ".join(shown) or _NONE


def _median(side: Mapping[str, Any], key: str) -> str:
    return f"{side[key]['median']:.1f}" if key in side else _NONE


def _losses(document: Mapping[str, Any]) -> str:
    better = f"the better of {' and '.join(BASELINES)}"
    rows = [f"- **{name}**: {ratio:.3f}" for name, ratio in losses(document)]
    ratios = [(name, wall_ratio(row, "eager")) for name, row in document["workloads"].items()]
    rows += [f"- **{name}**: {ratio:.3f} over eager" for name, ratio in ratios if ratio is not None and ratio < LOSS]
    if rows:
        said = f"PyGraph takes over 2 % longer than {better}, or than eager (ratio of its time to PyGraph's):"
        return "\n".join(["## Losses", "", said, "", *rows])
    if all(best_ratio(row) is None for row in document["workloads"].values()):
        return ""
    return "## Losses\n\nNone: PyGraph nowhere takes over 2 % longer than these or eager, as far as there are ratios."


def _ablations(document: Mapping[str, Any]) -> str:
    off: Mapping[str, str] = document["ablations"]
    present = [side for side in off if any(side in row["sides"] for row in document["workloads"].values())]
    if not present:
        return ""
    head = ["workload", *(f"without {off[side]}" for side in present)]
    lines = ["## What each mechanism is worth", "", "Time without it over time with it.", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    for name, row in document["workloads"].items():
        lines.append(_line([name, *(_ratio_cell(row, side) for side in present)]))
    means = [geometric(document, side) for side in present]
    lines.append(_line(["geometric mean", *(_NONE if mean is None else f"{mean:.3f} of {n}" for mean, n in means)]))
    return "\n".join(lines)


def _measured(document: Mapping[str, Any]) -> str:
    lines = []
    for name, row in document["workloads"].items():
        regions = row["sides"].get(OURS, {}).get("regions", ())
        decisions = [each for region in regions for each in region.get("decisions", ())]
        if not decisions:
            continue
        choices = ", ".join(f"{n} {choice}" for choice, n in Counter(each["choice"] for each in decisions).items())
        lines.append(_line([name, choices, str(sum(each["calls"] for each in decisions))]))
    if not lines:
        return ""
    head = ["workload", "decided", "calls"]
    return "\n".join(["## Measured selection", "", _line(head), _line(["---"] * len(head)), *lines])


def _rest(document: Mapping[str, Any]) -> str:
    lines = [f"- {name}: {why}" for name, why in {**document["skipped"], **document["left_out"]}.items()]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in troubles(document):
        if row.status != "wrong":
            alike.setdefault((row.side, row.status, _one_line(row.error)), []).append(row.workload)
    lines += [f"- {side} {status} ({error}): {', '.join(names)}" for (side, status, error), names in alike.items()]
    lines += [f"- {name}: {note}" for name, row in document["workloads"].items() for note in row["notes"]]
    return "\n".join(["## Left out, failed, and to be noted", "", *lines]) if lines else ""


def _one_line(text: str) -> str:
    return gist(text)[:300]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
