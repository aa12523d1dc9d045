"""Runs the CUDA benchmark: each side of each workload in a process of its own, timed one after the other on one GPU.

    python -m benchmarks.cuda [NAME …] [--out FILE] [--seconds N] [--jobs N] [--compile-time]

First all sides are compiled, several at once, into caches on disk; then each is timed with these caches, on a GPU
that does nothing else. Sides do not share a process, because the memory pools that one of them keeps would count
against the others. ``--compile-time`` compiles them one at a time, from nothing, and reports how long that took.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cuda.measure import MODES
from benchmarks.cuda.processes import Outcome, Processes, Side
from benchmarks.cuda.results import Results
from benchmarks.cuda.workloads import WORKLOADS

COMPILE_SHARE = 0.6
"""The part of the time that compiling ahead may take; a side that is not done compiles when it is timed."""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Raises SystemExit with a message for an unknown name or a number out of range."""
    parser = argparse.ArgumentParser(prog="benchmarks.cuda", description="CUDA benchmark")
    parser.add_argument("names", nargs="*", metavar="NAME", default=[], help=f"any of {', '.join(WORKLOADS)}")
    parser.add_argument("--out", type=Path, help="where everything is written as JSON, anew after each side")
    parser.add_argument("--seconds", type=float, default=3600.0, help="what is not measured by then is left out")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile at once")
    parser.add_argument("--compile-time", action="store_true", help="measure it: one process at a time, no caches")
    parser.add_argument("--caches", type=Path, help="keep what was compiled here, and use it next time")
    chosen = parser.parse_args(argv)
    unknown = [name for name in chosen.names if name not in WORKLOADS]
    if unknown:
        parser.error(f"no workload is called {unknown[0]}; there are {', '.join(WORKLOADS)}")
    if chosen.jobs < 1 or chosen.seconds <= 0:
        parser.error("--jobs and --seconds must be positive")
    if chosen.caches is not None and chosen.compile_time:
        parser.error("--compile-time compiles from nothing: it cannot be used with --caches")
    return chosen


def sides_of(names: Sequence[str]) -> list[Side]:
    """Every side of the workloads, those of one workload next to each other."""
    return [Side(name, mode) for name in names for mode in WORKLOADS[name].modes]


def compile_order(sides: Sequence[Side]) -> list[Side]:
    """The first side of every workload first: what Triton compiles for it serves the others."""
    return sorted(sides, key=lambda side: list(MODES).index(side.mode))


def run(chosen: argparse.Namespace, processes: Processes, results: Results, sides: Sequence[Side]) -> None:
    """Both phases; after each side, what was found so far is written."""
    start = time.monotonic()
    until = start + COMPILE_SHARE * (processes.end - start)
    jobs = 1 if chosen.compile_time else chosen.jobs
    order = list(sides) if chosen.compile_time else compile_order(sides)
    save(chosen.out, results)
    for side, outcome in processes.compile_all(order, jobs, until).items():
        results.compiled(side, outcome, timed=chosen.compile_time)
    save(chosen.out, results)
    print(f"compiled {len(sides)} sides in {time.monotonic() - start:.0f} s", flush=True)

    def done(side: Side, outcome: Outcome) -> None:
        results.add(side, outcome, processes.result(side))
        save(chosen.out, results)
        if side.mode == WORKLOADS[side.workload].modes[-1]:
            print(side.workload, json.dumps(results.headline(side.workload)), flush=True)

    processes.time_each(sides, done)


def save(out: Path | None, results: Results) -> None:
    """Write the results where they were asked for."""
    if out is not None:
        results.write(out)


def main(argv: Sequence[str]) -> None:
    """Run the chosen workloads until the time is up."""
    chosen = arguments(argv)
    end = time.monotonic() + chosen.seconds
    sides = sides_of(chosen.names or list(WORKLOADS))
    results = Results(_machine(), sides, {name: workload.tolerance for name, workload in WORKLOADS.items()})
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.caches or Path(scratch)
        run(chosen, Processes(folder, end, cold=chosen.compile_time), results, sides)
    left_out = results.as_json()["left_out"]
    if left_out:
        print(f"left out: {json.dumps(left_out)}", flush=True)


def _machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
