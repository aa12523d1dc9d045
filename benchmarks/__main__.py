"""``python -m benchmarks NAMES``: workloads of the suite, measured side by side by ``pygraph.bench``."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.pictures import draw
from benchmarks.running import SUITE, program_of, workloads
from benchmarks.sides import GRAPH, GRAPHED, STEP, STEP_IN_ORDER, SUITE_SIDES, WHOLE_STEP, compiler_of
from benchmarks.workload import Workload
from pygraph.bench.process import gist
from pygraph.bench.render import LOSS, line, page, with_head, write_all
from pygraph.bench.results import SCHEMA, Document, document, machine, row_of, write
from pygraph.bench.sides import BASELINES, OURS, REFERENCE, Side, sides_for
from pygraph.bench.timing import Bench, Program
from pygraph.logs import working

ROOT = Path(__file__).resolve().parent.parent
_BINDING = {"machine": ("gpu", "device", "cpu", "cores", "torch", "cuda", "driver"), "settings": ("tiny", "blocks")}
"""Fields that must be equal in results to combine."""
BEST = "the best in parts"
_IN_PARTS = (*BASELINES, GRAPHED)
"""Sides that compile or capture parts of a training step, without PyGraph."""
_WHOLE = (*_IN_PARTS, BEST, OURS, GRAPH, WHOLE_STEP, STEP_IN_ORDER)
"""Columns of sides compared with ``pygraph.train_step``."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List the workloads, and what keeps any from running here.")
@click.option("--sides", default="", metavar="A,B,…", help="Ways of compiling.  [default: all that apply]")
@click.option("--against", multiple=True, metavar="NAME",
              help="Another backend as a side: MODULE:FUNCTION, which compiles what it is given, or a name that "
                   "torch.compile takes.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False), help="A folder for results as JSON, Markdown and pictures.")
@click.option("--from", "sources", multiple=True, metavar="JSON",
              help="Measure nothing: write --out from these results. Several files are put together.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True, metavar="N",
              help="What is not measured by then is left out, and named.")  # fmt: skip
@click.option("--blocks", type=click.IntRange(min=1), default=11, show_default=True, help="Rounds of blocks.")
@click.option("--calls", type=click.IntRange(min=1), help="Calls of a block.  [default: as the workload says]")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="[default: cuda, if there is one]")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True,
              help="Workloads that compile at once and then wait, in memory, until they are timed.")  # fmt: skip
@click.option("--reserve", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Cores, of those that taskset allows, on which only what is timed runs: another benchmark, on "
                   "another GPU, may use the rest.")  # fmt: skip
@click.option("--tiny/--full", default=None, help="Small versions of the workloads.  [default: small on a CPU]")
@click.option("--suite", default=SUITE, metavar="MODULE", help="A module with WORKLOADS of your own.")
@click.option("--caches", type=click.Path(file_okay=False),
              help="A folder that keeps what is compiled, for a later run.  [default: none is kept]")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of blocks.")
def main(names: tuple[str, ...], **options: Any) -> None:
    """Time workloads side by side: eager, Inductor's modes, CUDA graphs by hand, and PyGraph.

    NAMES are workloads, domains or kinds of the suite (see --list); without any, all are run. How they are measured is
    said by `pygraph bench --help`.
    """
    try:
        out = None if options["out"] is None else Path(options["out"])
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)  # now, so that a long run does not fail at its end
        if options["sources"]:
            if names or out is None:
                raise ValueError("--from measures nothing: it takes no names, and needs --out")
            found = combine([read(Path(source)) for source in options["sources"]])
            write_drawn(out, found)
        elif options["listing"]:
            show(workloads(options["suite"]))
        else:
            measure(chosen(names, workloads(options["suite"])), options, out)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def chosen(names: Sequence[str], known: Mapping[str, Workload]) -> list[Workload]:
    """The workloads with these names, or all; a domain or kind stands for all of its workloads. Raises ValueError."""
    found: dict[str, Workload] = {}
    for name in names or list(known):
        matches = [w for w in known.values() if name in (w.name, w.domain, w.kind)]
        if not matches:
            near = difflib.get_close_matches(name, [*known, *{w.domain for w in known.values()}], n=1, cutoff=0.4)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"no workload is called '{name}'; {hint}")
        found.update({workload.name: workload for workload in matches})
    return list(found.values())


def missing(workload: Workload) -> list[str]:
    """Packages that the workload needs but that are not installed."""
    return [name for name in workload.packages if importlib.util.find_spec(name) is None]


def show(known: Mapping[str, Workload]) -> None:
    """Print the workloads."""
    for name, workload in known.items():
        needs = f"  needs {', '.join(missing(workload))}" if missing(workload) else ""
        click.echo(f"{name}  ({workload.domain}, {workload.kind}){needs}\n    {workload.about}")


def measure(picked: Sequence[Workload], options: Mapping[str, Any], out: Path | None) -> None:
    """Measure, and write results after every workload. Raises ValueError for invalid names and options."""
    import torch

    device = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU")
    end = time.monotonic() + options["seconds"]
    against = {name: Side(name) for name in options["against"]}
    for name in against:
        if name in SUITE_SIDES:
            raise ValueError(f"--against {name}: that is a side of the suite")
        compiler_of(name)  # raises if there is none
    named = [name.strip() for name in options["sides"].split(",") if name.strip()]
    sides = sides_for([*named, *against] if named else [], device, {**SUITE_SIDES, **against})
    tiny = device == "cpu" if options["tiny"] is None else options["tiny"]
    more = {"tiny": tiny, "calls": options["calls"], "suite": options["suite"]}
    programs = [program_of(workload, sides, **more) for workload in picked if not missing(workload)]
    skipped = {w.name: f"not installed: {', '.join(missing(w))}" for w in picked if missing(w)}
    settings = {**{key: options[key] for key in ("blocks", "seed", "seconds")}, "device": device, "tiny": tiny}
    settings["against"] = list(against)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    cores = sorted(os.sched_getaffinity(0))
    reserved, others = cores[: options["reserve"]], cores[options["reserve"] :]
    if not others:
        raise ValueError(f"--reserve {len(reserved)} leaves no core to compile on")
    os.sched_setaffinity(0, others)
    rows: dict[str, Any] = {}

    def now() -> Document:
        left_out = {each.name: "the time was up before its turn" for each in programs if each.name not in rows}
        return document(machine(device), settings, rows, left_out, skipped)

    with tempfile.TemporaryDirectory() as scratch, working("benchmark") as step:
        bench = Bench(
            Path(options["caches"] or scratch),
            device,
            blocks=options["blocks"],
            seed=options["seed"],
            step=step,
            cores=reserved,
        )
        for program, row in each_measured(bench, programs, end, options["jobs"]):
            rows[program.name] = row
            click.echo(f"[{len(rows)}/{len(programs)}] {headline(program.name, row)}", err=True)
            if out is not None:
                write(out / "results.json", now())
    if out is not None:
        write_drawn(out, now())
    click.echo(page(now(), more=sections(now())), nl=False)


def each_measured(
    bench: Bench, programs: Sequence[Program], end: float, jobs: int
) -> Iterable[tuple[Program, Document]]:
    """Each program that was measured in time, with its row."""
    for place in range(0, len(programs), jobs):
        if time.monotonic() >= end:
            return
        batch = programs[place : place + jobs]
        share = time.monotonic() + (end - time.monotonic()) * len(batch) / (len(programs) - place)
        for program, found in zip(batch, bench.measure_all(batch, end, share), strict=True):
            yield program, row_of(program, found)


# -- sections of a suite, in addition to those of a script -------------------------------------------------------------


def headline(name: str, row: Document) -> str:
    """One line on a program: PyGraph's gain over each side in wall time, or, without PyGraph's side, each side's time;
    and failures."""
    parts = [f"{side} {found['wall_us']['ratio']:.2f}×" for side, found in row["ratios"].items() if "wall_us" in found]
    if OURS not in row["sides"]:
        times = {
            side: [each[side]["wall_us"] for each in row.get("rounds", ()) if side in each] for side in row["sides"]
        }
        parts = [f"{side} {statistics.median(found):.0f} µs" for side, found in times.items() if found]
    for side, found in row["sides"].items():
        if found["status"] != "ok":
            loud = "WRONG RESULTS" if found["status"] == "wrong" else found["status"]
            parts.append(f"{side} {loud}: {gist(found['error'])[:160]}")
    return f"{name}: {'; '.join(parts) or 'nothing was measured'}"


def wall_ratio(row: Document, side: str) -> float | None:
    """A program's ratio of wall time over ``side``; None if none may be shown."""
    found = row["ratios"].get(side, {}).get("wall_us")
    return None if found is None else float(found["ratio"])


def geometric(found: Document, side: str) -> tuple[float | None, int]:
    """The geometric mean of the ratios of wall time over ``side``, and the number of programs in it."""
    ratios = [value for row in found["workloads"].values() if (value := wall_ratio(row, side)) is not None]
    return (statistics.geometric_mean(ratios) if ratios else None), len(ratios)


def overall(found: Document) -> list[str]:
    lines = []
    for side in (*BASELINES, *against_of(found)):
        mean, count = geometric(found, side)
        without = [name for name, row in found["workloads"].items() if wall_ratio(row, side) is None]
        names = ", ".join([*without, *found["left_out"], *found["skipped"]]) or "none"
        if mean is not None:
            lines.append(line(side, f"**{mean:.3f}**", str(count), names))
    return with_head(["over", "geometric mean, wall time", "workloads", "not in it"], lines)


def against_of(found: Document) -> list[str]:
    """Other backends among the sides."""
    return list(found["settings"].get("against", ()))


def losses(found: Document) -> list[str]:
    lines, known, sides = [], False, (*BASELINES, REFERENCE, *against_of(found))
    for name, row in found["workloads"].items():
        over = {side: value for side in sides if (value := wall_ratio(row, side)) is not None}
        known = known or bool(over)
        lines += [f"- **{name}**: {value:.3f} over {side}" for side, value in over.items() if value < LOSS]
    if lines:
        return ["PyGraph takes over 2 % longer than one of these (ratio of its time to PyGraph's):", "", *lines]
    return ["None: PyGraph nowhere takes over 2 % longer than these or eager."] if known else []


def whole(rows: Document) -> list[str]:
    """Table of training steps: wall time of each side over that of ``pygraph.train_step``, and peaks of memory."""
    lines, known = [], dict[str, list[float]]()
    for name, row in rows.items():
        right = {side: each for side, each in row["sides"].items() if each["status"] == "ok"}
        if STEP not in right:
            continue
        ratios = {
            side: statistics.median(found)
            for side in right
            if (
                found := [
                    r[side]["wall_us"] / r[STEP]["wall_us"] for r in row.get("rounds", ()) if side in r and STEP in r
                ]
            )
        }
        ratios |= {BEST: min(ratios[side] for side in _IN_PARTS if side in ratios)} if {*_IN_PARTS} & {*ratios} else {}
        for side, ratio in ratios.items():
            known.setdefault(side, []).append(ratio)
        peaks = [right.get(side, {}).get("peak_bytes") for side in (STEP, BASELINES[0])]
        more = [
            f"{peaks[0] / peaks[1]:.3f}" if all(peaks) else "–",
            f"{(right[STEP].get('coverage') or {}).get('share') or 0:.0%}",
        ]
        lines.append(line(name, *(f"{ratios[side]:.2f}" if side in ratios else "–" for side in _WHOLE), *more))
    if lines:
        means = {side: f"**{statistics.geometric_mean(found):.3f}**" for side, found in known.items()}
        lines.append(line("geometric mean", *(means.get(side, "–") for side in _WHOLE), "", ""))
    head = ["workload", *(f"over {side}" for side in _WHOLE), "peak memory, of default's", "captured"]
    return with_head(head, lines)


def orders(rows: Document) -> list[str]:
    lines = []
    for name, row in rows.items():
        regions = row["sides"].get(OURS, {}).get("regions", ())
        decisions = [each for region in regions for each in region.get("orders", ())]
        choices = ", ".join(f"{n} {order}" for order, n in Counter(each["order"] for each in decisions).items())
        if decisions:
            lines.append(line(name, choices, str(sum(each["calls"] for each in decisions))))
    return with_head(["workload", "decided", "calls"], lines)


def sections(found: Document) -> dict[str, Iterable[str]]:
    """Further sections of the page, by title."""
    rows = found["workloads"]
    told = {"Overall": overall(found), "Training steps as a whole": whole(rows), "Losses": losses(found)}
    return {**told, "Orders of launches": orders(rows)}


def write_drawn(out: Path, found: Document) -> None:
    """Write results, page and, if matplotlib is installed, pictures. Raises OSError."""
    pictures = draw(found, out) if importlib.util.find_spec("matplotlib") is not None else []
    write_all(out, found, {"Pictures": pictures, **sections(found)})


def read(path: Path) -> Document:
    """Read a document of a benchmark, of this schema version or the previous one. Raises ValueError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("schema") not in (SCHEMA - 1, SCHEMA):
        raise ValueError(f"{path}: no results of this version of PyGraph (schema {SCHEMA})")
    return found


def combine(documents: Sequence[Document]) -> Document:
    """One document from several, measured on one machine with the same settings; later ones take precedence.

    Raises ValueError if machines or settings differ.
    """
    first = documents[0]
    parts: dict[str, dict[str, Any]] = {"workloads": {}, "left_out": {}, "skipped": {}}
    for each in documents:
        for key, names in _BINDING.items():
            apart = [name for name in names if each[key].get(name) != first[key].get(name)]
            if apart:
                raise ValueError(f"these results do not belong together: they differ in {apart[0]}")
        for key, part in parts.items():
            part.update(each[key])
    for key in ("left_out", "skipped"):
        parts[key] = {name: why for name, why in parts[key].items() if name not in parts["workloads"]}
    return {**first, **parts}


if __name__ == "__main__":
    if sys.path[0] != str(ROOT):
        sys.path.insert(0, str(ROOT))
    main(prog_name="python -m benchmarks")
