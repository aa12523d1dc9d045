"""``docs/results.md`` and the README's table and picture, from the files in ``benchmarks/results``.

    python -m benchmarks.page [--check]

Newer results replace older ones, figure by figure: files are read in the order of ``commits.json``. It names the
measured commit, or, for files until 2026-11-29, the commit that added the file. New files are listed there by hand.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from benchmarks.pictures import timeline
from pygraph.bench.render import LOSS, line, with_head

__all__ = ["COMMITS", "RESULTS", "Results", "pages"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMITS = "commits.json"

OURS, STEP = "pygraph", "step"
PARTS = ("eager", "default", "reduce-overhead", "make-graphed-callables", "whole-step")
"""Sides with which compiled models are compared, as columns."""
MEMORY = ("default", "reduce-overhead", OURS)
"""Sides whose reserved memory is shown."""
STEPS = ("default", "reduce-overhead", "make-graphed-callables", "whole-step")
"""Sides with which whole training steps are compared."""
RANKS = ("default", "reduce-overhead", "pygraph", "measured-collectives", "step")
"""Sides of programs of several processes."""
README = {
    "bert-1": "BERT-base, batch 1",
    "gpt2-1": "GPT-2, batch 1",
    "resnet50-1": "ResNet-50, batch 1",
    "decode-kv": "decode step, KV caches written in place",
    "pointwise-256mb": "pointwise chain, new inputs of 256 MB in each call",
    "llama-1b-training": "Llama, 1 billion parameters, training step",
}
"""Rows of the README's table, by workload."""
WORDS = {"wrong": "wrong results", "does not apply": "n/a", "failed": "fails"}
"""Words in place of a ratio, by status of a side."""
SUITE = "python -m benchmarks"
COMMANDS = {
    "by_hand": "python benchmarks/by_hand.py",
    "loops": "python benchmarks/loops.py",
    "new_sizes": "python benchmarks/new_sizes.py",
    "capture-cost": "python benchmarks/capture_cost.py",
    "warm-start": "python benchmarks/warm_start.py --device cuda",
    "calibration": "pygraph calibrate",
    "distributed": "python benchmarks/distributed.py",
    "collectives": "python benchmarks/distributed.py",
    "versions": "python benchmarks/versions.py",
    "step-compile-time": "python benchmarks/compile_time.py --step WORKLOAD",
    "generate": "not kept",
}
"""Commands by prefix of a file's name; all other files are from the suite."""


@dataclass(frozen=True)
class Run:
    """A kept file of results.

    path: below ``benchmarks/results``.
    commit: by ``commits.json``; a dash where that does not list the file.
    found: its content.
    """

    path: str
    commit: str
    found: Any

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def date(self) -> str:
        return str(re.findall(r"\d{4}-\d\d-\d\d", self.path)[0])

    @property
    def machine(self) -> str:
        """GPUs, by the folder's name: ``h200x2`` means two."""
        kind, _, count = self.path.partition("-")[0].partition("x")
        return f"{count} {kind.upper()}" if count else kind.upper()

    @property
    def command(self) -> str:
        return next((command for begin, command in COMMANDS.items() if self.name.startswith(begin)), SUITE)

    @property
    def is_suite(self) -> bool:
        return isinstance(self.found, dict) and {"machine", "settings", "workloads"} <= self.found.keys()


@dataclass(frozen=True)
class Cell:
    """A figure, or a word in its place, and its run."""

    text: str
    run: Run
    ratio: float | None = None
    lost: bool = False


class Results:
    """Kept results, oldest first."""

    def __init__(self, folder: Path = RESULTS) -> None:
        commits = json.loads((folder / COMMITS).read_text(encoding="utf-8"))
        paths = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.json")) if path.name != COMMITS]
        paths.sort(key=lambda path: list(commits).index(path) if path in commits else len(commits))
        read = {path: json.loads((folder / path).read_text(encoding="utf-8")) for path in paths}
        self.runs = [Run(path, commits.get(path, "–"), found) for path, found in read.items()]
        self.used: dict[str, Run] = {}

    def named(self, begin: str) -> list[Run]:
        """Runs whose file name begins with ``begin``."""
        return [run for run in self.runs if run.name.startswith(begin)]

    @property
    def suites(self) -> list[Run]:
        return [run for run in self.runs if run.is_suite]

    def mark(self, run: Run) -> str:
        """The mark that refers to ``run`` in the list of runs."""
        self.used.setdefault(run.path, run)
        return f"<sup>{list(self.used).index(run.path) + 1}</sup>"

    def show(self, cell: Cell | None) -> str:
        if cell is None:
            return "–"
        return (f"**{cell.text}**" if cell.lost else cell.text) + self.mark(cell.run)

    @cached_property
    def parts(self) -> dict[str, dict[str, Cell]]:
        """Newest ratio of ``torch.compile(backend="pygraph")`` over each side, by workload."""
        cells: dict[str, dict[str, Cell]] = {}
        for run in self.suites:
            for name, row in run.found["workloads"].items():
                for side, each in row["sides"].items():
                    ratio = row["ratios"].get(side, {}).get("wall_us")
                    if ratio is not None:
                        cells.setdefault(name, {})[side] = ratio_cell(ratio, run)
                    elif OURS in row["sides"] and each["status"] in WORDS:
                        cells.setdefault(name, {})[side] = Cell(WORDS[each["status"]], run)
        return cells

    @cached_property
    def kinds(self) -> dict[str, str]:
        """``training`` or ``inference`` (which includes decoding), by workload."""
        rows = {name: row for run in self.suites for name, row in run.found["workloads"].items()}
        return {name: "training" if row["kind"] == "training" else "inference" for name, row in rows.items()}

    def ratios(self, kind: str, side: str) -> list[float | None]:
        """Ratios over ``side``: of ``train_step``, for all whole steps, if ``kind`` is ``step``; else of torch.compile,
        for workloads of that kind."""
        of_kind = {name: cells for name, cells in self.parts.items() if self.kinds[name] == kind}
        chosen = self.steps if kind == STEP else of_kind
        return [cells[side].ratio for cells in chosen.values() if side in cells]

    @cached_property
    def steps(self) -> dict[str, dict[str, Cell]]:
        """Newest ratio of ``pygraph.train_step`` over each side, by workload: the median within rounds."""
        cells: dict[str, dict[str, Cell]] = {}
        for run in self.suites:
            for name, row in run.found["workloads"].items():
                if row["sides"].get(STEP, {}).get("status") != "ok":
                    continue
                for side, each in row["sides"].items():
                    both = [r for r in row.get("rounds", ()) if side in r and STEP in r]
                    rounds = [r[side]["wall_us"] / r[STEP]["wall_us"] for r in both]
                    if each["status"] in WORDS:
                        cells.setdefault(name, {})[side] = Cell(WORDS[each["status"]], run)
                    elif side != STEP and rounds:
                        cells.setdefault(name, {})[side] = ratio_cell({"ratio": statistics.median(rounds)}, run)
        return cells

    def row(self, name: str, *sides: str) -> tuple[Run, Mapping[str, Any]] | None:
        """The newest measurement of a workload that has all ``sides``, with correct results."""
        for run in reversed(self.suites):
            row = run.found["workloads"].get(name)
            if row and all(row["sides"].get(side, {}).get("status") == "ok" for side in sides):
                return run, row
        return None


def ratio_cell(found: Mapping[str, Any], run: Run) -> Cell:
    """A ratio, with half of its interval if that is known."""
    text = f"{found['ratio']:.2f}"
    if found.get("interval"):
        text += f" ± {(found['interval'][1] - found['interval'][0]) / 2:.2f}"
    return Cell(text, run, found["ratio"], found["ratio"] < LOSS)


def mean(ratios: Iterable[float | None]) -> tuple[float, int]:
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known), len(known)


def megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.0f}"


# -- sections ----------------------------------------------------------------------------------------------------------


def summary(results: Results) -> list[str]:
    compiled_as = '`torch.compile(backend="pygraph")`'
    found = {f"inference: {compiled_as} over `{side}`": results.ratios("inference", side) for side in PARTS}
    found |= {f"training, in parts: {compiled_as} over `{side}`": results.ratios("training", side) for side in PARTS}
    found |= {f"training, whole: `pygraph.train_step` over `{side}`": results.ratios(STEP, side) for side in STEPS}
    means = {words: mean(ratios) for words, ratios in found.items() if any(ratios)}
    lines = [line(words, bold(ratio), str(count)) for words, (ratio, count) in means.items()]
    return with_head(["", "geometric mean of wall time", "workloads"], lines)


def bold(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio < LOSS else f"{ratio:.2f}"


def compiled(results: Results, kind: str) -> list[str]:
    lines = []
    for name, cells in sorted(results.parts.items()):
        if results.kinds[name] != kind or not any(cell.ratio for cell in cells.values()):
            continue
        newest = results.row(name, *MEMORY) or results.row(name, OURS)
        memory = [megabytes(newest[1]["sides"].get(s, {}).get("reserved_bytes")) for s in MEMORY] if newest else []
        lines.append(line(name, *(results.show(cells.get(side)) for side in PARTS), ", ".join(memory)))
    return with_head(["workload", *(f"over `{side}`" for side in PARTS), "reserved MB"], lines)


def whole(results: Results) -> list[str]:
    lines = []
    for name, cells in sorted(results.steps.items()):
        both = results.row(name, STEP, "default")
        ours, theirs = (both[1]["sides"][side].get("peak_bytes") if both else None for side in (STEP, "default"))
        share = f"{ours / theirs:.2f}" if ours and theirs else "–"
        lines.append(line(name, *(results.show(cells.get(side)) for side in STEPS), share))
    return with_head(["workload", *(f"over `{side}`" for side in STEPS), "peak memory, relative to `default`"], lines)


def orders(results: Results) -> list[str]:
    lines = []
    for cells, side in ((results.parts, "program-order"), (results.steps, "step-program-order")):
        lines += [line(name, results.show(found[side])) for name, found in cells.items() if side in found]
    return with_head(["workload", "`measured` over `program`"], sorted(lines))


CALLABLES = {
    "decode": "decoding step, attention over caches",
    "vit-b": "ViT-B",
    "lstm-20": "cuDNN's LSTM, training step with AdamW, batch 20",
    "lstm-256": "the LSTM, batch 256",
    "unet": "UNet of latent diffusion",
    "mlp": "8 linear layers",
    "gcn": "graph network, other edges in each call",
    "two-streams": "two streams",
    "held-300": "150 layers, 300 held tensors",
    "refused": "a step that is refused, over eager",
    "pieces": "17 pieces of a Llama, vLLM's interface",
    "pieces-small": "17 pieces of a smaller Llama",
}


def callables(results: Results) -> list[str]:
    newest: dict[str, tuple[Run, Any]] = {}
    for run in results.named("by_hand"):
        newest |= {name: (run, row) for name, row in run.found["rows"].items() if "ratio" in row}
    lines = []
    for name, (run, row) in newest.items():
        hosts = [f"{row[side]['host us']:,.0f}" if side in row else "–" for side in ("by hand", "ours")]
        cell = Cell(f"{row['ratio']:.2f}", run, row["ratio"], row["ratio"] < LOSS)
        lines.append(line(CALLABLES.get(name, name), results.show(cell), *hosts))
    return with_head(["callable", "over capture by hand", "µs of the host, by hand", "`pygraph.graph`"], lines)


def loops(results: Results) -> list[str]:
    newest: dict[str, tuple[Run, Any]] = {}
    for run in results.named("loops"):
        newest |= {name: (run, row) for name, row in run.found["rows"].items() if "sides" in row}
    lines = []
    for name, (run, row) in newest.items():
        ours = row["sides"]["loop"]["ms"]
        sides = [row["sides"].get(side) for side in ("replays", "by hand", "default", "reduce-overhead")]
        ratios = [side and side["ms"] / ours for side in sides]
        shown = [results.show(ratio and Cell(f"{ratio:.2f}", run, ratio, ratio < LOSS)) for ratio in ratios]
        lines.append(line(name, *shown, f"{ours:,.2f}"))
    over = ("over replays of one step", "over capture by hand", "over `default`", "over `reduce-overhead`")
    return with_head(["loop", *over, "ms"], lines)


def sizes(results: Results) -> list[str]:
    lines: list[str] = []
    prepared = [(run, row) for run in results.named("new_sizes") for row in run.found["rows"].get("prepared", ())]
    if prepared:
        run, row = prepared[-1]
        lines.append(
            f"- **Prepared sizes**{results.mark(run)}: {row['sizes']} batch sizes of a decode step with "
            f"{row['parameters'] / 1e9:.1f} billion parameters take {row['ours']['seconds']:.1f} s "
            f"(captured by hand, compared with nothing: {row['by hand']['seconds']:.1f} s) and "
            f"{megabytes(row['ours']['bytes'])} MB (by hand: {megabytes(row['by hand']['bytes'])} MB)."
        )
    words = {"position": "positions that are Python ints, in turn", "graphs": "sizes of a graph network, in turn"}
    for name, what in words.items():
        rows = [(run, row) for run in results.named("new_sizes") for row in run.found["rows"].get(name, ())]
        if rows:
            run, row = rows[-1]
            passes = ", ".join(f"{each['over default']:.2f}" for each in row["passes"])
            lines.append(f"- **{row['calls']} {what}**{results.mark(run)}, over `default`, pass by pass: {passes}.")
    for run in results.named("capture-cost")[-1:]:
        costs = [each["ratios"] for each in run.found["programs"].values()]
        once, twice = ([f"{cost[key]:.0f}" for cost in costs] for key in ("host_us captured", "host_us captured twice"))
        lines.append(
            f"- **A capture**{results.mark(run)} takes as much host time as {' and '.join(once)} uncaptured calls of "
            f"{' and '.join(run.found['programs'])}, or {' and '.join(twice)} if slots are not known yet."
        )
    return lines


def compilation(results: Results) -> list[str]:
    lines = []
    for run in results.named("warm-start")[-1:]:
        count = len(run.found["programs"])
        lines.append(
            f"- **From warm caches**{results.mark(run)}, the first call takes {run.found['warm']:.2f} times as long as "
            f"with plain Inductor, and the first replay ends after {run.found['until replay']:.2f} times as long "
            f"(geometric means of {count} programs)."
        )
    for run in {run.machine: run for run in results.named("step-compile-time")}.values():
        rows = run.found if isinstance(run.found, list) else [run.found]
        told = ", ".join(f"{row['workload']} {row['ratio']:.2f}" for row in rows)
        lines.append(f"- **`pygraph.train_step`**{results.mark(run)}, compile time over `default`'s, cold: {told}.")
    for run in results.named("calibration")[-1:]:
        error = run.found["errors"]["device"]
        lines.append(
            f"- **The device model**{results.mark(run)} predicts an operator's device time within a factor of "
            f"{error['median']:.2f} for half of {error['count']} programs, {error['tenth']:.2f} for nine in ten."
        )
    return lines


def generation(results: Results) -> list[str]:
    lines = []
    for run in results.named("generate")[-1:]:
        llama = [row for row in run.found if row["what"] == "llama"]
        for batch in sorted({row["batch"] for row in llama}):
            theirs, ours = (
                statistics.median(row["median"] for row in llama if (row["side"], row["batch"]) == (side, batch))
                for side in ("reduce-overhead", OURS)
            )
            cell = Cell(f"{theirs / ours:.2f}", run, theirs / ours, theirs / ours < LOSS)
            lines.append(line(f"batch {batch}", f"{theirs:.0f}", f"{ours:.0f}", results.show(cell)))
    return with_head(["", "`reduce-overhead`, ms", "PyGraph, ms", "over `reduce-overhead`"], lines)


def ranks(results: Results) -> list[str]:
    """For each workload, the newest run with ``default`` and the newest with captured collectives."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    runs: dict[tuple[str, str, str], Run] = {}
    for run in (*results.named("distributed"), *results.named("collectives")):
        rows = run.found if isinstance(run.found, list) else run.found["rows"]
        for row in rows:
            key = (row["workload"], run.path, str(row.get("run", row.get("version", ""))))
            groups.setdefault(key, {})[side_of(row)] = row
            runs[key] = run
    chosen: dict[tuple[str, str], tuple[str, str, str]] = {}
    for key, sides in groups.items():
        ours = {OURS, STEP, "measured-collectives"} & sides.keys()
        for kind in ("default", "measured-collectives"):
            if kind in sides and ours and all(sides[side]["right"] for side in (kind, *ours)):
                chosen[key[0], kind] = key
    lines = []
    for key in dict.fromkeys(chosen[name] for name in sorted(chosen)):
        rows = groups[key]
        best = min((rows[side]["us"] for side in RANKS[:2] if side in rows), default=math.inf)
        cells = [rank_cell(rows.get(side), best) for side in RANKS]
        lines.append(line(f"{key[0]}{results.mark(runs[key])}", *cells))
    return with_head(["workload, µs of a step", *(f"`{side}`" for side in RANKS)], lines)


def side_of(row: Mapping[str, Any]) -> str:
    """The current name of a side: captured collectives were the default for some days."""
    if any("collectives are captured" in note for note in row.get("notes", ())):
        return "measured-collectives"
    renamed = {"captured-collectives": "measured-collectives", "eager-collectives": OURS}
    side: str = row["side"]
    return renamed.get(side, side)


def rank_cell(row: Mapping[str, Any] | None, best: float) -> str:
    """A time in µs, bold if it is a loss against ``best``."""
    if row is None:
        return "–"
    text = f"{row['us']:,.0f} ({row['best_us']:,.0f})"
    return f"**{text}**" if best / row["us"] < LOSS and row["side"] not in RANKS[:2] else text


def versions(results: Results) -> list[str]:
    """Comparisons that record their versions. Pairs measured later replace earlier ones of the same workload."""
    lines = []
    for run in [run for run in results.named("versions") if "versions" in run.found]:
        pairs = {**run.found["workloads"], **run.found.get("later", {}).get("workloads", {})}
        ratios = {
            name: statistics.median(pair["ratio"] for pair in found if "ratio" in pair) for name, found in pairs.items()
        }
        overall, count = mean(ratios.values())
        apart = [f"{name} {ratio:.2f}" for name, ratio in sorted(ratios.items()) if not 0.95 <= ratio <= 1.05]
        between = f"{run.found['versions']['old']} over {run.found.get('later', run.found)['versions']['new']}"
        rest = f"Beyond 5 %: {', '.join(apart) or 'none'}."
        lines.append(f"- {between}{results.mark(run)}: {overall:.2f} over {count} workloads. {rest}")
    return lines


def losses(sections: Mapping[str, Sequence[str]]) -> list[str]:
    """Bold figures of the tables, by section and row."""
    lines = []
    for title, rows in sections.items():
        table = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows if row.startswith("|")]
        for name, *cells in table[2:]:
            lost = [
                f"{cell} {head}" if head.startswith("over") else f"{head} {cell}"
                for head, cell in zip(table[0][1:], cells, strict=True)
                if "**" in cell
            ]
            if lost:
                lines.append(f"- {title}, {name}: {', '.join(lost).replace('**', '')}")
    return lines


def runs_of(results: Results) -> list[str]:
    lines = []
    for place, run in enumerate(results.used.values(), 1):
        link = f"[{run.path}](../benchmarks/results/{run.path})"
        torch = (run.found.get("machine") or run.found).get("torch", "") if isinstance(run.found, dict) else ""
        machine = f"{run.machine}, torch {torch.partition('+')[0].partition(',')[0]}" if torch else run.machine
        command = run.command if run.command == "not kept" else f"`{run.command}`"
        lines.append(line(str(place), link, machine, run.date, run.commit, command))
    return with_head(["", "file", "machine", "date", "commit", "command"], lines)


# -- pages -------------------------------------------------------------------------------------------------------------

_HEAD = """\
# Results

`make results` writes this page from `benchmarks/results`.

Figures are ratios of wall time; above 1, PyGraph is faster. **Bold**: PyGraph takes over 2 % longer. Superscripts name
the [run](#runs). Each figure is the newest one that was measured, whatever version of PyGraph that was.

- **Each side has its own process.** In a process with another mode's graphs, replays were up to 9 % slower.
- **Blocks are interleaved.** A round has one block of each side, in random order. A block begins with three calls that
  do not count, synchronises at both ends, and lasts at least 20 ms.
- **Ratios are taken within rounds**: the median, ± half of its 95 % interval from order statistics.
- **Results are first compared with eager's.** A side with wrong results is not timed.
- **Timed processes have cores of their own**: three (`--reserve`) in runs whose names begin with `suite-` or
  `steps-suite`, and in `steps-checkpointed`; other processes may compile on the rest.
- **Kernels are configured alike**: all sides use the Triton configurations that the first one chose.

| side | |
|---|---|
| `eager`, `default` | no compiler; `torch.compile` without options |
| `reduce-overhead` | Inductor's CUDA graph trees; steps are marked, and results that a later step uses are cloned |
| `make-graphed-callables` | `torch.cuda.make_graphed_callables`, where it applies |
| `whole-step` | a whole training step, with its optimizer, captured by hand |
| `program-order` | PyGraph with `order="program"` |
| `measured-collectives` | PyGraph with `collectives="measured"` |
| `step` | `pygraph.train_step` |

`make bench-gpu` measures the suite, and `python -m benchmarks --list` shows its workloads.
[`pygraph bench`](debugging.md#is-it-faster) times a script of your own.
"""

_NOTES = {
    "Several processes": "µs of a step on the slowest rank; in brackets, the fastest block. Hosts vary between runs: "
    "compare within a row.",
    "Versions": "Time of an older version over that of a newer one, in pairs of processes.",
    "Runs": "The commit is the one that was measured. For files up to 2026-11-29, it is the one that added the file, "
    "and the measured code is slightly older.",
    "Losses": "PyGraph takes over 2 % longer.",
    "Any callable": "`pygraph.graph` against `torch.cuda.graph` by hand, with arguments copied to static buffers.",
    "Decoding with `generate`": "transformers, a Llama of 1 billion parameters, static cache, 128 tokens.",
    "Compiled models: training": "The model and the optimizer's update are compiled; the autograd engine runs on the "
    "host.",
    "Compiled models: inference": f"Reserved memory is of {', '.join(MEMORY)}.",
}


def pages() -> dict[Path, str]:
    """Texts of the generated files, by path."""
    results, readme = Results(), (ROOT / "README.md").read_text(encoding="utf-8")
    return {
        ROOT / "docs" / "results.md": page(results),
        ROOT / "docs" / "timeline.svg": picture(results),
        ROOT / "README.md": with_table(readme, results),
    }


def page(results: Results) -> str:
    """The page of results."""
    tables: dict[str, Sequence[str]] = {
        "Compiled models: inference": compiled(results, "inference"),
        "Compiled models: training": compiled(results, "training"),
        "Training steps": whole(results),
        "Launches side by side": orders(results),
        "Any callable": callables(results),
        "Loops on the device": loops(results),
        "Decoding with `generate`": generation(results),
        "Sizes that vary": sizes(results),
        "Compilation and costs": compilation(results),
        "Several processes": ranks(results),
        "Versions": versions(results),
    }
    sections = {"Summary": summary(results), "Losses": losses(tables), **tables}
    sections["Runs"] = runs_of(results)
    texts = []
    for title, lines in sections.items():
        note = f"{wrapped(_NOTES[title])}\n\n" if title in _NOTES else ""
        texts.append(f"## {title}\n\n{note}" + "\n".join(map(wrapped, lines)) + "\n")
    return "\n".join([_HEAD, *texts])


def wrapped(text: str) -> str:
    """A line of prose, or of a list, wrapped at 120 columns; a row of a table is unchanged."""
    if text.startswith("|"):
        return text
    below = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)


def picture(results: Results) -> str:
    """A call of BERT-base on both sides."""
    found = results.row("bert-1", "default", OURS)
    if found is None:
        raise ValueError("no run has bert-1 on both sides")
    run, row = found
    sides = {side: row["sides"][side] for side in ("default", OURS)}
    times = {side: (each["host_us"]["median"], each["wall_us"]["median"]) for side, each in sides.items()}
    rows = (each.found["workloads"].get("bert-1", {}) for each in reversed(results.suites))
    told = (each["sides"].get(OURS, {}).get("coverage") or {} for each in rows if each)
    launches = next(each["launches"] for each in told if "launches" in each)  # the newest run that tells it
    return timeline(times, launches, f"BERT-base, batch 1, {run.machine}, {run.date}")


def with_table(readme: str, results: Results) -> str:
    """The README with an updated table between its two comments."""
    begin, end = "<!-- results -->\n", "<!-- end of results -->"
    head, _, rest = readme.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}{table(results)}{end}{tail}" if rest else readme


def table(results: Results) -> str:
    lines, used = [], dict[str, Run]()
    for name, words in README.items():
        cells = results.parts[name]
        shown = []
        for side in ("default", "reduce-overhead"):
            cell = cells[side]
            used[cell.run.path] = cell.run
            shown.append(f"**{cell.text}**" if cell.lost else cell.text)
        lines.append(line(words, *shown))
    dates: dict[str, set[str]] = {}
    for run in used.values():
        dates.setdefault(run.machine, set()).add(run.date)
    where = [f"{machine}, {', '.join(sorted(found))}" for machine, found in sorted(dates.items())]
    text = "\n".join(with_head(["workload", "over `default`", "over `reduce-overhead`"], lines))
    means = []
    for side in ("default", "reduce-overhead"):
        (parts, many), (steps, few) = (mean(results.ratios(kind, side)) for kind in ("inference", STEP))
        told = f"**{parts:.2f}** in inference ({many}) and **{steps:.2f}** in whole training steps ({few})"
        means.append(f"over `{side}` {told}")
    said = f"Wall time divided by PyGraph's (`{SUITE}`; {'; '.join(where)}). Geometric means, with the number of "
    said += "workloads in brackets: "
    return f"{text}\n\n{wrapped(said + ', '.join(means) + '.')}\n"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; fail where a file is not as it would be made.")
def main(check: bool) -> None:
    """Write docs/results.md, docs/timeline.svg and the README's table."""
    for path, text in pages().items():
        if check and path.read_text(encoding="utf-8") != text:
            raise click.ClickException(f"{path.relative_to(ROOT)} is not what `make results` makes")
        if not check:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.page")
