"""A document of results as a page of Markdown, and the files of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pygraph.bench.process import gist
from pygraph.bench.results import LEVEL, Document, write
from pygraph.bench.sides import BASELINES, OURS
from pygraph.cache import write_atomically

LOSS = 1 / 1.02
"""A ratio below this is a loss: PyGraph takes over 2 % longer."""
_NONE = "–"


def write_all(folder: Path, found: Document, more: Mapping[str, Iterable[str]] | None = None) -> None:
    """Write ``results.json`` and ``results.md``. Raises OSError."""
    write(folder / "results.json", found)
    write_atomically(folder / "results.md", page(found, more))


def page(found: Document, more: Mapping[str, Iterable[str]] | None = None) -> str:
    """The page in Markdown. ``more`` has the lines of further sections, by title."""
    rows = found["workloads"]
    wrong = [
        f"- **{name}, {side}**: {each['error']}. No speed-up is given."
        for name, row in rows.items()
        for side, each in row["sides"].items()
        if each["status"] == "wrong"
    ]
    sections: dict[str, Iterable[str]] = {"WRONG RESULTS": wrong, **(more or {})}
    for domain in dict.fromkeys(row["domain"] for row in rows.values()):
        sections[domain.capitalize()] = _table({n: row for n, row in rows.items() if row["domain"] == domain})
    sections["Left out, failed, and to be noted"] = _rest(found)
    texts = [f"## {title}\n\n{text}" for title, lines in sections.items() if (text := "\n".join(lines))]
    return "\n\n".join([_head(found), *texts]) + "\n"


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
