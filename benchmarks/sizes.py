"""Programs whose sizes or numbers vary: what captures that must pay cost, and when sizes that return are replayed.

    python benchmarks/sizes.py [--device cuda] [--out FILE]

A block is compiled once and called by four layers, with PyGraph and with Inductor. Both sides take turns, call by call,
in one process. ``ratio`` is the whole time of PyGraph's calls, captures included, of Inductor's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

import pygraph
from pygraph.runtime.native_build import waiting_for_builds

WIDTH, LAYERS = 64, 4


class Block(torch.nn.Module):
    """A layer of a small network, which counts to ``number``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x + self.linear(x).relu() * number


def sizes(count: int, calls: int) -> Iterator[tuple[int, int]]:
    """Rows and numbers of ``calls`` calls that alternate between ``count`` sizes."""
    return ((100 + size, 2) for size in islice(cycle(range(count)), calls))


PROGRAMS: dict[str, Callable[[], Iterator[tuple[int, int]]]] = {
    "sizes that never return": lambda: sizes(500, 500),
    "a number that counts up": lambda: ((100, 10 + number) for number in range(500)),
    "200 sizes in turn": lambda: sizes(200, 2000),
    "30 sizes in turn": lambda: sizes(30, 30 * 60),
    "8 sizes in turn": lambda: sizes(8, 2000),
    "one size": lambda: sizes(1, 2000),
}
"""Rows and number of each call."""


def row(name: str, device: str) -> dict[str, Any]:
    """Measure one program."""
    torch._dynamo.reset()
    pygraph.reset()
    models: dict[str, torch.nn.ModuleList] = {}
    for backend in ("inductor", "pygraph"):
        models[backend] = torch.nn.ModuleList(Block() for _ in range(LAYERS)).to(device).eval()
        for block in models[backend]:
            block.compile(backend=backend, dynamic=True)

    def call(backend: str, rows: int, number: int) -> float:
        x = torch.ones(rows, WIDTH, device=device)
        start = time.perf_counter()
        for block in models[backend]:
            x = block(x, number)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {backend: [] for backend in models}
    with torch.no_grad(), waiting_for_builds():
        for rows in (5, 6, 7):  # compiles
            for backend in models:
                call(backend, rows, 3)
        before = dict(pygraph.counters())
        for rows, number in PROGRAMS[name]():
            for backend in models:
                times[backend].append(call(backend, rows, number))
    now = pygraph.counters()
    ours, theirs = times["pygraph"], times["inductor"]
    last = len(ours) * 3 // 4
    counts = {kind: now.get(kind, 0) - before.get(kind, 0) for kind in ("captures", "replays", "uncaptured")}
    return {
        "program": name,
        "ratio": sum(ours) / sum(theirs),
        "median_ratio": statistics.median(ours) / statistics.median(theirs),
        "last_quarter": sum(ours[last:]) / sum(theirs[last:]),
        **counts,
    }


def main() -> None:
    """Print a row for each program, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in PROGRAMS:
        rows.append(row(name, chosen.device))
        print(json.dumps(rows[-1]), flush=True)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
